"""The unsplit batch's random numbers for the sub-batches of a cut: what `randomness="whole"` means in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from batchsplit.cuts import Cut, SubBatch
from batchsplit.errors import CutError
from batchsplit.moving import moved
from batchsplit.randomness import WholeRandomness


class UnsplitDraws:
    """Lends each sub-batch of a cut its rows of the unsplit batch's random numbers.

    The loader batches of a group are run one after the other, so each has random numbers of its own. `plans` keeps what
    was learned of a forward for the next batch of the same shapes.
    """

    def __init__(
        self,
        cut: Cut,
        loss_fn: Callable[[Any], Any],
        model: torch.nn.Module | None,
        *,
        forward_context: Callable[[], AbstractContextManager[Any]] | None = None,
        device: Any = None,
        plans: MutableMapping[Any, Any] | None = None,
    ) -> None:
        self._streams = []
        for piece in cut._pieces:
            if piece.filling is not None:
                raise CutError(
                    'randomness="whole" with sizes="equal": filler rows have no random numbers in the unsplit batch; '
                    'write sizes="even" or sizes="full".'
                )

            def forward(leaves: list[Any], build: Any = piece.reading.root.build) -> Any:
                with nullcontext() if forward_context is None else forward_context():
                    return loss_fn(build(leaves))

            def data_for(rows: slice, piece: Any = piece) -> list[Any]:
                return moved(piece.rows(rows), device) if device is not None else piece.rows(rows)

            rows = sum(piece.spans.sizes)
            self._streams.append((rows, WholeRandomness(forward, data_for, rows, model=model, plans=plans)))
        self._begun = -1

    @contextmanager
    def of(self, sub: SubBatch) -> Iterator[None]:
        """Run forward and backward of a sub-batch inside."""
        start = 0
        for i, (rows, stream) in enumerate(self._streams):
            if sub.where.start < start + rows:
                if i > self._begun >= 0:
                    self._streams[self._begun][1].finish()
                self._begun = i
                with stream.rows(slice(sub.where.start - start, sub.where.stop - start)):
                    yield
                return
            start += rows

    def finish(self) -> None:
        """Leave the generators where the unsplit run would have left them."""
        self._streams[self._begun][1].finish()
