"""What each leaf of a batch is taken for, and how many rows the batch has: every leaf is classified, none is guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from batchsplit import doubts
from batchsplit.containers import Codec, codec_of
from batchsplit.errors import LeafError
from batchsplit.layout import PER_ROW, SHARED, Axis, Layout, Marker, Packed, Path, dotted, registered, shown
from batchsplit.leaves import (
    BROADCAST,
    DECLARED_SHARED,
    OTHER_LIST,
    SCALAR,
    SCALARS,
    ByFunction,
    Dense,
    Kind,
    Own,
    PackedEntries,
    RowList,
    scalar_items,
)
from batchsplit.special import special_kind


@dataclass
class Place:
    """One place of a batch, as surveyed: a leaf, a container, or a list that may be either.

    `values` holds what stands there: one value for a batch, one a part for the outputs of several sub-batches.
    """

    path: Path
    values: list[Any]
    form: str  # "kind" (decided), "dense", "scalar", "list" (undecided), "branch" or "unknown"
    kind: Kind | None = None
    counts: list[int] = field(default_factory=list)  # rows in each value, where the form bears rows
    declared: bool = False
    codec: Codec | None = None
    keys: tuple[Any, ...] = ()
    children: list[Place] = field(default_factory=list)

    @property
    def text(self) -> str:
        return dotted(self.path)


@dataclass
class Leaf:
    """One leaf, as read."""

    path: Path
    type: type
    kind: Kind
    other: str = ""  # the `layout` line of another possible reading, where the shapes allow one

    def gather(self, value: Any, into: list[Any]) -> bool:
        into.append(value)
        return type(value) is self.type or self.kind is DECLARED_SHARED

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def build(self, values: Iterator[Any]) -> Any:
        return next(values)


class Branch:
    """One container, as read: gathers the leaves of a batch, and builds a part from theirs."""

    def __init__(self, cls: type, codec: Codec, keys: tuple[Any, ...], children: list[Leaf | Branch]) -> None:
        self.type, self.codec, self.keys, self.children = cls, codec, keys, children
        self.flat = all(isinstance(child, Leaf) for child in children)

    def gather(self, value: Any, into: list[Any]) -> bool:
        """Append the leaves in order (before them the container itself, where it is needed to build another)."""
        if type(value) is not self.type or codec_of(value) is not self.codec:
            return False
        keys, values = self.codec.take(value)
        if keys != self.keys:
            return False
        if not self.codec.plain:
            into.append(value)
        return all(child.gather(v, into) for child, v in zip(self.children, values, strict=True))

    def leaves(self) -> Iterator[Leaf]:
        if not self.codec.plain:
            yield Leaf((), self.type, DECLARED_SHARED)
        for child in self.children:
            yield from child.leaves()

    def build(self, values: Iterator[Any]) -> Any:
        original = None if self.codec.plain else next(values)
        if self.flat:
            return self.codec.make(original, self.keys, list(islice(values, len(self.children))))
        return self.codec.make(original, self.keys, [child.build(values) for child in self.children])


@dataclass
class Reading:
    """A batch as read: its structure, its leaves in order, and how many rows it has by which leaf."""

    root: Leaf | Branch
    leaves: list[Leaf]
    rows: int
    source: str

    def again(self, batch: Any) -> tuple[list[Any], int] | None:
        """The leaves and rows of a batch that reads like the last one; None where it has to be read anew."""
        values: list[Any] = []
        if not self.root.gather(batch, values):
            return None
        rows = next((n.kind.count(v) for n, v in zip(self.leaves, values, strict=True) if n.kind.bears_rows), 1)
        if rows <= 1 or not all(n.kind.fits(v, rows) for n, v in zip(self.leaves, values, strict=True)):
            return None
        return values, rows


def read(values: Sequence[Any], layout: Layout, rows: Sequence[int] | None = None, root: str = "batch") -> Reading:
    """Read a batch (one value), or the outputs of several sub-batches (whose `rows` are known).

    Raises:
        LeafError: a leaf is in doubt, or nothing bears rows.
    """
    survey = Survey(layout, values[0])
    place = survey.look((), list(values), None)
    layout.check_used(survey.used, survey.known)
    if rows is None:
        number, source = _rows_of(place, root)
        if number == 0:
            raise LeafError(f"the batch has no rows (by {source}): there is nothing to cut.")
        rows = [number]
    else:
        source = "the sub-batches"
    node = _Decide(list(rows), source, root).decide(place)
    return Reading(node, list(node.leaves()), sum(rows), source)


class Survey:
    """Walks a batch and notes what each place could be, before the number of rows is known."""

    def __init__(self, layout: Layout, batch: Any) -> None:
        self.layout, self.batch = layout, batch
        self.used: set[str] = set()
        self.known: list[str] = []
        self.memo: dict[Any, Any] = {}

    def look(self, path: Path, values: list[Any], marker: Any) -> Place:
        if self.layout:
            text = dotted(path)
            self.known.append(text)
            if text in self.layout.declared:
                self.used.add(text)
                marker = self.layout.declared[text]
        if any(type(value) is not type(values[0]) for value in values):
            names = " and ".join(sorted({type(value).__name__ for value in values}))
            raise LeafError(f"{shown(path, 'outputs')} is {names} in different sub-batches; return one type.")
        if marker is SHARED:
            return Place(path, values, "kind", DECLARED_SHARED)
        if marker is not None and not isinstance(marker, Marker):
            return Place(path, values, "kind", ByFunction(marker))
        kind = self._kind_of_type(values[0], marker)
        if kind is not None:
            return Place(path, values, "kind", kind, [kind.count(v) for v in values])
        codec = codec_of(values[0])
        if codec is not None:
            return self._container(path, values, marker, codec)
        return self._leaf(path, values, marker)

    def _kind_of_type(self, value: Any, marker: Any) -> Kind | None:
        how = registered(type(value))
        if how is not None:
            return Own(type(value), how)
        return special_kind(value) if marker in (None, PER_ROW) else None

    def _container(self, path: Path, values: list[Any], marker: Any, codec: Codec) -> Place:
        first = values[0]
        plain_tuple = type(first) is tuple
        if marker is PER_ROW and (plain_tuple or isinstance(first, list)):
            return Place(path, values, "kind", RowList(declared=True), [len(v) for v in values], declared=True)
        if isinstance(marker, Packed) and (plain_tuple or isinstance(first, list)):
            return self._packed(path, values, marker)
        undecided = marker is None and isinstance(first, list) and not self.layout.below(path)
        # default_collate hands the strings of (tensor, string) samples over as a tuple
        strings = marker is None and plain_tuple and bool(first) and all(type(x) in (str, bytes) for x in first)
        if strings or (undecided and all(scalar_items(v) for v in values)):
            return Place(path, values, "list", counts=[len(v) for v in values])
        taken = [codec.take(value) for value in values]
        keys = taken[0][0]
        if any(other != keys for other, _ in taken):
            if undecided:  # lists of different lengths: one item a row, or nothing
                return Place(path, values, "list", counts=[len(v) for v in values], codec=None)
            raise LeafError(f"{shown(path, 'outputs')} has other keys in different sub-batches; return the same ones.")
        children = [
            self.look((*path, codec.step(key)), [items[i] for _, items in taken], marker) for i, key in enumerate(keys)
        ]
        counts = [len(v) for v in values] if undecided else []
        form = "list" if undecided else "branch"
        return Place(path, values, form, counts=counts, codec=codec, keys=keys, children=children)

    def _leaf(self, path: Path, values: list[Any], marker: Any) -> Place:
        first = values[0]
        if not isinstance(first, (torch.Tensor, np.ndarray)):
            scalar = isinstance(first, SCALARS)
            if marker is PER_ROW and dotted(path) in self.used:
                raise LeafError(f"{shown(path)} is declared PER_ROW, but a {type(first).__name__} has no rows.")
            return Place(path, values, "scalar" if scalar else "unknown")
        if isinstance(marker, Packed):
            return self._packed(path, values, marker)
        if isinstance(marker, Axis) or marker is PER_ROW:
            index = marker.index if isinstance(marker, Axis) else 0
            if len(first.shape) == 0 and dotted(path) not in self.used:
                return Place(path, values, "scalar")  # a scalar beside the tensors that the marker is meant for
            if not -len(first.shape) <= index < len(first.shape):
                raise LeafError(f"{shown(path)} is declared {marker}, but its shape is {tuple(first.shape)}.")
            return Place(path, values, "kind", Dense(index), [v.shape[index] for v in values], declared=True)
        if any(len(v.shape) == 0 for v in values):
            return Place(path, values, "scalar")
        return Place(path, values, "dense", counts=[v.shape[0] for v in values])

    def _packed(self, path: Path, values: list[Any], marker: Packed) -> Place:
        kind = PackedEntries(marker, dotted(path))
        return Place(path, values, "kind", kind, [kind.rows_of(v, self.batch, self.memo) for v in values], declared=True)


def _bearers(place: Place, *, into_lists: bool = False) -> Iterator[Place]:
    """The places that bear rows for certain: tensors and such, none of them in a list that may be one item a row."""
    if place.form == "dense" or (place.form == "kind" and place.counts):
        yield place
    elif place.form == "branch" or (place.form == "list" and into_lists):
        for child in place.children:
            yield from _bearers(child, into_lists=into_lists)


def _lists(place: Place) -> Iterator[Place]:
    """The outermost undecided lists."""
    if place.form == "list":
        yield place
    for child in place.children if place.form == "branch" else ():
        yield from _lists(child)


def _rows_of(root: Place, name: str) -> tuple[int, str]:
    """The batch size, and the leaf it is known by."""
    bearers = list(_bearers(root))
    declared = [p for p in bearers if p.declared]
    certain = declared or [p for p in bearers if p.counts[0] != 1 or p.form == "kind"]
    if not certain and not bearers:
        for place in _lists(root):
            certain.extend(_proposals(place, name))
    certain = certain or bearers
    if not certain:
        raise LeafError(doubts.no_rows(root.text or name))
    sizes = {p.counts[0] for p in certain}
    if len(sizes) > 1:
        raise LeafError(doubts.disagreement([(p.path, p.values[0], p.counts[0]) for p in certain], name))
    return certain[0].counts[0], shown(certain[0].path, name)


def _proposals(place: Place, name: str) -> list[Place]:
    """What a list has to say on the number of rows where nothing outside of lists bears any."""
    rows = [place]
    if not place.children:
        return rows if place.counts[0] else []
    inner = list(_bearers(place, into_lists=True))
    sizes = {p.counts[0] for p in inner} - {1}
    families = {_family(child) for child in place.children} - {"none"}
    if len(families) > 1:  # a tensor beside a list beside ...: no list of rows
        outside = [p for child in place.children for p in _bearers(child)]
        return outside or [p for child in place.children for one in _lists(child) for p in _proposals(one, name)]
    if families == {"tensor"}:
        alike = len({p.counts[0] for p in inner}) == 1 and len(inner) == len(place.children)
        if alike:
            return inner
    elif not inner and (place.path or len({tuple(c.counts) for c in place.children if c.form == "list"}) != 1):
        return rows
    if (len(sizes) == 1 or not inner) and len(place.children) > 1:
        # [{...}, {...}], [x, y, positions (1, width)] or [("a", "b"), ("c", "d")] with nothing beside it
        raise LeafError(doubts.two_readings(place.path, place.values[0], [p.path for p in inner], name))
    return rows


def _family(place: Place) -> str:
    value = place.values[0]
    if value is None:
        return "none"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "tensor"
    return type(value).__name__


class _Decide:
    """Settles each place, now that the number of rows is known."""

    def __init__(self, rows: list[int], source: str, root: str) -> None:
        self.rows, self.source, self.root = rows, source, root

    def decide(self, place: Place) -> Leaf | Branch:
        if place.form == "list":
            return self._list(place)
        if place.form == "branch":
            return self._branch(place)
        if place.form == "scalar":
            return self._leaf(place, SCALAR)
        if place.form == "unknown":
            raise LeafError(doubts.unknown(place.path, place.values[0], self.root))
        if place.form == "kind":
            if place.counts and place.counts != self.rows:
                raise self._doubt(place)
            assert place.kind is not None
            return self._leaf(place, place.kind)
        if place.counts == self.rows:
            return self._leaf(place, Dense(), doubts.coincidence(place.path, place.values[0]))
        if set(place.counts) == {1}:
            return self._leaf(place, BROADCAST)
        raise self._doubt(place)

    def _doubt(self, place: Place) -> LeafError:
        k = next(i for i, (count, rows) in enumerate(zip(place.counts, self.rows, strict=True)) if count != rows)
        return LeafError(doubts.first_axis(place.path, place.values[k], place.counts[k], self.rows[k], self.source, self.root))

    def _list(self, place: Place) -> Leaf | Branch:
        if place.counts != self.rows or not any(self.rows):
            if place.children:
                return self._branch(place)
            if not all(scalar_items(v) for v in place.values):
                raise self._doubt(place)
            return self._leaf(place, OTHER_LIST)
        structure = bool(place.children) and self._consistent(place)
        families = {_family(child) for child in place.children} - {"none"}
        tensors = [c for c in place.children if c.form == "dense" and c.counts == self.rows]
        if structure and (len(tensors) == len(place.children) or len(families) > 1):
            node = self._branch(place)
            note = f'layout={{"{place.text}": PER_ROW}}' if max(self.rows) > 1 else ""
            for leaf in node.leaves():
                leaf.other = leaf.other or note
            return node
        other = doubts.structure_line(p.path for p in _bearers(place, into_lists=True)) if structure else ""
        return self._leaf(place, RowList(), other)

    def _consistent(self, place: Place) -> bool:
        """Could a list be structure, every tensor in it one of all rows?"""
        bearers = list(_bearers(place, into_lists=True))
        return any(p.counts == self.rows for p in bearers) and all(
            p.counts == self.rows or (set(p.counts) == {1} and p.form == "dense") or p.form == "list" for p in bearers
        )

    def _branch(self, place: Place) -> Branch:
        assert place.codec is not None
        children = [self.decide(child) for child in place.children]
        return Branch(type(place.values[0]), place.codec, place.keys, children)

    def _leaf(self, place: Place, kind: Kind, other: str = "") -> Leaf:
        return Leaf(place.path, type(place.values[0]), kind, other)
