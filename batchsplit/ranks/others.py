"""The other processes of a training: each is told how a step stands here, in one small collective at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from batchsplit.cuts import Cut
from batchsplit.errors import CutError, OtherRankError
from batchsplit.losses import Accumulated

READY, FAILED, ENDED = 0, 1, 2
ROOM = 64  # numbers in a message: all are of one length, for a rank that failed can't know how much others have to say


class Ended(CutError):
    """The loader of some rank has no batch left."""


@dataclass(frozen=True)
class Word:
    """What one rank says."""

    rank: int
    status: int
    values: list[float]


class Ranks:
    """The processes whose gradients are averaged with this one's; where it is alone, nothing is sent.

    `groups` are the process groups to go through, one after the other (a mesh has one for each axis), `device` is where
    their backend takes tensors.

    Example:
        >>> from batchsplit import BatchCutter
        >>> from batchsplit.ranks import Ranks
        >>> ranks = Ranks()
        >>> cut, most = ranks.agreed(lambda: BatchCutter(rows=2).cut([1, 2, 3]))
        >>> ranks.count, cut.weight, most
        (1, 3, 2)
    """

    def __init__(self, groups: Sequence[Any] = (), device: Any = "cpu") -> None:
        self.groups, self.device = groups, device
        self.count = math.prod(group.size() for group in groups)

    def tell(self, status: int, values: Sequence[float] = ()) -> list[Word]:
        """Tell all ranks something, and hear what each has to say, in the same order everywhere."""
        head = [torch.distributed.get_rank(), status, len(values)]
        room = ROOM - len(head)
        heard = self._gather([*head, *values[:room]], ROOM)
        most = max(int(line[2]) for line in heard)
        if most > room:  # everyone knows it now
            more = self._gather(values[room:], most - room)
            heard = [line + rest for line, rest in zip(heard, more, strict=True)]
        return [Word(int(rank), int(kind), values[: int(n)]) for rank, kind, n, *values in heard]

    def _gather(self, line: Sequence[float], length: int) -> list[list[float]]:
        padded = [*line, *[0.0] * (length - len(line))]
        lines = torch.tensor([padded], dtype=torch.float64, device=self.device)
        for group in self.groups:
            parts = [torch.empty_like(lines) for _ in range(group.size())]
            torch.distributed.all_gather(parts, lines, group=group)
            lines = torch.cat(parts)
        return lines.tolist()

    def fail(self) -> None:
        """Tell the others that this rank has an error of its own, which is about to be raised."""
        if self.count > 1:
            with suppress(Exception):  # they may be gone, and the error at hand says more
                self.tell(FAILED)

    def agreed(self, prepare: Callable[[], Cut]) -> tuple[Cut, int]:
        """Make a cut, with shares of the batch of all ranks together; and how many sub-batches the largest cut has.

        A share is the sub-batch's weight over the weight on all ranks, times their number, because gradients are
        averaged over ranks. One collective for all terms.

        Raises:
            CutError: whatever `prepare` raises, here or on another rank; the weight on all ranks is 0.
            Ended: another rank has no batch any more.
        """
        if self.count == 1:
            cut = prepare()
            return cut, len(cut)
        try:
            cut = prepare()
            weights = cut._shares.local()
        except Exception:
            self.fail()
            raise
        words = self._heard(self.tell(READY, [len(cut), *weights]))
        ended = [word.rank for word in words if word.status == ENDED]
        if ended:
            raise Ended(f"rank {ended[0]} has no batch left, so there is none to step on together.")
        if len({len(word.values) for word in words}) > 1:
            raise CutError("ranks have weights for different terms (or whole_weight on some only): give all the same.")
        counts, *columns = zip(*(word.values for word in words), strict=True)
        return cut._over([math.fsum(column) for column in columns], self.count), int(max(counts))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches; the others are told where they end, or fail."""
        if self.count == 1:
            yield from loader
            return
        try:
            yield from loader
        except Exception:
            self.fail()
            raise
        self._heard(self.tell(ENDED))

    def union(self, result: Accumulated) -> Accumulated:
        """The loss of the batch of all ranks, from that of each: their mean, by how shares are made.

        Raises:
            OtherRankError: another rank has failed in this step.
        """
        if self.count == 1:
            return result
        sub, name, value = result.bad or (-1, "", 0.0)
        names = list(result.terms)
        sums = torch.stack([result.loss, *result.terms.values()])
        place = names.index(name) if name else -1
        words = self._heard(self.tell(READY, [sub, place, value, *sums.tolist()]))
        if len({len(word.values) for word in words}) > 1:
            raise CutError("loss_fn returned other terms on other ranks.")
        means = [
            math.fsum(column) / self.count for column in list(zip(*(word.values for word in words), strict=True))[3:]
        ]
        loss, *terms = torch.tensor(means, dtype=sums.dtype, device=sums.device).unbind()
        result.loss, result.terms = loss, dict(zip(names, terms, strict=True))
        bad = next((word for word in words if word.values[0] >= 0), None)
        if bad is not None and result.bad is None:
            sub, place, value = bad.values[:3]
            result.bad, result.bad_rank = (int(sub), names[int(place)] if place >= 0 else "", value), bad.rank
        return result

    def _heard(self, words: list[Word]) -> list[Word]:
        failed = [word.rank for word in words if word.status == FAILED]
        if failed:
            raise OtherRankError(
                f"rank {failed[0]} failed in this step, for a reason that it reports itself; nothing was stepped here either."
            )
        return words


def several_ranks() -> bool:
    """Do other processes take part in the training?"""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
