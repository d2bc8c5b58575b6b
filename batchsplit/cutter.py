"""Cutting one padded mathematical batch into sub-batches that keep its padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count, repeat
from typing import Any, Literal, overload

import numpy as np

from batchsplit import joining
from batchsplit.area import AreaOf, check_area_of, width_of
from batchsplit.errors import CutError, LeafError
from batchsplit.explain import explain
from batchsplit.group import Group
from batchsplit.layout import Layout
from batchsplit.leaves import Spans
from batchsplit.moving import moved, pinned
from batchsplit.plan import check_limit, even_sizes, limited_sizes, ranges, shared_out
from batchsplit.reading import Reading, read
from batchsplit.shapes import Filling, blanks, shape_keys
from batchsplit.sharing import Shares
from batchsplit.weights import Weight, check_weight, row_weight

PLANS = 8  # readings of the last batch structures that a cutter keeps, to be tried on the next batch


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


class BatchCutter:
    """Cuts padded batches into sub-batches that fit the hardware and keep the batch's padding.

    Give one limit: `rows` (at most so many rows a sub-batch), `area` (at most so many padded positions: rows × width) or
    `parts` (exactly so many sub-batches, as far as there are rows); without one a batch stays whole. With `rows="auto"`
    or `area="auto"` a `StepDriver` finds out how many rows of each width fit in memory (`cut` alone leaves the batch
    whole); `area="auto"` insists on a width. A row that is wider than `area` by itself is an error, or with
    `oversize="alone"` a sub-batch of its own. `weight` is the denominator of your mean loss (`row_weight`,
    `label_weight(...)`, `mask_weight(...)`, a function of a sub-batch's data, or a mapping of them by the names of loss
    terms; None for a sum). `layout` declares leaves by path. `sizes="even"` gives sizes that differ by at most 1,
    `"full"` full ones and a rest, `"equal"` full ones only: the rest is filled up with rows that the loss leaves out, by
    the labels or the mask that `weight` counts (where it counts neither, a rest is an error). `area_of` names the leaves whose widths are added up to the width of a row (a path,
    several, or a function of the batch); by default it is the widest second axis of ids and masks, or of features where
    there are none (`explain()` says which).

    Raises:
        CutError: two limits at once, a limit that is not a whole number of at least 1, or an argument of another kind.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter
        >>> batch = {"x": torch.rand(10, 3), "y": torch.rand(10)}
        >>> [sub.rows for sub in BatchCutter(rows=4).cut(batch)]
        [4, 3, 3]
        >>> [sub.rows for sub in BatchCutter(rows=4, sizes="full").cut(batch)]
        [4, 4, 2]
    """

    def __init__(
        self,
        rows: int | Literal["auto"] | None = None,
        *,
        area: int | Literal["auto"] | None = None,
        parts: int | None = None,
        weight: Weight | Mapping[str, Weight] = row_weight,
        layout: Mapping[str, Any] | None = None,
        sizes: Literal["even", "full", "equal"] = "even",
        area_of: AreaOf = None,
        oversize: Literal["raise", "alone"] = "raise",
    ) -> None:
        given = (("rows", rows), ("area", area), ("parts", parts))
        limits: dict[str, Any] = {name: value for name, value in given if value is not None}
        if len(limits) > 1:
            raise CutError(f"{' and '.join(f'{k}={v!r}' for k, v in limits.items())}: two limits at once; give one of them.")
        for name, value in limits.items():
            if value != "auto" or name == "parts":
                limits[name] = check_limit(name, value)
        if sizes not in ("even", "full", "equal"):
            raise CutError(f'sizes={sizes!r}: write sizes="even" or sizes="full", or sizes="equal" to have the last one filled up.')
        if sizes == "equal" and (not limits or "auto" in limits.values()):
            raise CutError('sizes="equal" wants to know the size: give rows=, area= or parts= as a number.')
        if parts is not None and sizes == "full":
            raise CutError('parts= with sizes="full": a number of parts is cut evenly; leave sizes out.')
        if oversize not in ("raise", "alone"):
            raise CutError(f'oversize={oversize!r}: write oversize="raise" or oversize="alone".')
        if oversize == "alone" and area in (None, "auto"):
            raise CutError('oversize="alone" says what becomes of a row above a limit on area: give area= as well.')
        check_area_of(area_of)
        check_weight(weight)
        self.rows, self.area, self.parts = limits.get("rows"), limits.get("area"), limits.get("parts")
        self.auto = "auto" in (self.rows, self.area)
        self.weight, self.sizes, self.area_of, self.oversize = weight, sizes, area_of, oversize
        self.layout = Layout(layout)
        self._plans: list[Reading] = []
        self._shapes: dict[tuple[int, ...], None] = {}

    def cut(self, batch: Any, whole_weight: Any = None) -> Cut:
        """Cut one batch.

        `batch` is any nested container of tensors, arrays and lists, or a `Group` from `group`. `whole_weight` is the
        denominator where it was reduced elsewhere (over several batches or ranks): a number or 0-dim tensor, or a
        mapping of them by term.

        Raises:
            CutError: a leaf in doubt, a batch without rows, a row wider than `area`.
        """
        if isinstance(batch, Cut):
            raise CutError("this batch is cut already; give the batch itself.")
        batches = batch.batches if isinstance(batch, Group) else [batch]
        found = [self._read(one) for one in batches]
        try:
            pieces = self._pieces(found)
        except LeafError:
            self._plans.clear()  # a plan may have fitted but for its counts of packed entries: let a new reading say
            pieces = self._pieces([self._read(one) for one in batches])
        return Cut(batch, pieces, self, Shares(pieces, self.weight, whole_weight))

    def _pieces(self, found: Sequence[tuple[Reading, list[Any], int, Any]]) -> list[Piece]:
        rows = [rows for _, _, rows, _ in found]
        parts = shared_out(self.parts, rows) if self.parts is not None else [0] * len(rows)
        if self.parts is not None and len(rows) > self.parts:
            raise CutError(f"parts={self.parts}: a group of {len(rows)} batches of their own padding can't be in fewer parts.")
        pieces = []
        for (reading, leaves, total, one), n in zip(found, parts, strict=True):
            sizes, size = (even_sizes(total, n), -(-total // n)) if n else self._sizes(reading, leaves, total, one)
            pieces.append(self._piece(reading, leaves, Spans(one, sizes), size))
        return pieces

    def _piece(self, reading: Reading, leaves: list[Any], spans: Spans, size: int) -> Piece:
        """The cut of one loader batch, filled up to `size` rows where all are to be equal."""
        filling = None
        if self.sizes == "equal" and min(spans.sizes) < size:
            filling = Filling(size, blanks(self.weight))
        piece = Piece(reading, leaves, spans, filling)
        if filling is not None:
            filling.check(piece)
        rows = spans.sizes if filling is None else [size]
        self._shapes.update(dict.fromkeys(shape_keys(rows, leaves, [leaf.kind for leaf in reading.leaves])))
        return piece

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of sub-batches so far: rows (filler too), then the sizes of the tensors' other axes, each size once.

        `(8, 512)` are 8 rows of width 512. A compiled model is compiled once for each.
        """
        return list(self._shapes)

    def _read(self, batch: Any) -> tuple[Reading, list[Any], int, Any]:
        for i, reading in enumerate(self._plans):
            found = reading.again(batch)
            if found is not None:
                if i:  # the last one used is tried first
                    self._plans.insert(0, self._plans.pop(i))
                return reading, found[0], found[1], batch
        reading = read([batch], self.layout)
        leaves: list[Any] = []
        reading.root.gather(batch, leaves)
        self._plans = [reading, *self._plans[: PLANS - 1]]
        return reading, leaves, reading.rows, batch

    def _sizes(self, reading: Reading, leaves: list[Any], rows: int, batch: Any) -> tuple[list[int], int]:
        """The rows of each sub-batch, and the most that one may have."""
        if isinstance(self.rows, int):
            return limited_sizes(rows, self.rows, self.sizes), self.rows
        if self.area is None:
            return [rows], rows
        width, text = width_of(reading, leaves, batch, self.area_of)
        if self.area == "auto":
            return [rows], rows
        if width > self.area and self.oversize == "raise":
            raise CutError(
                f"area={self.area}: one row is {width} wide ({text}) and does not fit; raise area to {width} or more, "
                'or write oversize="alone" to let such a row be a sub-batch of its own.'
            )
        most = max(self.area // max(width, 1), 1)
        return limited_sizes(rows, most, self.sizes), most

    def over(self, loader: Any) -> Any:
        """Wrap a loader: one iteration gives the Cut of one of its batches (see `CutLoader`)."""
        from batchsplit.loader import CutLoader  # the loader stands on the cutter

        return CutLoader(loader, self)

    def __repr__(self) -> str:
        limit = next((f"{n}={getattr(self, n)!r}" for n in ("rows", "area", "parts") if getattr(self, n) is not None), "rows=None")
        return f"BatchCutter({limit})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": []}


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
