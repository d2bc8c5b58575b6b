"""The containers a batch is made of: which values are containers, and how to walk them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

from batchsplit.codecs import (
    CODECS,
    DATACLASS,
    DICT,
    LIST,
    NAMED,
    TUPLE,
    TUPLE_LIKE,
    Codec,
    pytree_codec,
)
from batchsplit.layout import nearest, registered

OURS = (OrderedDict, defaultdict, deque, torch.Size)  # the pytree knows these too, but loses some of what they are


def _find(cls: type) -> Codec | None:
    if registered(cls) is not None or issubclass(cls, PackedSequence):
        return None
    for exact, codec in ((dict, DICT), (list, LIST), (tuple, TUPLE)):
        if cls is exact:
            return codec
    if cls in pytree.SUPPORTED_NODES and cls not in OURS:
        return pytree_codec(pytree.SUPPORTED_NODES[cls])
    for base, codec in CODECS:
        if issubclass(cls, base):
            return codec
    if issubclass(cls, tuple):
        return NAMED if hasattr(cls, "_fields") else TUPLE_LIKE
    return DATACLASS if dataclasses.is_dataclass(cls) else None


_codecs: dict[type, Codec | None] = {}


def codec_of(value: Any) -> Codec | None:
    """The codec of a container, or None for a leaf."""
    cls = type(value)
    codec = _codecs.get(cls)
    if codec is None:
        # Only containers are remembered: a leaf's class may be registered with torch's pytree or with us later on.
        codec = _find(cls)
        if codec is not None:
            _codecs[cls] = codec
    elif registered(cls) is not None:
        return None
    return codec


def map_leaves(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """The same containers with `function` of each leaf (`is_leaf` says of a container that it is one).

    >>> map_leaves(lambda x: x + 1, {"a": 1, "b": (2, [3])})
    {'a': 2, 'b': (3, [4])}
    """
    codec = codec_of(value)
    if codec is None or is_leaf(value):
        return function(value)
    keys, values = codec.take(value)
    return codec.make(value, keys, [map_leaves(function, v, is_leaf) for v in values])


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a value, in order."""
    codec = codec_of(value)
    if codec is None:
        yield value
        return
    for inner in codec.take(value)[1]:
        yield from leaves_of(inner)


def lookup(data: Any, path: str) -> Any:
    """The leaf or container at a dotted path; KeyError with the nearest path, where there is none."""
    known: list[str] = []
    found = _search(data, path, "", known)
    if found is _nothing:
        raise KeyError(nearest(path, known))
    return found


_nothing = object()


def _search(data: Any, path: str, prefix: str, known: list[str]) -> Any:
    if prefix == path:
        return data
    codec = codec_of(data)
    if codec is None:
        return _nothing
    for key, value in zip(*codec.take(data), strict=True):
        here = f"{prefix}.{codec.step(key).text}" if prefix else codec.step(key).text
        known.append(here)
        if path == here or path.startswith(here + "."):
            found = _search(value, path, here, known)
            if found is not _nothing:
                return found
    return _nothing
