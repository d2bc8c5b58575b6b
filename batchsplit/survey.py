"""A walk over a batch that notes what each place could be, before the number of rows is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from batchsplit.codecs import Codec
from batchsplit.containers import codec_of
from batchsplit.declared import ByFunction, Own, PackedEntries
from batchsplit.doubts import an
from batchsplit.errors import LeafError
from batchsplit.layout import PER_ROW, SHARED, Axis, Layout, Marker, Packed, Path, dotted, normal, registered, shown
from batchsplit.leaves import DECLARED_SHARED, LISTS, SCALARS, Dense, Kind, Refused, RowList, scalar_items, strings
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

    @property
    def broadcasts(self) -> bool:
        """May a single row stand for all of them?"""
        return self.form == "dense" or (self.kind is not None and self.kind.broadcasts and not self.declared)


def bears_rows(place: Place) -> bool:
    """Is there anything in it that has rows?"""
    return bool(place.counts) or any(map(bears_rows, place.children))


class Survey:
    """Walks a batch, or the outputs of several sub-batches."""

    def __init__(self, layout: Layout, batch: Any) -> None:
        self.layout, self.batch = layout, batch
        self.used: set[str] = set()
        self.known: list[str] = []
        self.memo: dict[Any, Any] = {}
        self.inside: set[int] = set()  # ids of the containers around a place

    def look(self, path: Path, values: list[Any], marker: Any) -> Place:
        if self.layout:
            text = normal(dotted(path))
            self.known.append(dotted(path))
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
        codec = codec_of(values[0])
        kind = self._kind_of_type(path, values[0])
        if kind is not None and not (codec is not None and self.layout.below(path)):
            return self._special(path, values, marker, kind)
        return self._leaf(path, values, marker) if codec is None else self._container(path, values, marker, codec)

    def _kind_of_type(self, path: Path, value: Any) -> Kind | None:
        how = registered(type(value))
        return special_kind(value) if how is None else Own(type(value), how)

    def _special(self, path: Path, values: list[Any], marker: Any, kind: Kind) -> Place:
        if isinstance(kind, Refused):
            return Place(path, values, "unknown", kind)
        if isinstance(marker, Packed) or (isinstance(marker, Axis) and marker.index != 0):
            name = type(values[0]).__name__
            raise LeafError(
                f"{shown(path)} is declared {marker}, but a {name} is cut by its own rows; "
                f'leave it out of the layout, or write layout={{"{dotted(path)}": PER_ROW}}.'
            )
        counts = [kind.count(v) for v in values] if kind.bears_rows else []
        return Place(path, values, "kind", kind, counts, declared=marker is not None)

    def _container(self, path: Path, values: list[Any], marker: Any, codec: Codec) -> Place:
        first = values[0]
        plain_tuple = type(first) is tuple
        rows_or_entries = isinstance(first, LISTS) or (plain_tuple and self._declared(path))
        if marker is PER_ROW and rows_or_entries:
            return Place(path, values, "kind", RowList(declared=True), [len(v) for v in values], declared=True)
        if isinstance(marker, Packed) and rows_or_entries:
            return self._packed(path, values, marker)
        undecided = marker is None and isinstance(first, LISTS) and not self.layout.below(path)
        # default_collate hands the strings of (tensor, string) samples over as a tuple
        names = marker is None and plain_tuple and all(strings(v) for v in values) and not self.layout.below(path)
        if names or (undecided and all(scalar_items(v) for v in values)):
            return Place(path, values, "list", counts=[len(v) for v in values])
        taken = [codec.take(value) for value in values]
        keys = taken[0][0]
        if any(other != keys for other, _ in taken):
            if undecided:  # lists of different lengths: one item a row, or nothing
                return Place(path, values, "list", counts=[len(v) for v in values], codec=None)
            raise LeafError(f"{shown(path, 'outputs')} has other keys in different sub-batches; return the same ones.")
        if id(first) in self.inside:
            raise LeafError(f"{shown(path)} is {an(type(first).__name__)} that contains itself.")
        self.inside.add(id(first))
        children = [
            self.look((*path, codec.step(key)), [items[i] for _, items in taken], marker) for i, key in enumerate(keys)
        ]
        self.inside.discard(id(first))
        if marker is not None and children and self._declared(path) and not any(map(bears_rows, children)):
            raise LeafError(f"{shown(path)} is declared {marker}, but nothing in it has rows.")
        counts = [len(v) for v in values] if undecided else []
        form = "list" if undecided else "branch"
        return Place(path, values, form, counts=counts, codec=codec, keys=keys, children=children)

    def _leaf(self, path: Path, values: list[Any], marker: Any) -> Place:
        first = values[0]
        if not isinstance(first, (torch.Tensor, np.ndarray)):
            scalar = isinstance(first, SCALARS)
            if marker is not None and self._declared(path):
                raise LeafError(f"{shown(path)} is declared {marker}, but a {type(first).__name__} has no rows.")
            return Place(path, values, "scalar" if scalar else "unknown")
        if isinstance(marker, Packed):
            if len(first.shape) == 0:
                if self._declared(path):
                    raise LeafError(f"{shown(path)} is declared {marker}, but it has no axis.")
                return Place(path, values, "scalar")
            return self._packed(path, values, marker)
        if isinstance(marker, Axis) or marker is PER_ROW:
            index = marker.index if isinstance(marker, Axis) else 0
            if len(first.shape) == 0 and not self._declared(path):
                return Place(path, values, "scalar")  # a scalar beside the tensors that the marker is meant for
            if not -len(first.shape) <= index < len(first.shape):
                raise LeafError(f"{shown(path)} is declared {marker}, but its shape is {tuple(first.shape)}.")
            return Place(path, values, "kind", Dense(index, "as declared"), [v.shape[index] for v in values], declared=True)
        if any(len(v.shape) == 0 for v in values):
            return Place(path, values, "scalar")
        return Place(path, values, "dense", counts=[v.shape[0] for v in values])

    def _declared(self, path: Path) -> bool:
        """Is this very place declared, not one that it is in?"""
        return normal(dotted(path)) in self.used

    def _packed(self, path: Path, values: list[Any], marker: Packed) -> Place:
        kind = PackedEntries(marker, dotted(path))
        counts = [kind.rows_of(v, self.batch, self.memo) for v in values]
        return Place(path, values, "kind", kind, counts, declared=True)
