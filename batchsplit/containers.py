"""The containers a batch is made of: taken apart into keys and values, built again as what they were."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

from batchsplit.errors import CutError
from batchsplit.layout import Step, nearest, registered


class Codec(NamedTuple):
    """How one kind of container is taken apart (`take`), built again (`make`) and addressed (`step`)."""

    take: Callable[[Any], tuple[tuple[Any, ...], Sequence[Any]]]  # container -> keys, values
    make: Callable[[Any, tuple[Any, ...], list[Any]], Any]  # original (None for plain ones), keys, values -> container
    step: Callable[[Any], Step]
    plain: bool = False  # rebuilt without its original


def _item(key: Any) -> Step:
    return Step(str(key), f"[{key!r}]")


def _attribute(name: str) -> Step:
    return Step(name, f".{name}")


def _positions(value: Sequence[Any]) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return tuple(range(len(value))), value


def _make_list(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    new = copy.copy(original)
    new[:] = values
    return new


def _make_tuple(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    try:
        new = tuple.__new__(type(original), values)  # past a __new__ that wants other arguments
    except TypeError:
        new = type(original)(values)  # torch.return_types
    if hasattr(original, "__dict__"):
        new.__dict__.update(vars(original))
    return new


def _take_mapping(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    keys = tuple(value)
    values = [value[key] for key in keys]
    # A BatchEncoding answers tokens(i) and word_ids(i) from a list that holds one item a row.
    if isinstance(value, UserDict) and isinstance(vars(value).get("_encodings"), list):
        return (*keys, _EncodingsKey), [*values, vars(value)["_encodings"]]
    return keys, values


class _EncodingsKey:
    """Stands for BatchEncoding's list among the keys; no user can have written it."""


def _mapping_step(key: Any) -> Step:
    return _attribute("encodings") if key is _EncodingsKey else _item(key)


def _make_mapping(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    new = copy.copy(original)  # keeps the subclass, its attributes and a defaultdict's factory
    for key, value in zip(keys, values, strict=True):
        if key is _EncodingsKey:
            new._encodings = value
        else:
            new[key] = value
    return new


def _make_other_mapping(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    # A shallow copy would share the mapping's inner store, and setting items would write into the user's batch.
    try:
        new = type(original)(dict(zip(keys, values, strict=True)))
        same = tuple(new) == keys and all(new[key] is value for key, value in zip(keys, values, strict=True))
    except Exception as error:
        raise _unbuildable(original) from error
    if not same:
        raise _unbuildable(original)
    for name, value in getattr(original, "__dict__", {}).items():
        if name not in vars(new):
            setattr(new, name, value)
    return new


def _unbuildable(original: Any) -> CutError:
    name = type(original).__name__
    return CutError(
        f"a {name} can't be built again from a dict of its items; "
        f"write register({name}, count=..., take=..., join=...) or give the cutter a plain dict."
    )


def _take_dataclass(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
    return names, [getattr(value, name) for name in names]


def _make_dataclass(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
    new = copy.copy(original)  # no __init__, so frozen classes and init=False fields come out as they were
    for name, value in zip(keys, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def _pytree_codec(node: Any) -> Codec:
    with_keys = getattr(node, "flatten_with_keys_fn", None)

    def take(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
        values, _ = node.flatten_fn(value)
        values = list(values)
        if with_keys is not None:
            return tuple(_key_text(key) for key, _ in with_keys(value)[0]), values
        if isinstance(value, Mapping) and len(value) == len(values):
            return tuple(value), values
        return tuple(range(len(values))), values

    def make(original: Any, keys: tuple[Any, ...], values: list[Any]) -> Any:
        return node.unflatten_fn(values, node.flatten_fn(original)[1])

    return Codec(take, make, _item)


def _key_text(key: Any) -> Any:
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), str(key))


_DICT = Codec(
    lambda value: (tuple(value), list(value.values())),
    lambda original, keys, values: dict(zip(keys, values)),
    _item,
    plain=True,
)
_LIST = Codec(_positions, lambda original, keys, values: values, _item, plain=True)
_TUPLE = Codec(_positions, lambda original, keys, values: tuple(values), _item, plain=True)
_LIST_LIKE = Codec(_positions, _make_list, _item)
_TUPLE_LIKE = Codec(_positions, _make_tuple, _item)
_NAMED = Codec(lambda value: (value._fields, value), _make_tuple, _attribute)
_DEQUE = Codec(_positions, lambda original, keys, values: type(original)(values, original.maxlen), _item)
_MAPPING = Codec(_take_mapping, _make_mapping, _mapping_step)
_OTHER_MAPPING = Codec(_take_mapping, _make_other_mapping, _item)
_DATACLASS = Codec(_take_dataclass, _make_dataclass, _attribute)


def _find(cls: type) -> Codec | None:
    if registered(cls) is not None or issubclass(cls, PackedSequence):
        return None
    for exact, codec in ((dict, _DICT), (list, _LIST), (tuple, _TUPLE)):
        if cls is exact:
            return codec
    if cls in pytree.SUPPORTED_NODES and not issubclass(cls, (defaultdict, deque)) and cls.__module__ != "collections":
        return _pytree_codec(pytree.SUPPORTED_NODES[cls])
    if issubclass(cls, tuple):
        return _NAMED if hasattr(cls, "_fields") else _TUPLE_LIKE
    if issubclass(cls, list):
        return _LIST_LIKE
    if issubclass(cls, deque):
        return _DEQUE
    if issubclass(cls, (dict, UserDict)):
        return _MAPPING
    if issubclass(cls, Mapping):
        return _OTHER_MAPPING
    return _DATACLASS if dataclasses.is_dataclass(cls) else None


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


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same containers with `function` of each leaf.

    >>> map_leaves(lambda x: x + 1, {"a": 1, "b": (2, [3])})
    {'a': 2, 'b': (3, [4])}
    """
    codec = codec_of(value)
    if codec is None:
        return function(value)
    keys, values = codec.take(value)
    return codec.make(value, keys, [map_leaves(function, v) for v in values])


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
