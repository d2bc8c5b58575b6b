"""How each kind of container is taken apart and built again, as what it was."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from batchsplit.errors import CutError
from batchsplit.layout import Step


class Codec(NamedTuple):
    """How one kind of container is taken apart (`take`), built again (`make`) and addressed (`step`)."""

    take: Callable[[Any], tuple[tuple[Any, ...], Sequence[Any]]]  # container -> keys, values
    make: Callable[[Any, tuple[Any, ...], Sequence[Any]], Any]  # original (None if plain), keys, values -> container
    step: Callable[[Any], Step]  # key -> how paths write it
    plain: bool = False  # rebuilt without its original


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Among the keys of a container: not an item of it, but a tensor (or such) that it has as an attribute."""

    name: str


def _item(key: Any) -> Step:
    return Step(str(key), f"[{key!r}]")


def _attribute(name: str) -> Step:
    return Step(name, f".{name}")


def _step(key: Any) -> Step:
    return _attribute(key.name) if isinstance(key, Attribute) else _item(key)


def _field(key: Any) -> Step:
    return _attribute(key.name if isinstance(key, Attribute) else key)


def _positions(value: Sequence[Any]) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return tuple(range(len(value))), value


def _attributes(value: Any) -> dict[str, Any]:
    """What a container has beside its items, but for what was computed from the whole of it and kept."""
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or own is value:
        return {}
    return {name: x for name, x in own.items() if not isinstance(_of_class(value, name), cached_property)}


def _of_class(value: Any, name: str) -> Any:
    return inspect.getattr_static(type(value), name, None)


def _with_attributes(value: Any, keys: Sequence[Any], items: Sequence[Any]) -> tuple[tuple[Any, ...], Sequence[Any]]:
    """Keys and items, and after them the attributes that may hold rows as well."""
    known = {id(item) for item in items}
    more = {
        name: x
        for name, x in _attributes(value).items()
        # A BatchEncoding answers tokens(i) and word_ids(i) from a list that holds one item a row.
        if (name == "_encodings" and isinstance(x, list) and isinstance(value, UserDict))
        or (isinstance(x, (torch.Tensor, np.ndarray)) and x.ndim and id(x) not in known)
    }
    if not more:
        return tuple(keys), items
    return (*keys, *map(Attribute, more)), [*items, *more.values()]


def _set_attributes(new: Any, original: Any, keys: Sequence[Any], values: Sequence[Any], items: Sequence[Any]) -> None:
    """Give a new container the attributes of the original; one that is an item too is the new item."""
    if not hasattr(original, "__dict__"):
        return
    if vars(original) is original:  # class AttrDict(dict): self.__dict__ = self
        object.__setattr__(new, "__dict__", new)
        return
    own = {key.name: value for key, value in zip(keys, values) if isinstance(key, Attribute)}
    twins = {id(old): value for old, value in zip(items, values) if not isinstance(old, SCALAR_TYPES)}
    vars(new).clear()
    vars(new).update({n: own[n] if n in own else twins.get(id(x), x) for n, x in _attributes(original).items()})


SCALAR_TYPES = (type(None), bool, int, float, complex, str, bytes)  # of which one object may stand for many


