"""One batch, cut: its sub-batches, and what they are parts of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from batchsplit import joining
from batchsplit.explain import explain
from batchsplit.group import Group
from batchsplit.layout import Layout
from batchsplit.leaves import Spans
from batchsplit.moving import moved, pinned
from batchsplit.plan import ranges
from batchsplit.reading import Reading
from batchsplit.shapes import Filling
from batchsplit.sharing import Shares

if TYPE_CHECKING:
    from batchsplit.cutter import BatchCutter


class SubBatch:
    """Some rows of a batch, at the batch's own padding. Read-only; its data are views of the batch.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter
        >>> first, last = BatchCutter(rows=2).cut({"x": torch.arange(3)})
        >>> first.data, first.rows, first.where, first.share == 2 / 3, last.is_last
        ({'x': tensor([0, 1])}, 2, slice(0, 2, None), True, True)
    """

    __slots__ = ("_cut", "_data", "_index")  # made by the thousand, so nothing is worked out before it is asked for

    def __init__(self, cut: Cut, index: int, data: Any) -> None:
        self._cut = cut
        self._index = index
        self._data = data

    @property
    def data(self) -> Any:
        """The rows themselves: a new container of the batch's type, the tensors in it views of the batch."""
        return self._data

    @property
    def index(self) -> int:
        """Which sub-batch this is, from 0."""
        return self._index

    @property
    def rows(self) -> int:
        """How many rows (of the batch: filler rows, under `sizes="equal"`, are not counted)."""
        return self._cut._sizes[self._index]

    @property
    def filler(self) -> int:
        """How many rows of its data are filler, after its own; 0 but for `sizes="equal"`."""
        return self._cut._filler(self._index)

    @property
    def where(self) -> slice:
        """Which rows of the batch."""
        return self._cut._where(self._index)

    @property
    def count(self) -> int:
        """How many sub-batches the batch was cut into."""
        return len(self._cut)

    @property
    def is_first(self) -> bool:
        """Is this the first sub-batch?"""
        return self._index == 0

    @property
    def is_last(self) -> bool:
        """Is this the last sub-batch?"""
        return self._index == len(self._cut) - 1

    @property
    def weight(self) -> Any:
        """Its part of the loss's denominator (a mapping of them for named terms; None for a sum)."""
        return self._cut._shares.weight(self._index)

    @property
    def share(self) -> Any:
        """Its weight over the whole batch's: what to multiply its mean loss by (a mapping for named terms)."""
        return self._cut._shares.share(self._index)

    def to(self, device: Any, non_blocking: bool = False) -> SubBatch:
        """The same sub-batch with its tensors on `device`; those that are there already are not copied."""
        return SubBatch(self._cut, self._index, moved(self.data, device, non_blocking))

    def pin_memory(self) -> SubBatch:
        """The same sub-batch in page-locked memory, from where it gets to a GPU while that computes."""
        return SubBatch(self._cut, self._index, pinned(self.data))

    def __repr__(self) -> str:
        return f"SubBatch({self.index + 1} of {self.count}, {_plural(self.rows, 'row')}, {self.where.start}:{self.where.stop})"


