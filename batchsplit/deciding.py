"""How many rows a batch has, and what each place in it is therefore taken for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from batchsplit import doubts
from batchsplit.errors import LeafError
from batchsplit.layout import shown
from batchsplit.leaves import BROADCAST, OTHER_LIST, SCALAR, Dense, Kind, Refused, RowList, scalar_items
from batchsplit.survey import Place
from batchsplit.tree import Branch, Leaf


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


def rows_of(root: Place, name: str) -> tuple[int, str, bool]:
    """The batch size, the leaf it is known by, and whether that was for lists to say."""
    bearers = list(_bearers(root))
    declared = [p for p in bearers if p.declared]
    certain = declared or [p for p in bearers if p.counts[0] != 1 or not p.broadcasts]
    if not certain and not bearers:
        for place in _lists(root):
            certain.extend(_proposals(place, name))
        certain = [p for p in certain if p.counts[0] != 1 or not p.broadcasts] or certain
        if len(certain) == 1 and _family_of(certain[0]) == {"tensor"} and any(_bearers(certain[0], into_lists=True)):
            raise _two_readings(certain[0], name)  # ragged rows, or a leaf that is a row short: nothing else says which
    certain = certain or bearers
    if not certain:
        raise _unknown(root, name) or LeafError(doubts.no_rows(root.text or name))
    sizes = {p.counts[0] for p in certain}
    if len(sizes) > 1:
        raise LeafError(doubts.disagreement([(p.path, p.values[0], p.counts[0]) for p in certain], name))
    return certain[0].counts[0], shown(certain[0].path, name), not bearers


def _unknown(place: Place, root: str) -> LeafError | None:
    """What to say of the first leaf that nobody knows how to cut, if there is one."""
    if place.form != "unknown":
        return next((error for child in place.children if (error := _unknown(child, root))), None)
    if isinstance(place.kind, Refused):
        return LeafError(doubts.refused(place.path, place.kind.text, place.kind.remedy, root))
    return LeafError(doubts.unknown(place.path, place.values[0], root))


def _proposals(place: Place, name: str) -> list[Place]:
    """What a list has to say on the number of rows where nothing outside of lists bears any."""
    rows = [place]
    if not place.children:
        return rows if place.counts[0] else []
    inner = list(_bearers(place, into_lists=True))
    sizes = {p.counts[0] for p in inner} - {1}
    families = _family_of(place)
    if len(families) > 1 or len({child.keys for child in place.children}) > 1:
        # A tensor beside a list, or a dict beside one of other keys: no list of rows.
        outside = [p for child in place.children for p in _bearers(child)]
        return outside or [p for child in place.children for one in _lists(child) for p in _proposals(one, name)]
    if families == {"tensor"}:
        if not inner:  # tensors without axes, one a row: nothing else in them has rows
            return rows
        if len({p.counts[0] for p in inner}) == 1 and len(inner) == len(place.children):
            return inner
    elif not inner and (place.path or len({tuple(c.counts) for c in place.children if c.form == "list"}) != 1):
        return rows
    if (len(sizes) == 1 or not inner) and len(place.children) > 1:
        # [{...}, {...}], [x, y, positions (1, width)] or [("a", "b"), ("c", "d")] with nothing beside it
        raise _two_readings(place, name)
    return rows


def _two_readings(place: Place, name: str) -> LeafError:
    bearers = list(_bearers(place, into_lists=True)) or [child for child in place.children if child.form == "list"]
    inner = [(p.path, p.counts[0]) for p in bearers]
    return LeafError(doubts.two_readings(place.path, place.values[0], inner, name))


def _family_of(place: Place) -> set[str]:
    """What a list is a list of."""
    return {_family(child) for child in place.children if place.form == "list"} - {"none"}


def _family(place: Place) -> str:
    value = place.values[0]
    if value is None:
        return "none"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "tensor"
    return type(value).__name__


class Decide:
    """Settles each place, now that the number of rows is known."""

    def __init__(self, rows: list[int], source: str, root: str) -> None:
        self.rows, self.source, self.root = rows, source, root
        self.lists: set[int] = set()  # the lengths of those that might have been one item a row

    def decide(self, place: Place) -> Leaf | Branch:
        if place.form == "list":
            return self._list(place)
        if place.form == "branch":
            return self._branch(place)
        if place.form == "scalar":
            return self._leaf(place, SCALAR)
        if place.form == "unknown":
            raise _unknown(place, self.root) or self._doubt(place)
        alike = place.counts == self.rows
        if place.form == "kind" and place.kind is not None and (alike or not place.counts):
            return self._leaf(place, place.kind)
        if place.form == "dense" and alike:
            return self._leaf(place, Dense(), doubts.coincidence(place.path, place.values[0]))
        if place.broadcasts and set(place.counts) == {1}:
            return self._leaf(place, BROADCAST, doubts.broadcast_coincidence(place.path, place.values[0], self.rows[0]))
        raise self._doubt(place)

    def _doubt(self, place: Place) -> LeafError:
        k = next(i for i, (count, rows) in enumerate(zip(place.counts, self.rows, strict=True)) if count != rows)
        at = place.values[k], place.counts[k], self.rows[k]
        return LeafError(doubts.first_axis(place.path, *at, self.source, self.root))

    def _list(self, place: Place) -> Leaf | Branch:
        if place.counts != self.rows or not any(self.rows):
            if place.children:
                return self._open(place)
            if not all(scalar_items(v) for v in place.values):
                raise self._doubt(place)
            return self._leaf(place, OTHER_LIST)
        structure = bool(place.children) and self._consistent(place)
        families = _family_of(place)
        tensors = [c for c in place.children if c.form == "dense" and c.counts == self.rows]
        if structure and (len(tensors) == len(place.children) or len(families) > 1):
            node = self._open(place)
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

    def _open(self, place: Place) -> Branch:
        """A list that is structure, though it might have been one item a row."""
        self.lists.update(len(value) for value in place.values)
        try:
            return self._branch(place)
        except LeafError as error:
            if place.counts == self.rows:
                raise
            where, looks = shown(place.path, self.root), doubts.looks(place.values[0])
            raise LeafError(f"{error} ({where} is {looks}, not one item for each of {self.rows[0]} rows.)") from None

    def _branch(self, place: Place) -> Branch:
        assert place.codec is not None
        children = [self.decide(child) for child in place.children]
        return Branch(type(place.values[0]), place.codec, place.keys, children)

    def _leaf(self, place: Place, kind: Kind, other: str = "") -> Leaf:
        return Leaf(place.path, type(place.values[0]), kind, other)
