"""What is said of a leaf in doubt: what is wrong, where, and the `layout` line that settles it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch

from batchsplit.layout import Path, dotted, shown
from batchsplit.leaves import is_offsets


def looks(value: Any) -> str:
    """A value's shape, or its type and length, in a few words."""
    if getattr(value, "is_nested", False) and value.layout is torch.strided:
        return "a nested tensor"  # which does not say its shape
    if hasattr(value, "shape"):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, deque)):
        return f"{an(type(value).__name__)} of {len(value)}"
    return an(type(value).__name__)


def an(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _line(path: Path, marker: str) -> str:
    return f'layout={{"{dotted(path)}": {marker}}}'


def _remedy(path: Path, value: Any, rows: int) -> str:
    shape = tuple(getattr(value, "shape", ()))
    fitting = [k for k, size in enumerate(shape) if size == rows and k > 0]
    if fitting:
        return (
            f"if its rows lie on axis {fitting[0]}, write {_line(path, f'axis({fitting[0]})')}; "
            f"to pass it whole: {_line(path, 'SHARED')}"
        )
    return (
        f"to pass it whole, write {_line(path, 'SHARED')}; "
        f"if each row owns several of its entries: {_line(path, 'packed(counts)')}"
    )


def first_axis(path: Path, value: Any, count: int, rows: int, source: str, root: str) -> str:
    """A leaf whose first axis is neither 1 nor the number of rows."""
    differs = f"neither 1 nor the batch's {rows}" if rows != 1 else "not the batch's 1"
    where = f"{shown(path, root)} ({looks(value)}) has {count} rows, {differs} (known by {source})"
    return f"{where}; {_remedy(path, value, rows)}."


def disagreement(found: list[tuple[Path, Any, int]], root: str) -> str:
    """Leaves that disagree on the number of rows: all of them, and a remedy for those in the minority."""
    sizes = Counter(count for _, _, count in found)
    likely = [count for count, times in sizes.items() if times == max(sizes.values())]
    every = ", ".join(f"{shown(path, root)} has {count} ({looks(value)})" for path, value, count in found)
    text = f"the leaves disagree on the number of rows: {every}."
    common = _common_axis([value for _, value, _ in found])
    if common is not None:
        marks = ", ".join(f'"{dotted(path)}": axis({common})' for path, _, _ in found)
        return f"{text} If their rows lie on axis {common}, write layout={{{marks}}}."
    for rows in likely:
        advice = "; ".join(_remedy(path, value, rows) for path, value, count in found if count != rows)
        text += f" If the batch has {rows} rows: {advice}."
    return text


def _common_axis(values: list[Any]) -> int | None:
    """An axis other than the first on which all leaves agree, as time-first batches do."""
    shapes: list[tuple[int, ...]] = [tuple(getattr(value, "shape", ())) for value in values]
    if len(shapes) < 2 or any(len(shape) < 3 for shape in shapes):
        return None
    return 1 if len({shape[1] for shape in shapes}) == 1 else None


def no_rows(name: str) -> str:
    """A batch of scalars only."""
    return (
        f"nothing in {name} carries rows: it holds no tensor or array with an axis, and no list. "
        'If a leaf does, declare it: layout={"path": PER_ROW}.'
    )


def two_readings(path: Path, value: Any, inner: list[tuple[Path, int]], root: str) -> str:
    """A list that is either one item a row, or structure; `inner` are the leaves in it, with their rows."""
    structure = structure_line(path for path, _ in inner) or "a tuple instead of the list"
    sizes = [str(rows) for _, rows in inner]
    found = f", with {' and '.join(dict.fromkeys(sizes))} for the lengths of its items," if sizes else ""
    return (
        f"{shown(path, root)} ({looks(value)}){found} can be read in two ways. If each item is one row, write "
        f"{_line(path, 'PER_ROW')}; if its items are leaves of all rows, write {structure}."
    )


def structure_line(paths: Iterable[Path]) -> str:
    """The layout line that makes a list structure, by declaring the leaves in it."""
    marks = ", ".join(f'"{dotted(path)}": PER_ROW' for path in paths)
    return f"layout={{{marks}}}" if marks else ""


def unknown(path: Path, value: Any, root: str) -> str:
    """An object of a type that nobody knows how to cut."""
    name = type(value).__name__
    whole = f"To pass it whole, write {_line(path, 'SHARED')}; to" if path else "To"
    return (
        f"{shown(path, root)} is {an(name)}, which batchsplit can't cut. "
        f"{whole} teach it, write register({name}, count=..., take=..., join=...)."
    )


def refused(path: Path, text: str, remedy: str, root: str) -> str:
    """A leaf of a layout that can't be cut by rows."""
    whole = f", or pass it whole: {_line(path, 'SHARED')}" if path else ""
    return f"{shown(path, root)} {text}, which can't be cut by rows; {remedy}{whole}."


NAMED = ("edge_index", "grid_thw", "cu_seqlens", "cu_", "offsets", "ptr")  # leaves that seldom hold one entry a row


def coincidence(path: Path, value: Any) -> str:
    """The layout line of another reading, for a leaf that is per row by its shape and might not be; or nothing."""
    shape, rows = tuple(value.shape), value.shape[0]
    if rows < 2:
        return ""
    name = path[-1].text if path else ""
    if any(part in name for part in NAMED) or _rising(value):
        return _line(path, "packed(counts)")
    if len(shape) == 2 and shape[0] == shape[1]:
        return _line(path, "SHARED")
    for k in range(1, len(shape)):
        if shape[k] == rows:
            return _line(path, f"axis({k})")
    return ""


def _rising(value: Any) -> bool:
    """Might a leaf hold running offsets (cu_seqlens), which seldom go up by one at a time?"""
    if len(value.shape) != 1 or (hasattr(value, "is_cpu") and not value.is_cpu):
        return False  # not worth a transfer from the device
    return is_offsets(value) and int(value[-1]) >= len(value)


def broadcast_coincidence(path: Path, value: Any, rows: int) -> str:
    """The layout line for an RNN state of one layer, `(1, rows, hidden)`, which looks as if it broadcast; or nothing."""
    shape = tuple(value.shape)
    return _line(path, "axis(1)") if len(shape) == 3 and shape[1] == rows > 1 else ""
