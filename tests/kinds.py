"""Types that tests make batches of, and how to compare them without the package's own eyes."""

from __future__ import annotations

from collections import UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from batchsplit import register


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    """A frozen dataclass with a default, a field that __init__ does not take, and one that it makes."""

    x: Any
    y: Any = None
    made: str = field(init=False, default="by hand")
    notes: dict[str, int] = field(default_factory=dict)


class Words:
    """A registered type."""

    def __init__(self, words: list[str]) -> None:
        self.words = list(words)


def _take(value: Words, rows: Any) -> Words:
    return Words(value.words[rows])


def _join(parts: list[Words]) -> Words:
    return Words([word for part in parts for word in part.words])


register(Words, count=lambda value: len(value.words), take=_take, join=_join)


def rows_of(value: Any) -> list[str]:
    """What a leaf holds of each row, as text that tells -0.0 from 0.0 and NaN from other numbers."""
    return [repr(row) for row in _rows(value)]


def _rows(value: Any) -> list[Any]:
    if isinstance(value, PackedSequence):
        rows, lengths = pad_packed_sequence(value, batch_first=True)
        return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is torch.jagged:
            return [row.tolist() for row in value.unbind()]
        return value.to_dense().tolist()
    if isinstance(value, np.ndarray):
        return list(value)
    if isinstance(value, Words):
        return value.words
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if hasattr(value, "to_data_list"):
        return [graph.to_dict() for graph in value.to_data_list()]
    return [value[i].to_dict() for i in range(len(value))]  # TensorDict


def difference(a: Any, b: Any, path: str = "batch") -> str:
    """Where two batches differ in type, structure or any bit; empty where they don't."""
    if type(a) is not type(b) and not isinstance(a, (torch.nn.Parameter, np.memmap)):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, PackedSequence):
        return _first((x, y, f"{path}.{name}") for x, y, name in zip(a, b, a._fields, strict=True))
    if isinstance(a, torch.Tensor):
        return "" if _bits(a) == _bits(b) else f"{path}: {a} and {b}"
    if isinstance(a, np.ndarray):
        return "" if _array_bits(a) == _array_bits(b) else f"{path}: {a!r} and {b!r}"
    if isinstance(a, Words):
        return difference(a.words, b.words, path)
    if hasattr(type(a), "to_data_list") or hasattr(type(a), "batch_size"):
        return "" if rows_of(a) == rows_of(b) and sorted(a.keys()) == sorted(b.keys()) else f"{path}: {a} and {b}"
    if isinstance(a, (Mapping, UserDict)):
        if list(a) != list(b):
            return f"{path}: keys {list(a)} and {list(b)}"
        return _first((a[key], b[key], f"{path}[{key!r}]") for key in a) or _attributes(a, b, path)
    if isinstance(a, (list, tuple, deque)):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} items"
        return _first((x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if is_dataclass(a):
        return _first((getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}") for f in fields(a))
    return "" if a is b or a == b else f"{path}: {a!r} and {b!r}"


def _first(pairs: Any) -> str:
    return next((found for a, b, path in pairs if (found := difference(a, b, path))), "")


def _attributes(a: Any, b: Any, path: str) -> str:
    found = [(getattr(x, "__dict__", {}).get("tag"), isinstance(x, defaultdict) and x.default_factory) for x in (a, b)]
    return "" if found[0] == found[1] else f"{path}: attributes {found}"


def _bits(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout is torch.jagged:
        return _bits(tensor.values()), _bits(tensor.offsets())  # type: ignore[operator]
    if tensor.is_meta:
        return tensor.dtype, tensor.shape
    extra = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
    plain = tensor.to_dense().as_subclass(torch.Tensor).resolve_conj().clone(memory_format=torch.contiguous_format)
    return tensor.layout, tensor.dtype, tuple(tensor.shape), extra, bytes(plain.untyped_storage())


def _array_bits(array: np.ndarray) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        return _array_bits(array.filled()), array.fill_value, np.ma.getmaskarray(array).tobytes()
    content = array.tolist() if array.dtype.hasobject else array.tobytes()
    return array.dtype, array.shape, content
