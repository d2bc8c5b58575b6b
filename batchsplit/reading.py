"""What each leaf of a batch is taken for, and how many rows it has: every leaf is classified, none is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchsplit.deciding import Decide, rows_of
from batchsplit.errors import LeafError
from batchsplit.layout import Layout, registrations
from batchsplit.leaves import OTHER_LIST, RowList
from batchsplit.survey import Survey
from batchsplit.tree import Branch, Leaf


@dataclass
class Reading:
    """A batch as read: its structure, its leaves in order, and how many rows it has by which leaf."""

    root: Leaf | Branch
    leaves: list[Leaf]
    rows: int
    source: str
    lists: frozenset[int] = frozenset()  # the lengths of lists that are structure, but might have been one item a row
    by_lists: bool = False  # was it for a list to say how many rows there are?
    registrations: int = field(default_factory=registrations)

    def again(self, batch: Any) -> tuple[list[Any], int] | None:
        """The leaves and rows of a batch that reads like the last one; None where it has to be read anew."""
        values: list[Any] = []
        if self.registrations != registrations() or self._open or not self.root.gather(batch, values):
            return None
        try:
            rows = next((n.kind.count(v) for n, v in zip(self.leaves, values) if n.kind.bears_rows), 1)
            if rows <= 1 or not all(n.kind.fits(v, rows) for n, v in zip(self.leaves, values)):
                return None
        except RuntimeError:  # a nested tensor of layout torch.strided does not say its shape
            return None
        if any((length == rows) != (length == self.rows) for length in self.lists):
            return None
        return values, rows

    @cached_property
    def _open(self) -> bool:
        """Might another batch of this structure have its rows by another list?"""
        return self.by_lists and any(leaf.kind is OTHER_LIST or isinstance(leaf.kind, RowList) for leaf in self.leaves)


def read(values: Sequence[Any], layout: Layout, rows: Sequence[int] | None = None, root: str = "batch") -> Reading:
    """Read a batch (one value), or the outputs of several sub-batches (whose `rows` are known).

    Raises:
        LeafError: a leaf is in doubt, or nothing bears rows.
    """
    survey = Survey(layout, values[0])
    place = survey.look((), list(values), None)
    layout.check_used(survey.used, survey.known)
    if rows is None:
        number, source, by_lists = rows_of(place, root)
        if number == 0:
            raise LeafError(f"the batch has no rows (by {source}): there is nothing to cut.")
        rows = [number]
    else:
        source, by_lists = "the sub-batches", False
    decide = Decide(list(rows), source, root)
    node = decide.decide(place)
    return Reading(node, list(node.leaves()), sum(rows), source, frozenset(decide.lists), by_lists)
