"""Cutting one padded mathematical batch into sub-batches that keep its padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from batchsplit.area import AreaOf, check_area_of, width_of
from batchsplit.cuts import Cut, Piece
from batchsplit.errors import CutError, LeafError
from batchsplit.group import Group
from batchsplit.layout import Layout
from batchsplit.leaves import Spans
from batchsplit.plan import check_limit, even_sizes, limited_sizes, shared_out
from batchsplit.reading import Reading, read
from batchsplit.shapes import Filling, blanks, shape_keys
from batchsplit.sharing import Shares
from batchsplit.weights import Weight, check_weight, row_weight

PLANS = 8  # readings of the last batch structures that a cutter keeps, to be tried on the next batch


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
