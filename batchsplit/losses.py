"""The losses of the sub-batches: checked, weighed by their shares, and added up to the whole batch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from batchsplit.cuts import Cut, SubBatch
from batchsplit.errors import LossError
from batchsplit.precision import SHORT, Sums

ONE = ("",)  # the name of a loss that has no terms


@dataclass
class Accumulated:
    """What the sub-batches of one batch added up to."""

    loss: Tensor  # 0-dim, detached, float32 or wider
    terms: dict[str, Tensor]
    outputs: Any = None
    bad: tuple[int, str, float] | None = None  # the first loss that is not finite: sub-batch, term, value
    bad_rank: int | None = None  # where that was, if not here
    grad_norm: Tensor | None = None  # of the whole gradient, where whoever had it added up has looked
    cut: Cut | None = None  # the cut that ran: another than the one given, where memory ran out


class Losses:
    """The losses of the sub-batches that ran, term by term, kept on their device until all have."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # ("",) for a loss without terms
        self.values: list[Tensor] = []
        self.shares: list[float] = []
        self.indices: list[int] = []  # one for each sub-batch

    def add(self, sub: SubBatch, names: tuple[str, ...], values: Sequence[Tensor], shares: Sequence[float]) -> None:
        """Note the terms of one sub-batch."""
        if not self.indices:
            self.names = names
        elif names != self.names:
            if set(names) != set(self.names):
                raise LossError(f"loss_fn returned the terms {list(names)} for {sub!r}, and {list(self.names)} before.")
            order = [names.index(name) for name in self.names]
            values, shares = [values[i] for i in order], [shares[i] for i in order]
        self.values += values
        self.shares += shares
        self.indices.append(sub.index)

    def keep(self, count: int, moved: Mapping[int, int]) -> None:
        """Forget all but the first `count` sub-batches, which now have other indices."""
        for column in (self.values, self.shares):
            del column[count * len(self.names) :]
        self.indices = [moved[i] for i in self.indices[:count]]


def weighed(loss: Any, sub: SubBatch, losses: Losses, sums: Sums | None) -> tuple[Tensor | None, float]:
    """The loss times its share, or its terms times theirs, added up; None where nothing is left to learn from.

    A term of share 0 is left out, not multiplied: its mean is 0/0, and 0 × NaN is NaN, in gradients too. The second
    result is what the gradients are yet to be multiplied by, as adding them up: 1, but for a loss of 16 bits.
    """
    share = sub.share
    # The usual case first; asking a tensor whether it is a Mapping takes ten times as long.
    if (type(loss) is not Tensor and isinstance(loss, Mapping)) or (type(share) is not float and isinstance(share, Mapping)):
        return _weighed_terms(loss, share, sub, losses, sums)
    if not isinstance(loss, Tensor) or loss.dim():
        raise LossError(_no_scalar(loss, "", sub))
    if share and not loss.requires_grad:
        raise LossError(_no_grad(sub))
    losses.add(sub, ONE, (loss.detach(),), (share,))
    if not share:
        return None, 1.0
    rest = 1.0 if sums is None or loss.dtype not in SHORT else sums.rest_of(((share, loss.dtype),))
    return loss * (share / rest), rest


def _weighed_terms(
    loss: Any, share: Any, sub: SubBatch, losses: Losses, sums: Sums | None
) -> tuple[Tensor | None, float]:
    by_name = _by_name(loss, share)
    terms = {name: loss[name] for name in by_name}
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            raise LossError(_no_scalar(term, name, sub))
    losses.add(sub, tuple(terms), [term.detach() for term in terms.values()], list(by_name.values()))
    counted = [name for name in terms if by_name[name]]
    learned = [name for name in counted if terms[name].requires_grad]
    if not counted:
        return None, 1.0
    if not learned:
        raise LossError(_no_grad(sub))
    rest = 1.0 if sums is None else sums.rest_of((by_name[name], terms[name].dtype) for name in learned)
    parts = [terms[name] * (by_name[name] / rest) for name in learned]
    return reduce(torch.add, parts), rest


def _by_name(loss: Any, share: Any) -> dict[str, float]:
    """The share of each term, in the order of the weights (or of the loss, under one weight)."""
    if not isinstance(loss, Mapping):
        raise LossError(
            f"weight names the terms {sorted(share)}, but loss_fn returned one loss: return a mapping of them."
        )
    if not isinstance(share, Mapping):
        return dict.fromkeys(loss, share)
    for name in loss.keys() - share.keys():
        raise LossError(
            f'the loss term "{name}" has no weight: add it to weight={{...}} (None for a sum, "once" for a penalty).'
        )
    for name in share.keys() - loss.keys():
        raise LossError(f'weight names a term "{name}" that loss_fn did not return; it returned {sorted(loss)}.')
    return dict(share)


def _no_scalar(term: Any, name: str, sub: SubBatch) -> str:
    what = f'the term "{name}" of sub-batch {sub.index}' if name else f"the loss of sub-batch {sub.index}"
    if not isinstance(term, Tensor):
        return f"{what} is a {type(term).__name__}: loss_fn has to return a scalar tensor."
    return f"{what} has shape {tuple(term.shape)}: reduce it, with .mean() or .sum()."


def _no_grad(sub: SubBatch) -> str:
    return (
        f"the loss of sub-batch {sub.index} has no gradient: "
        "was it detached, or computed under no_grad or with frozen parameters?"
    )


def total(losses: Losses, cut: Cut, outputs: list[Any]) -> Accumulated:
    """Σ share × loss by term and over all, with no more than one look at the device."""
    stacked = torch.stack(losses.values)
    kind, device = torch.promote_types(stacked.dtype, torch.float32), stacked.device
    values = stacked.tolist()
    # a term of share 0 is NaN by rights, and is not counted
    counted = [value * share if share else 0.0 for value, share in zip(values, losses.shares, strict=True)]
    whole = sum(counted)
    terms, count = {}, len(losses.names)
    if losses.names != ONE:
        terms = {n: torch.tensor(sum(counted[i::count]), dtype=kind, device=device) for i, n in enumerate(losses.names)}
    joined = None if all(output is None for output in outputs) else cut.join(outputs)
    result = Accumulated(torch.tensor(whole, dtype=kind, device=device), terms, joined, cut=cut)
    if not math.isfinite(whole):  # NaN and infinity come through any sum
        first = next((i for i, value in enumerate(counted) if not math.isfinite(value)), 0)
        result.bad = (losses.indices[first // count], losses.names[first % count], values[first])
    return result


def raise_unless_finite(result: Accumulated, cut: Cut) -> None:
    """Raise a LossError that names the first sub-batch whose loss is NaN or infinite."""
    if result.bad is not None:
        index, name, value = result.bad
        what = f'the term "{name}"' if name else "the loss"
        where = f"{cut[index]!r}" if result.bad_rank is None else f"sub-batch {index} of rank {result.bad_rank}"
        raise LossError(f"{what} is {value} in {where}; nothing was stepped.")