class Cut(Sequence[SubBatch]):
    """The sub-batches of one batch: sized, indexable, iterable again and again.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter
        >>> cut = BatchCutter(rows=2).cut({"x": torch.arange(5)})
        >>> len(cut), cut.rows, cut.weight, [sub.rows for sub in cut]
        (3, 5, 5, [2, 2, 1])
        >>> cut.join([sub.data["x"] * 10 for sub in cut])
        tensor([ 0, 10, 20, 30, 40])
    """

    def __init__(self, batch: Any, pieces: list[Piece], cutter: BatchCutter, shares: Shares) -> None:
        self.batch = batch
        self._pieces, self._cutter = pieces, cutter
        self._sizes = pieces[0].spans.sizes if len(pieces) == 1 else [n for piece in pieces for n in piece.spans.sizes]
        self._shares = shares

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return sum(self._sizes)

    @property
    def weight(self) -> Any:
        """The whole batch's denominator (a mapping for named terms; None for a sum)."""
        return self._shares.whole

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> SubBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[SubBatch]: ...
    def __getitem__(self, index: int | slice) -> SubBatch | list[SubBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        try:
            which = range(len(self))[index]
        except IndexError:
            raise IndexError(f"sub-batch {index} of {len(self)}") from None
        return SubBatch(self, which, self._data(which))

    def __iter__(self) -> Iterator[SubBatch]:
        datas = chain.from_iterable(map(Piece.datas, self._pieces))
        return map(SubBatch, repeat(self), count(), datas)

    def _again(self, sizes: Sequence[Sequence[int]]) -> Cut:
        """The same batch cut anew, each loader batch in these sizes; weights are parts of the same whole."""
        pieces = [
            Piece(piece.reading, piece.leaves, Spans(piece.spans.batch, list(own)))
            for piece, own in zip(self._pieces, sizes, strict=True)
        ]
        return Cut(self.batch, pieces, self._cutter, self._shares.again(pieces))

    def _unfilled(self) -> Cut:
        """The same cut without filler rows."""
        filled = any(piece.filling is not None for piece in self._pieces)
        return self._again([piece.spans.sizes for piece in self._pieces]) if filled else self

    def pin_memory(self) -> Cut:
        """The same cut of the same batch, in page-locked memory: what a DataLoader with `pin_memory=True` calls."""
        pieces = [piece.of(pinned(piece.spans.batch)) for piece in self._pieces]
        batches = [piece.spans.batch for piece in pieces]
        whole = Group(tuple(batches)) if isinstance(self.batch, Group) else batches[0]
        return Cut(whole, pieces, self._cutter, self._shares.again(pieces))

    def __reduce__(self) -> Any:
        # What stands in a batch is told apart by objects that know themselves, so another process reads it anew.
        sizes = [piece.spans.sizes for piece in self._pieces]
        filled = any(piece.filling is not None for piece in self._pieces)
        return _cut_again, (self._cutter, self.batch, self._shares.given, sizes, filled)

    def _over(self, wholes: Sequence[float], ranks: int) -> Cut:
        """The same cut, its weights parts of what all ranks have together."""
        return Cut(self.batch, self._pieces, self._cutter, self._shares.over(wholes, ranks))

    def _filler(self, index: int) -> int:
        for piece in self._pieces:
            if index < len(piece.spans.sizes):
                return piece.filler(index)
            index -= len(piece.spans.sizes)
        raise IndexError(index)

    @cached_property
    def _slices(self) -> list[slice]:
        return ranges(self._sizes)

    def _where(self, index: int) -> slice:
        return self._slices[index]

    def _data(self, index: int) -> Any:
        for piece in self._pieces:
            if index < len(piece.spans.sizes):
                return piece.data(index)
            index -= len(piece.spans.sizes)
        raise IndexError(index)

    def join(self, outputs: Sequence[Any], layout: Mapping[str, Any] | None = None) -> Any:
        """Put the outputs of the sub-batches together again, rows in the batch's order.

        `outputs` holds one output for each sub-batch, in order: tensors, arrays, lists or containers of them, with as many
        rows as their sub-batch. Scalars of floating type are what a loss is: they are added up, each times its share.
        `layout` declares leaves of the outputs as a cutter's layout does leaves of a batch. For a `group`, the result is
        a list with one joined output for each loader batch, since these differ in padding.

        Raises:
            CutError: another number of outputs than of sub-batches, or a leaf whose rows are in doubt.
        """
        return joining.join_outputs(self, list(outputs), Layout(layout))

    def explain(self) -> str:
        """What each leaf of the batch was taken for and why, and the sizes of the sub-batches, as text."""
        return explain(self)

    def __repr__(self) -> str:
        return f"Cut({_plural(self.rows, 'row')} in {_plural(len(self), 'sub-batch')}: {_sizes_text(self._sizes)})"


class Piece:
    """The cut of one loader batch: its reading, and a column of parts for each leaf."""

    def __init__(self, reading: Reading, leaves: list[Any], spans: Spans, filling: Filling | None = None) -> None:
        self.reading, self.leaves, self.spans, self.filling = reading, leaves, spans, filling
        self.columns = [leaf.kind.cut(value, spans) for leaf, value in zip(reading.leaves, leaves, strict=True)]

    def of(self, batch: Any) -> Piece:
        """The same piece of a batch that reads the same."""
        leaves: list[Any] = []
        self.reading.root.gather(batch, leaves)
        return Piece(self.reading, leaves, Spans(batch, self.spans.sizes), self.filling)

    def filler(self, index: int) -> int:
        """How many rows a sub-batch is filled up with."""
        return 0 if self.filling is None else self.filling.size - self.spans.sizes[index]

    def data(self, index: int) -> Any:
        if self.filling is not None:
            return self.filling.data(self, index)
        return self.reading.root.build([column[index] for column in self.columns])

    def datas(self) -> Iterator[Any]:
        """The data of each sub-batch."""
        if self.filling is not None:
            return map(self.data, range(len(self.spans.sizes)))
        return self.reading.root.build_all(zip(*self.columns, strict=True))

    def rows(self, rows: slice) -> list[Any]:
        """The leaves of any range of rows."""
        sizes = [rows.start, rows.stop - rows.start, sum(self.spans.sizes) - rows.stop]
        spans = Spans(self.spans.batch, [size for size in sizes if size])
        which = 0 if rows.start == 0 else 1
        return [leaf.kind.cut(value, spans)[which] for leaf, value in zip(self.reading.leaves, self.leaves, strict=True)]


def _cut_again(cutter: BatchCutter, batch: Any, given: Any, sizes: list[list[int]], filled: bool) -> Cut:
    """A cut that came from another process."""
    cut = cutter.cut(batch, given)
    same = [piece.spans.sizes for piece in cut._pieces] == sizes
    if not same:
        cut = cut._again(sizes)
    return cut if filled else cut._unfilled()


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def _sizes_text(sizes: Sequence[int]) -> str:
    """Sizes in few words: `3 × 8 + 2`."""
    values, counts = np.unique(sizes, return_counts=True)
    return " + ".join(f"{c} × {v}" if c > 1 else f"{v}" for v, c in zip(values[::-1], counts[::-1], strict=True))