def _make_list(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    new = copy.copy(original)
    new[:] = values
    return new


def _make_tuple(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    items = values[: len(original)]
    try:
        new = tuple.__new__(type(original), items)  # past a __new__ that wants other arguments
    except TypeError:
        new = type(original)(items)  # torch.Size
    _set_attributes(new, original, keys, values, original)
    return new


def _take_dict(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return _with_attributes(value, list(dict.keys(value)), list(dict.values(value)))


def _make_dict(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    cls = type(original)
    base = next(base for base in cls.__mro__ if base in (dict, OrderedDict, defaultdict))
    # Past a constructor that wants arguments, and a __setitem__ that makes something else of an item or takes none.
    try:
        new = base.__new__(cls)
    except TypeError as error:
        raise _unbuildable(original) from error
    for key, value in zip(keys, values):
        if not isinstance(key, Attribute):
            base.__setitem__(new, key, value)
    if isinstance(original, defaultdict):
        new.default_factory = original.default_factory
    _set_slots(new, original)
    _set_attributes(new, original, keys, values, list(dict.values(original)))
    return new


def _take_user_dict(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return _with_attributes(value, list(value.data), list(value.data.values()))


def _make_user_dict(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    new = _copied(original)
    _set_attributes(new, original, keys, values, list(original.data.values()))
    new.data = copy.copy(original.data)
    new.data.update((key, value) for key, value in zip(keys, values) if not isinstance(key, Attribute))
    return new


def _copied(original: Any) -> Any:
    try:
        return copy.copy(original)
    except Exception as error:
        raise _unbuildable(original) from error


def _take_mapping(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    keys = tuple(value)
    return keys, [value[key] for key in keys]


def _make_mapping(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    # A shallow copy would share the mapping's inner store, and setting items would write into the user's batch.
    def is_right(new: Any) -> bool:
        return tuple(new) == keys and all(new[key] is value for key, value in zip(keys, values))

    try:
        new = type(original)(dict(zip(keys, values)))
        right = is_right(new)
    except Exception as error:
        raise _unbuildable(original) from error
    if not right:
        raise _unbuildable(original)
    for name, value in _attributes(original).items():
        before = vars(new).get(name, new)
        if before is new or not isinstance(value, (Mapping, list)):  # else it may be where the items are kept
            object.__setattr__(new, name, value)
            if not is_right(new):
                object.__setattr__(new, name, before)
    return new


def _unbuildable(original: Any) -> CutError:
    name = type(original).__name__
    return CutError(
        f"a {name} can't be built again from its items; "
        f"write register({name}, count=..., take=..., join=...) or give the cutter a plain dict."
    )


def _take_dataclass(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
    names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return _with_attributes(value, names, [getattr(value, name) for name in names])


def _make_dataclass(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    cls = type(original)
    try:
        new = object.__new__(cls)  # no __init__, so frozen classes and init=False fields come out as they were
    except TypeError:
        new = _copied(original)
    fields = {key: value for key, value in zip(keys, values) if not isinstance(key, Attribute)}
    _set_attributes(new, original, keys, values, [getattr(original, name) for name in fields])
    _set_slots(new, original)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


def _set_slots(new: Any, original: Any) -> None:
    for base in type(original).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            hidden = name.startswith("__") and not name.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{name}" if hidden else name
            if name not in ("__dict__", "__weakref__") and hasattr(original, name):
                object.__setattr__(new, name, getattr(original, name))


def pytree_codec(node: Any) -> Codec:
    with_keys = getattr(node, "flatten_with_keys_fn", None)

    def take(value: Any) -> tuple[tuple[Any, ...], Sequence[Any]]:
        values, _ = node.flatten_fn(value)
        values = list(values)
        if with_keys is not None:
            return tuple(_key_text(key) for key, _ in with_keys(value)[0]), values
        if isinstance(value, Mapping) and len(value) == len(values):
            return tuple(value), values
        return tuple(range(len(values))), values

    def make(original: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
        try:
            new = node.unflatten_fn(values, node.flatten_fn(original)[1])
        except Exception as error:
            raise _unbuildable(original) from error
        if type(new) is not type(original):
            raise _unbuildable(original)
        return new

    return Codec(take, make, _item)


def _key_text(key: Any) -> Any:
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), str(key))


DICT = Codec(
    lambda value: (tuple(value), list(value.values())),
    lambda original, keys, values: dict(zip(keys, values)),
    _item,
    plain=True,
)
LIST = Codec(_positions, lambda original, keys, values: list(values), _item, plain=True)
TUPLE = Codec(_positions, lambda original, keys, values: tuple(values), _item, plain=True)
LIST_LIKE = Codec(_positions, _make_list, _item)
TUPLE_LIKE = Codec(lambda value: _with_attributes(value, range(len(value)), value), _make_tuple, _step)
NAMED = Codec(lambda value: _with_attributes(value, value._fields, value), _make_tuple, _field)
DEQUE = Codec(_positions, lambda original, keys, values: type(original)(values, original.maxlen), _item)
DICT_LIKE = Codec(_take_dict, _make_dict, _step)
USER_DICT = Codec(_take_user_dict, _make_user_dict, _step)
MAPPING = Codec(_take_mapping, _make_mapping, _item)
DATACLASS = Codec(_take_dataclass, _make_dataclass, _field)
CODECS = ((list, LIST_LIKE), (deque, DEQUE), (dict, DICT_LIKE), (UserDict, USER_DICT), (Mapping, MAPPING))
