"""Saying what a leaf is: markers for `layout=`, the paths that name leaves, and types of your own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchsplit.errors import CutError, LeafError


@dataclass(frozen=True)
class Marker:
    """What a leaf is declared to be."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:
        return self.text  # SHARED and PER_ROW are known by identity, also after pickling


SHARED = Marker("SHARED")
PER_ROW = Marker("PER_ROW")


@dataclass(frozen=True, repr=False)
class Axis(Marker):
    index: int = 0

    def __reduce__(self) -> Any:
        return axis, (self.index,)


@dataclass(frozen=True, repr=False)
class Packed(Marker):
    counts: Any = None

    def __reduce__(self) -> Any:
        return packed, (self.counts,)


def axis(index: int) -> Axis:
    """Declare that the rows of a leaf, or of all tensors under it, lie on axis `index`.

    For time-first inputs `(time, rows, ...)` and RNN states `(layers, rows, hidden)` write `axis(1)`; negative axes
    count from the end.

    Raises:
        CutError: `index` is not a whole number.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, axis
        >>> batch = {"x": torch.rand(7, 5, 3), "h": torch.rand(2, 5, 4)}
        >>> cut = BatchCutter(rows=2, layout={"x": axis(1), "h": axis(1)}).cut(batch)
        >>> [tuple(sub.data["h"].shape) for sub in cut]
        [(2, 2, 4), (2, 2, 4), (2, 1, 4)]
    """
    if isinstance(index, bool) or not isinstance(index, int):
        raise CutError(f"axis({index!r}): an axis is a whole number; write axis(1), say.")
    return Axis(f"axis({index})", index)


def packed(counts: str | int | Callable[[Any], Any]) -> Packed:
    """Declare that row i owns the next `counts[i]` entries of a leaf's first axis.

    `counts` is the path of a leaf of `(rows,)` whole numbers, a function from the whole batch to them, or one number
    where every row owns as many. A leaf that holds running offsets (`cu_seqlens`: the counts added up from 0, or one entry
    more than the counts add up to, rising from 0, where a row owns several stretches) is re-based: each sub-batch gets
    offsets of its own, which start at 0.

    Raises:
        CutError: `counts` is none of these.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, packed
        >>> batch = {"ids": torch.zeros(3, 9), "images": torch.tensor([1, 0, 2]), "pixels": torch.rand(3, 6)}
        >>> cut = BatchCutter(rows=2, layout={"pixels": packed("images")}).cut(batch)
        >>> [tuple(sub.data["pixels"].shape) for sub in cut]
        [(1, 6), (2, 6)]
    """
    if isinstance(counts, bool) or not (isinstance(counts, (str, int)) or callable(counts)):
        raise CutError(
            f"packed({counts!r}): counts is the path of a leaf, a function of the batch, or a whole number; "
            'write packed("images_per_row"), say.'
        )
    if isinstance(counts, int) and counts < 1:
        raise CutError(f"packed({counts}): a row owns at least 1 entry; where rows own different numbers, name the leaf of counts.")
    return Packed(f"packed({counts!r})" if isinstance(counts, (str, int)) else "packed(<function>)", counts)


@dataclass(frozen=True)
class Registered:
    """How a type of the user's own is counted, cut and joined."""

    count: Callable[[Any], int]
    take: Callable[[Any, Any], Any]
    join: Callable[[list[Any]], Any]


_registered: dict[type, Registered] = {}
_registrations: list[type] = []


def register(
    cls: type,
    *,
    count: Callable[[Any], int],
    take: Callable[[Any, Any], Any],
    join: Callable[[list[Any]], Any],
) -> None:
    """Teach batchsplit a type of your own (and what derives from it): `count` its rows, `take` some, `join` parts.

    `count(value)` gives the number of rows; `take(value, rows)` gives the part that holds these rows, where `rows` is a
    slice (an index array where rows were reordered); `join(parts)` puts parts together again.

    Raises:
        CutError: `cls` is not a class, or one of the three is not callable.

    Example:
        >>> from batchsplit import BatchCutter, register
        >>> class Words:
        ...     def __init__(self, words): self.words = words
        >>> register(Words, count=lambda w: len(w.words), take=lambda w, rows: Words(w.words[rows]),
        ...          join=lambda parts: Words(sum((p.words for p in parts), [])))
        >>> [sub.data.words for sub in BatchCutter(rows=2).cut(Words(["a", "b", "c"]))]
        [['a', 'b'], ['c']]
    """
    if not isinstance(cls, type):
        raise CutError(f"register({cls!r}): the first argument is a class; write register(MyBatch, ...).")
    for name, function in (("count", count), ("take", take), ("join", join)):
        if not callable(function):
            raise CutError(f"register({cls.__name__}, {name}={function!r}): {name} has to be a function.")
    _registered[cls] = Registered(count, take, join)
    _registrations.append(cls)


def registrations() -> int:
    """How often `register` was called: what was read before the last time may read differently now."""
    return len(_registrations)


def registered(cls: type) -> Registered | None:
    """The registration of `cls` or of the nearest class it derives from."""
    if not _registered:
        return None
    return next((_registered[base] for base in cls.__mro__ if base in _registered), None)


@dataclass(frozen=True)
class Step:
    """One step of a path: as written in `layout` (`text`), and as written in code (`shown`)."""

    text: str
    shown: str


Path = tuple[Step, ...]


def dotted(path: Path) -> str:
    """A path as `layout` keys write it: `inputs.mask`."""
    return ".".join(step.text for step in path)


def shown(path: Path, root: str = "batch") -> str:
    """A path as code writes it: `batch['inputs'].mask`."""
    return root + "".join(step.shown for step in path)


def normal(key: str | int) -> str:
    """One spelling for `"[0].x"`, `"0.x"` and `0`."""
    return re.sub(r"\[['\"]?(.+?)['\"]?\]", r".\1", str(key)).strip(".")


class Layout:
    """The declared leaves of a batch, by path."""

    def __init__(self, declared: Mapping[str, Any] | None = None) -> None:
        self.declared: dict[str, Any] = {}
        self.written: dict[str, str | int] = {}
        if declared is not None and not isinstance(declared, Mapping):
            raise CutError(f'layout={declared!r}: a layout maps paths to markers; write layout={{"mask": SHARED}}, say.')
        for key, marker in (declared or {}).items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise CutError(f'layout key {key!r}: a path is text like "inputs.mask" or a position like 0.')
            if not isinstance(marker, Marker) and not callable(marker):
                raise CutError(
                    f'layout={{"{key}": {marker!r}}}: write SHARED, PER_ROW, axis(k), packed(counts), '
                    "or a function (leaf, rows) -> part."
                )
            self.declared[normal(key)] = marker
            self.written[normal(key)] = key

    def __bool__(self) -> bool:
        return bool(self.declared)

    def below(self, path: Path) -> bool:
        """Is anything declared beneath this place?"""
        prefix = normal(dotted(path)) + "." if path else ""
        return any(key.startswith(prefix) and key != "" for key in self.declared)

    def check_used(self, used: set[str], known: Iterable[str]) -> None:
        """Raise for a key that matched nothing, naming the nearest path."""
        for key in self.declared:
            if key not in used:
                raise LeafError(f'layout={{"{self.written[key]}": ...}} matches nothing in the batch; {nearest(key, known)}')


def nearest(key: str, known: Iterable[str]) -> str:
    """A sentence that names the paths most like `key`."""
    paths = list(dict.fromkeys(known))
    close = difflib.get_close_matches(key, paths, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    return "its paths are " + ", ".join(f'"{p}"' for p in paths[:12]) + (", ..." if len(paths) > 12 else "") + "."
