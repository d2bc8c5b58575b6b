"""The kinds of leaf: how each one's rows are counted, cut and joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
import torch

from batchsplit.containers import codec_of
from batchsplit.plan import ranges

LISTS = (list, deque)
SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic, Number)


@dataclass
class Spans:
    """The rows of each sub-batch, and the batch they are rows of."""

    batch: Any
    sizes: list[int]
    memo: dict[Any, Any] = field(default_factory=dict)  # what several leaves of one batch need: packed counts

    @cached_property
    def slices(self) -> list[slice]:
        """The rows of each sub-batch."""
        return ranges(self.sizes)


class Kind:
    """One way to treat a leaf. `explain()` says `text` of it, and `why`."""

    text = why = ""
    per_row = True  # does each sub-batch get its own part?
    bears_rows = True  # can the batch's rows be counted by it?
    broadcasts = False  # may a single row stand for all of them?

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


class Made(Sequence[Any]):
    """One part for each sub-batch, made anew each time it is asked for: parts that can be written to, or are copies."""

    def __init__(self, make: Callable[[slice], Any], slices: Sequence[slice]) -> None:
        self.make, self.slices = make, slices

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, index: Any) -> Any:
        return self.make(self.slices[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.slices)


class Dense(Kind):
    """A tensor or array with its rows on one axis, cut as views."""

    def __init__(self, axis: int = 0, why: str = "its first axis is the rows") -> None:
        self.axis, self.why = axis, why
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
        if isinstance(parts[0], np.ndarray):
            return _array_joined(parts, self.axis)
        return torch.cat(parts, dim=self.axis)

    def fits(self, leaf: Any, rows: int) -> bool:
        return self.count(leaf) == rows and is_plain(leaf)


_STRIDED = torch.strided


def is_plain(leaf: Any) -> bool:
    """Is it an array or a dense tensor? (Sparse and nested tensors are of class Tensor too.)"""
    return isinstance(leaf, np.ndarray) or (leaf.layout is _STRIDED and not leaf.is_nested)


def _array_joined(parts: list[Any], axis: int) -> Any:
    """Arrays put together, as what they were: a class derived from ndarray, a masked array with its fill value."""
    first = parts[0]
    if isinstance(first, np.ma.MaskedArray):
        joined = np.ma.concatenate(parts, axis=axis)
        joined.fill_value = first.fill_value
        return joined
    joined = np.concatenate(parts, axis=axis)
    # What is joined from a memory map is in memory.
    return joined if type(joined) is type(first) or isinstance(first, np.memmap) else joined.view(type(first))


class RowList(Kind):
    """A list (or tuple of strings) with one item a row."""

    text = "per row, a list"

    def __init__(self, declared: bool = False) -> None:
        self.declared = declared
        self.why = "as declared" if declared else "it has one item a row"

    def count(self, leaf: Any) -> int:
        return len(leaf)

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if type(leaf) in (list, tuple):
            return Made(leaf.__getitem__, spans.slices)
        return Made(lambda rows: like_list(leaf, list(leaf)[rows]), spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        items = [item for part in parts for item in part]
        return items if type(parts[0]) is list else like_list(parts[0], items)

    def fits(self, leaf: Any, rows: int) -> bool:
        if len(leaf) != rows:
            return False
        if isinstance(leaf, tuple):
            return self.declared or strings(leaf)
        # Other items (tensors, say) have to be looked at anew: two readings may be open.
        return self.declared or scalar_items(leaf) or set(map(type, leaf)) == {dict}


class Shared(Kind):
    """A leaf without rows: the same object in every sub-batch."""

    text = "shared"
    per_row = bears_rows = False

    def __init__(self, why: str, fits: Callable[[Any, int], bool]) -> None:
        self.why = why
        self._fits = fits

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return [leaf] * len(spans.sizes)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return parts[0]

    def fits(self, leaf: Any, rows: int) -> bool:
        return self._fits(leaf, rows)


DECLARED_SHARED = Shared("as declared", lambda leaf, rows: True)
SCALAR = Shared("it has no rows", lambda leaf, rows: not getattr(leaf, "ndim", 0))
BROADCAST = Shared("its first axis is 1", lambda leaf, rows: leaf.shape[:1] == (1,) and rows != 1)


class OtherList(Kind):
    """A list of scalars that is no item a row: each sub-batch gets all of it, in a list of its own."""

    text, why = "shared", "a list, but not of one item a row"
    per_row = bears_rows = False

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return Made(lambda rows: like_list(leaf, leaf), spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return parts[0]

    def fits(self, leaf: Any, rows: int) -> bool:
        return len(leaf) != rows and (strings(leaf) if isinstance(leaf, tuple) else scalar_items(leaf))


OTHER_LIST = OtherList()


class Refused(Kind):
    """A leaf that can't be cut: what is wrong with it (`text`), and what to do (`remedy`)."""

    def __init__(self, text: str, remedy: str) -> None:
        self.text, self.remedy = text, remedy


def scalar_items(items: Iterable[Any]) -> bool:
    """Are all items without rows of their own: numbers, strings, None?"""
    return all(issubclass(cls, SCALARS) for cls in set(map(type, items)))


def strings(items: Sequence[Any]) -> bool:
    """Are there items, all of them strings?"""
    return bool(items) and set(map(type, items)) <= {str, bytes}


def like_list(original: Any, items: Iterable[Any]) -> Any:
    """Items in a list or tuple of the original's class and attributes."""
    items = list(items)
    codec = codec_of(original)
    return type(original)(items) if codec is None else codec.make(original, (), items)


def has_numbers(leaf: Any) -> bool:
    """Can its numbers be read: is it an array or a plain tensor, and not one of the meta device?"""
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and is_plain(leaf) and not getattr(leaf, "is_meta", False)


def is_offsets(leaf: Any) -> bool:
    """Does a leaf hold running offsets: whole numbers that start at 0 and never fall?"""
    if not has_numbers(leaf) or len(leaf.shape) != 1:
        return False
    numbers = leaf.tolist()
    return bool(numbers) and type(numbers[0]) is int and numbers[0] == 0 and all(a <= b for a, b in pairwise(numbers))
