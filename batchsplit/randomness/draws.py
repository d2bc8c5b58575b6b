"""Drawing one random operation for the whole batch and keeping the rows of a sub-batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from batchsplit.randomness.axes import Axis
from batchsplit.randomness.follow import Draw, Follower
from batchsplit.randomness.operations import (
    FACTORIES,
    FUSED,
    FUSED_RNN,
    STAND_IN,
    RandomnessError,
    base,
    draws_nothing,
    refusal,
)
from batchsplit.randomness.trace import Event, Ref, Trace

Where = slice | torch.Tensor


@dataclass(frozen=True)
class Place:
    """A tensor at any number of rows: its shape, its strides, and the axis that holds the rows (None: shared)."""

    few: tuple[int, tuple[int, ...], tuple[int, ...]]
    many: tuple[int, tuple[int, ...], tuple[int, ...]]
    axis: int | None
    outer: int
    inner: int

    def shape(self, rows: int) -> list[int]:
        return [self._line(rows, few, many) for few, many in zip(self.few[1], self.many[1], strict=True)]

    def strides(self, rows: int) -> list[int]:
        return [self._line(rows, few, many) for few, many in zip(self.few[2], self.many[2], strict=True)]

    def _line(self, rows: int, few: int, many: int) -> int:
        return few + (many - few) * (rows - self.few[0]) // (self.many[0] - self.few[0])

    def by_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The tensor as `(..., outer, rows, inner, ...)`, a view."""
        assert self.axis is not None
        return tensor.unflatten(self.axis, (self.outer, rows, self.inner))

    def take(self, whole: torch.Tensor, where: Where, rows: int) -> torch.Tensor:
        """The sub-batch's rows `(..., outer, rows, inner, ...)` of a tensor that holds the whole batch's."""
        assert self.axis is not None
        view = self.by_rows(whole, rows)
        if isinstance(where, slice):
            return view.narrow(self.axis + 1, where.start, where.stop - where.start)
        return view.index_select(self.axis + 1, where.to(whole.device))

    def put(self, whole: torch.Tensor, where: Where, rows: int, part: torch.Tensor) -> None:
        assert self.axis is not None
        view, part = self.by_rows(whole, rows), self.by_rows(part, count(where))
        if isinstance(where, slice):
            view.narrow(self.axis + 1, where.start, where.stop - where.start).copy_(part)
        else:
            view.index_copy_(self.axis + 1, where.to(whole.device), part)


def count(where: Where) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)


