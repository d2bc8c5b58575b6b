"""The kinds of leaf: how each one's rows are counted, cut and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from batchsplit.containers import codec_of, lookup
from batchsplit.errors import LeafError
from batchsplit.layout import Packed, Registered, normal
from batchsplit.plan import offsets

SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)


@dataclass(frozen=True)
class Spans:
    """The rows of each sub-batch, and the batch they are rows of."""

    batch: Any
    sizes: list[int]
    slices: list[slice]
    memo: dict[Any, Any] = field(default_factory=dict)  # what several leaves of one batch need: packed counts


class Kind:
    """One way to treat a leaf. `text` is what `explain()` says of it."""

    text = ""
    per_row = True  # does each sub-batch get its own part?
    bears_rows = True  # can the batch's rows be counted by it?

    def count(self, leaf: Any) -> int:
        """The rows of a leaf."""
        raise NotImplementedError

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        """One part for each sub-batch."""
        raise NotImplementedError

    def join(self, parts: list[Any], like: Any = None) -> Any:
        """The parts put together again; `like` is the leaf they were cut from, where it is known."""
        raise NotImplementedError

    def fits(self, leaf: Any, rows: int) -> bool:
        """Would a leaf of a later batch, of the same type and at the same place, be read the same way?"""
        return self.count(leaf) == rows


class Dense(Kind):
    """A tensor or array with its rows on one axis, cut as views."""

    def __init__(self, axis: int = 0) -> None:
        self.axis = axis
        self.text = "per row, a view" if axis == 0 else f"per row on axis {axis}, a view"

    def count(self, leaf: Any) -> int:
        return leaf.shape[self.axis] if -len(leaf.shape) <= self.axis < len(leaf.shape) else -1

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if isinstance(leaf, np.ndarray):
            before = (slice(None),) * (self.axis % leaf.ndim)
            return [leaf[(*before, rows)] for rows in spans.slices]
        if leaf.requires_grad:  # views made several at a time can't be written to under autograd
            return [leaf.narrow(self.axis, rows.start, rows.stop - rows.start) for rows in spans.slices]
        return leaf.split_with_sizes(spans.sizes, self.axis)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        if isinstance(parts[0], np.ma.MaskedArray):
            return np.ma.concatenate(parts, axis=self.axis)
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis=self.axis)
        return torch.cat(parts, dim=self.axis)


class RowList(Kind):
    """A list (or tuple of strings) with one item a row."""

    text = "per row, a list"

    def __init__(self, declared: bool = False) -> None:
        self.declared = declared

    def count(self, leaf: Any) -> int:
        return len(leaf)

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if type(leaf) in (list, tuple):
            return [leaf[rows] for rows in spans.slices]
        return [like_list(leaf, leaf[rows]) for rows in spans.slices]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        items = [item for part in parts for item in part]
        return items if type(parts[0]) is list else like_list(parts[0], items)

    def fits(self, leaf: Any, rows: int) -> bool:
        # Other items (tensors, say) have to be looked at anew: two readings may be open.
        return len(leaf) == rows and (self.declared or scalar_items(leaf) or set(map(type, leaf)) == {dict})


def scalar_items(items: Iterable[Any]) -> bool:
    """Are all items without rows of their own: numbers, strings, None?"""
    return all(issubclass(cls, SCALARS) for cls in set(map(type, items)))


def like_list(original: Any, items: Iterable[Any]) -> Any:
    """Items in a list or tuple of the original's class and attributes."""
    items = list(items)
    codec = codec_of(original)
    return type(original)(items) if codec is None else codec.make(original, (), items)


class Shared(Kind):
    """A leaf without rows: the same object in every sub-batch."""

    per_row = bears_rows = False

    def __init__(self, text: str, fits: Callable[[Any, int], bool] = lambda leaf, rows: True) -> None:
        self.text = text
        self._fits = fits

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return [leaf] * len(spans.sizes)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return parts[0]

    def fits(self, leaf: Any, rows: int) -> bool:
        return self._fits(leaf, rows)


DECLARED_SHARED = Shared("shared, as declared")
SCALAR = Shared("shared: it has no rows")
BROADCAST = Shared("shared: its first axis is 1", lambda leaf, rows: leaf.shape[0] == 1 != rows)
OTHER_LIST = Shared("shared: a list that is not one item a row", lambda leaf, rows: len(leaf) != rows and scalar_items(leaf))


