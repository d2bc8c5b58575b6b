"""How each operation of a forward moves the rows of its tensors, from two traces at different numbers of rows.

An operation without a rule here loses the rows' order: a random operation that needs it is then refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from batchsplit.randomness.axes import Axis, Pair, Rows
from batchsplit.randomness.operations import base
from batchsplit.randomness.row_ops import ALONG, FRESH, IN_ORDER, INDEXED, STRIDED, VIEWS
from batchsplit.randomness.trace import Event, Ref

_PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117, 1_000_121, 1_000_133)


@dataclass
class Source:
    """What the values of a tensor (and of its views) come from: rows of the batch, or random draws alone."""

    data: bool = False
    draws: set[int] = field(default_factory=set)
    by_value: bool = False  # whether the tensor's shape may depend on values, as that of x[mask] does
    lost: str = ""  # why rows written into it through one of its views are out of order


@dataclass
class Info:
    """A tensor of both traces: its axes, and where its values come from."""

    axes: list[Axis | None]
    source: Source
    counts: bool = False  # 0, 1, 2, ... : an index that leaves rows in order


@dataclass
class Call:
    """One result of one operation, as a rule sees it."""

    rows: Rows
    few: Event
    many: Event
    infos: list[Info]
    position: int
    met: Mapping[int, Info]
    scramble: Callable[[Sequence[Info], str], None]

    def lost(self, axis: Axis | None, reason: str = "") -> Axis | None:
        if axis is None:
            return None
        reason = reason or f"the order of its rows can't be followed through {self.many.op}"
        self.scramble(self.infos, reason)
        return Axis(axis.factor, lost=axis.lost or reason)

    def meet(self, target: Axis | None, candidates: list[tuple[Info, Axis]]) -> Axis | None:
        """The axis where entries of all candidates meet."""
        if target is None or target.lost or not candidates:
            if target is not None and target.factor > 1 and not candidates:
                return self.lost(target)
            return target
        result = candidates[0][1]
        for _, other in candidates[1:]:
            both = result.meets(other)
            if both is None:
                reason = result.lost or other.lost or f"rows in different orders meet in {self.many.op}"
                self.scramble([info for info, _ in candidates], reason)
                return Axis(target.factor, lost=reason)
            result = both
        if not result.known and result.lost:
            return Axis(target.factor, lost=result.lost)
        return result


Rule = Callable[[Call, list[Pair]], list[Axis | None]]


def pairs_of(few: Ref, many: Ref) -> list[Pair]:
    return list(zip(few.shape, many.shape, strict=True))


def _unknown(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    return [call.lost(call.rows.axis(sizes)) for sizes in pairs]


def _fresh(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    return [call.rows.axis(sizes) for sizes in pairs]


def _pointwise(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    result = []
    for i, sizes in enumerate(pairs):
        back = i - len(pairs)
        held = [(info, info.axes[back]) for info in call.infos if len(info.axes) >= -back]
        result.append(call.meet(call.rows.axis(sizes), [(info, axis) for info, axis in held if axis is not None]))
    return result


def _in_order(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    targets = [call.rows.axis(sizes) for sizes in pairs]
    if call.infos and pairs and len(pairs) == len(call.infos[0].axes):
        if [a.factor for a in targets if a] == [a.factor for a in call.infos[0].axes if a] and len(call.infos) == 1:
            return list(call.infos[0].axes)
    result = []
    for target in targets:
        factor = target.factor if target is not None else 0
        held = [(info, axis) for info in call.infos for axis in info.axes if axis is not None and axis.factor == factor]
        lost = next((a.lost for i in call.infos for a in i.axes if a is not None and a.lost), "")
        result.append(call.lost(target, lost) if lost and not held else call.meet(target, held))
    return result


def _view(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    sizes = pairs_of(call.few.tensors[0], call.many.tensors[0])
    axes = call.rows.split(sizes, call.infos[0].axes, pairs)
    for axis in axes:
        call.lost(axis if axis is not None and axis.lost else None, axis.lost if axis is not None else "")
    return axes


def _strided(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    """Views by strides: done once more on a tensor without values whose strides name its axes."""
    if not any(call.infos[0].axes) and all(few == many for few, many in pairs):
        return [None] * len(pairs)
    offsets, strides = zip(*(_probe(event, call.position) for event in (call.few, call.many)), strict=True)
    sizes = pairs_of(call.few.tensors[0], call.many.tensors[0])
    result: list[Axis | None] = []
    for i, pair in enumerate(pairs):
        target = call.rows.axis(pair)
        stride = strides[1][i]
        origin = next((j for j, prime in enumerate(_PRIMES) if stride and stride % prime == 0), None)
        axis = call.infos[0].axes[origin] if origin is not None and origin < len(sizes) else None
        if target is not None and axis is not None and origin is not None:
            step = stride // _PRIMES[origin]
            if pair == sizes[origin] and step == 1:
                target = axis
            else:
                starts = (offsets[0] // _PRIMES[origin], offsets[1] // _PRIMES[origin])
                target = call.rows.part(axis, pair, starts, step)
                if target.lost:
                    target = call.lost(target)
        elif target is not None and target.factor != 1:
            target = call.lost(target)  # `expand` gives no order to an axis of several entries a row
        result.append(target)
    return result


def _probe(event: Event, position: int) -> tuple[int, tuple[int, ...]]:
    shape = event.tensors[0].shape
    made: list[torch.Tensor] = []

    def probe(ref: Ref) -> torch.Tensor:
        made.append(torch.empty_strided(shape, _PRIMES[: len(shape)], device="meta"))
        return made[-1]

    args, kwargs = tree_map_only(Ref, probe, (event.args, event.kwargs))
    results = [leaf for leaf in tree_leaves(event.op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    return int(results[position].storage_offset()), tuple(results[position].stride())


def _cat(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    along = int(call.many.argument("dim", 0)) % len(pairs)
    infos = [info for info in call.infos if len(info.axes) == len(pairs)]
    result: list[Axis | None] = []
    for i, sizes in enumerate(pairs):
        target, held = call.rows.axis(sizes), [(info, info.axes[i]) for info in infos]
        parts = [(info, axis) for info, axis in held if axis is not None]
        if i != along or target is None or target.lost:
            result.append(call.meet(target, parts))
        elif len(parts) == len(held) and all(a.known for _, a in parts) and len({a.inner for _, a in parts}) == 1:
            result.append(Axis(target.factor, target.factor // parts[0][1].inner))
        else:
            result.append(call.lost(target))
    return result


def _stack(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    along = int(call.many.argument("dim", 0)) % len(pairs)
    inner = _pointwise(call, pairs[:along] + pairs[along + 1 :])
    return [*inner[:along], call.lost(call.rows.axis(pairs[along])), *inner[along:]]


def _repeat(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    axes = call.infos[0].axes
    result: list[Axis | None] = []
    for i, sizes in enumerate(pairs):
        target = call.rows.axis(sizes)
        position = i - (len(pairs) - len(axes))
        axis = axes[position] if position >= 0 else None
        if target is None or target.lost:
            result.append(target)
        elif axis is None:
            # A tensor without rows repeated once a row holds the same in each: any order is right for factor 1 only.
            result.append(target if target.factor == 1 else call.lost(target))
        elif axis.known:
            result.append(Axis(target.factor, target.factor // axis.inner))
        else:
            result.append(axis if target.factor == axis.factor else call.lost(target))
    return result


def _dims(call: Call) -> set[int]:
    ndim = len(call.infos[0].axes)
    given = call.many.argument("dims", call.many.argument("dim", None))
    if given is None or given == []:
        return set(range(ndim))
    return {int(dim) % ndim for dim in (given if isinstance(given, (list, tuple)) else [given])} if ndim else set()


def _along(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    if any(call.infos[0].axes[dim] is not None for dim in _dims(call)):
        return [call.lost(call.rows.axis(sizes), f"{call.many.op} reorders the rows") for sizes in pairs]
    return _in_order(call, pairs)


def _indexed(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    counts = len(call.infos) > 1 and call.infos[1].counts
    return _in_order(call, pairs) if counts else _along(call, pairs)


def _index(call: Call, pairs: list[Pair]) -> list[Axis | None]:
    """x[a, :, b]: rows stay in order where their axis is not indexed, or by 0, 1, 2, ..., or is written by a mask."""
    subject, position = call.infos[0], 0
    for index in call.many.argument("indices"):
        width = len(index.shape) if index is not None and index.mask else 1
        if index is not None and any(axis is not None for axis in subject.axes[position : position + width]):
            written = "index_put" in call.many.name and index.mask
            if not written and not call.met[index.number].counts:
                return [call.lost(call.rows.axis(sizes), f"{call.many.op} picks among the rows") for sizes in pairs]
        position += width
    return _in_order(call, pairs)


def rule_for(op: Any) -> Rule:
    """The rule of an operation: by name, or by torch's own tag for elementwise operations."""
    named = _RULES.get(base(op))
    return named or (_pointwise if torch.Tag.pointwise in op.tags else _unknown)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(IN_ORDER, _in_order),
    **dict.fromkeys(FRESH, _fresh),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(STRIDED, _strided),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(INDEXED, _indexed),
    **dict.fromkeys(
        ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_", "_unsafe_index_put"), _index
    ),
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    "repeat": _repeat,
    **dict.fromkeys(("where", "masked_fill", "masked_fill_", "copy_", "copy"), _pointwise),
    **dict.fromkeys(("bernoulli", "bernoulli_", "normal"), _pointwise),
    **dict.fromkeys(
        ("normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_"), _pointwise
    ),
}