@dataclass(frozen=True)
class WholeDraw:
    """One random operation of the forward, as the unsplit batch runs it."""

    op: Any
    title: str
    inputs: list[Place]
    outputs: list[Place]
    size: Place | None

    @property
    def shared(self) -> bool:
        return all(place.axis is None for place in (*self.inputs, *self.outputs))

    def fits(self, op: Any, args: Any, kwargs: Any, rows: int) -> bool:
        """Whether this call is the operation, on as many rows."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if op is not self.op or len(tensors) != len(self.inputs):
            return False
        if self.size is not None and list(args[_size_position(op)]) != self.size.shape(rows):
            return False
        return all(list(t.shape) == place.shape(rows) for t, place in zip(tensors, self.inputs, strict=True))

    def draw(self, args: Any, kwargs: Any, where: Where, rows: int) -> Any:
        """Run the operation for all `rows`, keep those of the sub-batch."""
        if self.shared:
            return self.op(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = [leaves[i] for i in positions]
        written = _written(self.op, args, kwargs)
        for i, tensor, place in zip(positions, given, self.inputs, strict=True):
            if place.axis is not None:
                leaves[i] = self._whole(tensor, place, where, rows, any(tensor is w for w in written))
        whole_args, whole_kwargs = tree_unflatten(leaves, spec)
        if self.size is not None:
            at = _size_position(self.op)
            whole_args = (*whole_args[:at], self.size.shape(rows), *whole_args[at + 1 :])
        results, shape = tree_flatten(self.op(*whole_args, **whole_kwargs))
        places = iter(self.outputs)
        for i, whole in enumerate(results):
            place = next(places) if isinstance(whole, torch.Tensor) else None
            if place is None:
                continue
            own = next((t for j, t in zip(positions, given, strict=True) if leaves[j] is whole), None)
            if own is None:
                own = _as_part(whole, place, count(where)) if place.axis is not None else whole
            if place.axis is not None:
                place.by_rows(own, count(where)).copy_(place.take(whole, where, rows))
            results[i] = own
        return tree_unflatten(results, shape)

    def _whole(self, part: torch.Tensor, place: Place, where: Where, rows: int, written: bool) -> torch.Tensor:
        strides = self._strides(part, place, count(where), rows)
        whole = torch.empty_strided(place.shape(rows), strides, dtype=part.dtype, device=part.device)
        if not written and base(self.op) in STAND_IN:
            place.put(whole.fill_(STAND_IN[base(self.op)]), where, rows, part)
        return whole

    def _strides(self, part: torch.Tensor, place: Place, own: int, rows: int) -> list[int]:
        """Streams follow the order in memory, so the whole tensor needs the activation's."""
        expected = place.strides(own)
        if all(a == b or size == 1 for a, b, size in zip(part.stride(), expected, part.shape, strict=True)):
            return place.strides(rows)
        shape = place.shape(rows)
        if all(size > 1 or whole == 1 for size, whole in zip(part.shape, shape, strict=True)) and _dense(part):
            return _ordered(shape, part.stride())
        raise RandomnessError(
            f"{self.title}: its tensor lies in memory with strides {tuple(part.stride())} where {tuple(expected)} were "
            "expected, so the order of the unsplit batch's draws is unknown; cut into sub-batches of more rows, or "
            " call .contiguous() before the random operation"
        )


def _size_position(op: Any) -> int:
    return next(i for i, formal in enumerate(op._schema.arguments) if formal.name == "size")


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    formals = op._schema.arguments
    values = [*zip([formal.name for formal in formals], args, strict=False), *kwargs.items()]
    names = {formal.name for formal in formals if formal.alias_info is not None and formal.alias_info.is_write}
    return [value for name, value in values if name in names and isinstance(value, torch.Tensor)]


def _dense(tensor: torch.Tensor) -> bool:
    return list(tensor.stride()) == _ordered(list(tensor.shape), tensor.stride())


