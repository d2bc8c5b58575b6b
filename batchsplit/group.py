"""Several loader batches taken as one mathematical batch, each with its own padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchsplit.errors import CutError
from batchsplit.layout import Layout
from batchsplit.plan import check_limit
from batchsplit.reading import read


@dataclass(frozen=True)
class Group:
    """Loader batches that one optimizer step averages over; a cutter cuts it like any other batch."""

    batches: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class group:
    """Take several batches of a loader as one mathematical batch, each with its own padding.

    Give `batches`, how many make a group, or `rows`: a group is then full with the first batch that brings it to so many
    rows. The last group holds what is left, and its shares come from what it holds. A loader batch is never divided
    between groups, and nothing is read ahead. `layout` declares leaves for counting rows, as a cutter's does.

    Raises:
        CutError: neither or both of `batches` and `rows`, or one that is not a whole number of at least 1.
        TypeError: `len()` of a group by rows, or over a loader without a length.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, group
        >>> loader = [torch.rand(5, 3), torch.rand(5, 4), torch.rand(2, 3)]
        >>> [len(BatchCutter(rows=4).cut(batch)) for batch in group(loader, batches=2)]
        [4, 1]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batches: int | None = None,
        *,
        rows: int | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        if (batches is None) == (rows is None):
            raise CutError("group(loader, ...): give either batches= or rows=.")
        self.loader = loader
        self.batches = None if batches is None else check_limit("batches", batches)
        self.rows = None if rows is None else check_limit("rows", rows)
        self.layout = Layout(layout)

    def __len__(self) -> int:
        if self.batches is None:
            raise TypeError("a group by rows has no length: it depends on the batches to come")
        return -(-len(self.loader) // self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Group]:
        held: list[Any] = []
        rows = 0
        for batch in self.loader:
            held.append(batch)
            if self.rows is not None:
                rows += read([batch], self.layout).rows
            if len(held) == self.batches or (self.rows is not None and rows >= self.rows):
                yield Group(tuple(held))
                held, rows = [], 0
        if held:
            yield Group(tuple(held))

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset, those of them that ask for it, which epoch is to come."""
        set_epoch(self.loader, epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on a loader, or else on whichever of its samplers and dataset have it."""
    if callable(getattr(loader, "set_epoch", None)):
        loader.set_epoch(epoch)
        return
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)  # type: ignore[union-attr]
    dataset = getattr(loader, "dataset", None)
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)  # type: ignore[union-attr]