class Own(Kind):
    """A leaf of a type that the user registered."""

    def __init__(self, cls: type, how: Registered) -> None:
        self.how = how
        self.text = f"per row, as {cls.__name__} was registered"

    def count(self, leaf: Any) -> int:
        return int(self.how.count(leaf))

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return [self.how.take(leaf, rows) for rows in spans.slices]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return self.how.join(list(parts))


class ByFunction(Kind):
    """A leaf that the user's own function cuts: (leaf, rows) -> part."""

    text = "cut by your function"
    bears_rows = False

    def __init__(self, function: Callable[[Any, slice], Any]) -> None:
        self.function = function

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return [self.function(leaf, rows) for rows in spans.slices]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if like is None:
            raise LeafError("a leaf cut by your own function can't be joined: nobody knows the way back.")
        return like  # the function has no inverse, so the batch's own leaf is given back

    def fits(self, leaf: Any, rows: int) -> bool:
        return True


class PackedEntries(Kind):
    """A leaf of which row i owns the next counts[i] entries; or the running offsets of such entries."""

    bears_rows = False  # not by itself: its counts do

    def __init__(self, marker: Packed, path: str) -> None:
        self.counts = marker.counts
        self.path = path
        self.text = f"{marker}: each row owns its next entries"

    def counts_of(self, batch: Any, memo: dict[Any, Any]) -> list[int]:
        """How many entries each row owns: one whole number a row."""
        key = self.counts if isinstance(self.counts, (str, int)) else id(self.counts)
        if key not in memo:
            memo[key] = self._read_counts(batch)
        return memo[key]

    def _read_counts(self, batch: Any) -> list[int]:
        try:
            found = lookup(batch, normal(self.counts)) if isinstance(self.counts, str) else self.counts(batch)
        except KeyError as error:
            raise LeafError(f'packed({self.counts!r}) for "{self.path}": no such leaf; {error.args[0]}') from None
        numbers = found.tolist() if hasattr(found, "tolist") else found
        whole = isinstance(numbers, (list, tuple)) and all(type(n) is int and n >= 0 for n in numbers)
        if not whole:
            raise LeafError(
                f'the counts of packed leaf "{self.path}" are {_brief(numbers)}: '
                "they have to be one whole number, 0 or more, for each row."
            )
        return list(numbers)

    def rows_of(self, leaf: Any, batch: Any, memo: dict[Any, Any]) -> int:
        """The rows of the batch, as the counts have it."""
        if not isinstance(self.counts, int):
            return len(self.counts_of(batch, memo))
        entries = len(leaf) - (len(leaf) % self.counts == 1 and is_offsets(leaf))
        if entries % self.counts:
            raise LeafError(f'packed leaf "{self.path}" has {len(leaf)} entries, no multiple of {self.counts} a row.')
        return entries // self.counts

    def fits(self, leaf: Any, rows: int) -> bool:
        return True  # its sums are checked at each cut

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        rows = spans.slices[-1].stop
        counts = [self.counts] * rows if isinstance(self.counts, int) else self.counts_of(spans.batch, spans.memo)
        if len(counts) != rows:
            raise LeafError(f'the counts of packed leaf "{self.path}" are {len(counts)} numbers for {rows} rows.')
        ends = offsets(counts)
        length, total = len(leaf), ends[-1]
        if length == total + 1 and is_offsets(leaf):
            return [leaf[ends[s.start] : ends[s.stop] + 1] - leaf[ends[s.start]] for s in spans.slices]
        if length != total:
            raise LeafError(
                f'packed leaf "{self.path}" has {length} entries, but its counts add up to {total}; '
                "the counts say how many entries of its first axis each row owns."
            )
        return [leaf[ends[s.start] : ends[s.stop]] for s in spans.slices]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if like is not None and len(like) == sum(map(len, parts)) - len(parts) + 1 and len(parts) > 1 and is_offsets(like):
            lasts = offsets([int(part[-1]) for part in parts])
            parts = [parts[0], *(part[1:] + last for part, last in zip(parts[1:], lasts[1:-1], strict=True))]
        return RowList().join(parts) if isinstance(parts[0], (list, tuple)) else Dense().join(parts)


def is_offsets(leaf: Any) -> bool:
    """Does a leaf hold running offsets: whole numbers that start at 0 and never fall?"""
    if not hasattr(leaf, "tolist") or len(leaf.shape) != 1:
        return False
    numbers = leaf.tolist()
    return bool(numbers) and type(numbers[0]) is int and numbers[0] == 0 and all(a <= b for a, b in pairwise(numbers))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