def _ordered(shape: list[int], like: tuple[int, ...]) -> list[int]:
    """Strides without gaps, axes in the order of the strides `like`."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda i: (like[i], -i)):
        strides[axis] = step
        step *= shape[axis]
    return strides


def _as_part(whole: torch.Tensor, place: Place, own: int) -> torch.Tensor:
    assert place.axis is not None
    shape = list(whole.shape)
    shape[place.axis] = place.outer * own * place.inner
    strides = _ordered(shape, whole.stride())
    return torch.empty_strided(shape, strides, dtype=whole.dtype, device=whole.device)


@dataclass(frozen=True)
class Learned:
    """Random operations of a forward in order, up to where `complete` is False: there its draws steer it apart."""

    draws: list[WholeDraw]
    steered: bool
    complete: bool


def whole_draws(few: Trace, many: Trace, partly: bool = False) -> Learned:
    """The random operations of a forward in order, proven to be drawable by rows.

    With `partly`, what comes after a point where the draws steer the two forwards apart is left out.

    Raises:
        RandomnessError: one of them is not; the message names it, the reason and the way out.
    """
    follower = Follower(few, many)
    draws = [d for d in follower.draws if not draws_nothing(d.many.op, d.many.args, d.many.kwargs)]
    partly = partly and follower.steered and follower.parted
    if partly:
        draws = list(takewhile(lambda draw: not draw.trouble, draws))
    settled = [_settle(draw, number, few.rows, many.rows) for number, draw in enumerate(draws, start=1)]
    return Learned(settled, follower.steered, not partly)


def _settle(draw: Draw, number: int, few: int, many: int) -> WholeDraw:
    op, name = draw.many.op, base(draw.many.op)
    tensors = draw.many.results or draw.many.tensors
    shape = f" of shape {tensors[0].shape}" if tensors else ""
    inside = f" in {draw.many.module}" if draw.many.module else ""
    title = f"randomness='whole': {op}{shape}{inside} (random operation {number} of the forward, {many} rows)"

    def refuse(reason: str) -> RandomnessError:
        return RandomnessError(f"{title} can't be drawn row by row: {reason}; or use randomness='fresh'")

    grows = any(axis is not None for axes in (*draw.inputs, *draw.outputs) for axis in axes)
    scalars = [_scalars(event) for event in (draw.few, draw.many)]
    why = refusal(op)
    if why and (grows or scalars[0] != scalars[1] or name in FUSED or name in FUSED_RNN):
        raise refuse(why)
    if scalars[0] != scalars[1]:
        raise refuse(f"its arguments change with the number of rows ({scalars[0]} at {few}, {scalars[1]} at {many})")
    if draw.trouble:
        raise refuse(f"{draw.trouble}; keep the batch on an axis of its own, in its order, up to here")
    written = {ref.number for ref in draw.many.results}
    reads = [ref for ref in draw.many.tensors if name in STAND_IN and ref.number not in written]
    for ref, axes in [
        *zip(draw.many.tensors, draw.inputs, strict=True),
        *zip(draw.many.results, draw.outputs, strict=True),
    ]:
        _check(ref, axes, ref in reads or ref.number in written, refuse)
    outputs = [axis for axes in draw.outputs for axis in axes if axis is not None]
    if not outputs and any(axis for ref, axes in zip(draw.many.tensors, draw.inputs) if ref in reads for axis in axes):
        raise refuse("it draws from all rows at once, which couples them")
    inputs = [_place(*item, few, many) for item in zip(draw.few.tensors, draw.many.tensors, draw.inputs, strict=True)]
    places = [_place(*item, few, many) for item in zip(draw.few.results, draw.many.results, draw.outputs, strict=True)]
    sized = name in FACTORIES and draw.many.argument("size") is not None
    return WholeDraw(op, title, inputs, places, places[0] if sized else None)


def _check(ref: Ref, axes: list[Axis | None], matters: bool, refuse: Any) -> None:
    held = [axis for axis in axes if axis is not None]
    if len(held) > 1:
        raise refuse("two of its axes grow with the batch, which couples the rows")
    for axis in held:
        if axis.factor == 0 or (axis.lost and matters):
            raise refuse(f"{axis.lost}; keep the batch on an axis of its own, in its order, up to here")
        if not axis.known and matters:
            raise refuse(
                f"nothing shows which rows its {axis.factor} entries a row belong to; draw it in the shape "
                "(rows, ..., ...) and flatten it afterwards"
            )


def _scalars(event: Event) -> dict[str, Any]:
    formals = event.op._schema.arguments
    values = {**dict(zip([formal.name for formal in formals], event.args, strict=False)), **event.kwargs}
    plain = tree_map_only(Ref, lambda ref: None, values)
    return {key: value for key, value in plain.items() if key not in ("size", "generator")}


def _place(few: Ref, many: Ref, axes: list[Axis | None], rows_few: int, rows_many: int) -> Place:
    at = next((i for i, axis in enumerate(axes) if axis is not None), None)
    axis = axes[at] if at is not None else None
    outer, inner = (axis.outer or 1, axis.inner) if axis is not None else (1, 1)
    return Place((rows_few, few.shape, few.strides), (rows_many, many.shape, many.strides), at, outer, inner)
