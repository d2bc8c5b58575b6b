"""Which module mixes rows? One row's input is perturbed, and the outputs of other rows are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchsplit.checking.report import Cause
from batchsplit.checking.runs import Bench, whole, with_limit
from batchsplit.checking.tracing import Call, changed, trace
from batchsplit.leaves import Dense, RowList
from batchsplit.randomness.streams import Streams

PERTURBED = 6  # so many rows are perturbed, one after the other


class Influence:
    """For every tensor that passes between modules: entry by entry, how many of the perturbed rows move it."""

    def __init__(self, base: list[Call], rows: int) -> None:
        self.base, self.rows = base, rows
        self.counts = [[torch.zeros(t.shape, dtype=torch.uint8, device=t.device) for t in _of(call)] for call in base]
        self.comparable = True

    def add(self, calls: list[Call]) -> None:
        """Compare another forward, in which one more row was perturbed."""
        if [call.name for call in calls] != [call.name for call in self.base]:
            self.comparable = False
            return
        for call, before, counts in zip(calls, self.base, self.counts, strict=True):
            for new, old, count in zip(_of(call), _of(before), counts, strict=False):
                if new.shape == old.shape:
                    count += changed(new, old)

    def culprit(self) -> Call | None:
        """The first call to end whose outputs mix rows, while its inputs do not."""
        for call, counts in zip(self.base, self.counts, strict=True):
            mixed = [self._holds_rows(count) and bool((count >= 2).any()) for count in counts]
            inputs, outputs = mixed[: len(call.inputs)], mixed[len(call.inputs) :]
            if any(outputs) and not any(inputs):
                return call
        return None

    def _holds_rows(self, tensor: Tensor) -> bool:
        """A mean over the batch depends on all rows by rights."""
        return any(size and size % self.rows == 0 for size in tensor.shape)


def _of(call: Call) -> list[Tensor]:
    return [*call.inputs, *call.outputs]


def mixing_causes(bench: Bench, quiet: Bench) -> list[Cause]:
    """The first module that mixes the rows of a batch, or nothing. `quiet` draws no random numbers where that can "
    "be."""
    found = _by_perturbing(bench)
    how = "moves"
    if found is None:
        try:
            found, how = _by_cutting(quiet), "computes something else"
        except Exception:  # a model that gives no loss in eval mode
            return []
    if found is None:
        return []
    return [_cause(found, how)]


def _by_perturbing(bench: Bench) -> Call | None:
    with bench.lent() as loan:
        base = trace(bench, loan, bench.data())[1]
    for change in (_jogged, None):
        influence = Influence(base, bench.rows)
        for row in range(min(PERTURBED, bench.rows)):
            try:
                with bench.lent() as loan:
                    calls = trace(bench, loan, perturbed(bench, row, change))[1]
            except Exception:  # a perturbed batch may break what a model takes for granted
                continue
            influence.add(calls)
        if influence.comparable and influence.culprit() is not None:
            return influence.culprit()
    return None


def perturbed(bench: Bench, row: int, change: Callable[[Tensor, Tensor], Tensor] | None) -> Any:
    """A copy of the batch with one row changed; without a `change`, replaced by another row."""
    before = Streams.now()  # dropout is to draw the same masks
    cut = with_limit(whole(bench.cutter), rows=1).cut(bench.data())
    piece = cut._pieces[0]
    other = (row + 1) % cut.rows
    values = []
    for leaf, column, value in zip(piece.reading.leaves, piece.columns, piece.leaves, strict=True):
        if not leaf.kind.per_row or (change is not None and not isinstance(leaf.kind, (Dense, RowList))):
            values.append(value)
            continue
        parts = list(column)
        if change is None:
            parts[row] = parts[other]
        elif isinstance(value, (Tensor, np.ndarray)):
            parts[row] = _as(change(torch.as_tensor(parts[row]), torch.as_tensor(value)), value)
        elif isinstance(parts[row], list):
            parts[row] = [change(item, item) if isinstance(item, Tensor) else item for item in parts[row]]
        values.append(leaf.kind.join(parts, like=value))
    before.restore()
    return piece.reading.root.build(values)


def _as(tensor: Tensor, like: Any) -> Any:
    return tensor.numpy() if isinstance(like, np.ndarray) else tensor


def _jogged(part: Tensor, leaf: Tensor) -> Tensor:
    """A row with noise on its numbers, or with other tokens; masks, padding and single labels as they are."""
    if part.layout != torch.strided or part.is_complex() or part.dtype == torch.bool:
        return part
    if part.is_floating_point():
        if bool(((leaf == 0) | (leaf == 1)).all()):
            return part
        return torch.where(part == 0, part, part + torch.randn_like(part) * (leaf.std() + 0.1 * leaf.abs().max()))
    if leaf.dim() < 2 or not leaf.numel():
        return part
    padding = torch.cat([leaf[..., 0].flatten(), leaf[..., -1].flatten()]).unique(return_counts=True)
    special = {int(v) for v, n in zip(*padding, strict=True) if n > 1} | {-100, 0}
    ordinary = leaf[~torch.isin(leaf, torch.tensor(sorted(special), device=leaf.device))]
    if len(ordinary.unique()) < 2:
        return part
    drawn = ordinary[torch.randint(len(ordinary), part.shape, device=part.device)]
    kept = torch.isin(part, torch.tensor(sorted(special), device=part.device))
    return torch.where(kept, part, drawn)


def _by_cutting(bench: Bench) -> Call | None:
    """The first call whose outputs differ when the batch is cut, though its inputs do not: for what moves by jumps
    (a capacity) and for what a module computes of the whole batch beside its rows (an auxiliary loss)."""
    with bench.lent() as loan:
        unsplit = trace(bench, loan, bench.data())[1]
    parts: list[list[Call]] = []
    cut = bench.cutter.cut(bench.batch)
    for index in range(len(cut)):
        with bench.lent() as loan:
            parts.append(trace(bench, loan, bench.cutter.cut(bench.data())[index].data)[1])
    if any([call.name for call in part] != [call.name for call in unsplit] for part in parts):
        return None
    sizes = [sub.rows for sub in cut]
    for call, *pieces in zip(unsplit, *parts, strict=True):
        inputs = [_same(one, list(p), sizes) for one, *p in zip(call.inputs, *(x.inputs for x in pieces), strict=False)]
        # The model's own scalars are the loss, or terms of it.
        outputs = [
            (one.dim() == 0 and call.module is bench.model) or _same(one, list(p), sizes)
            for one, *p in zip(call.outputs, *(x.outputs for x in pieces), strict=False)
        ]
        if False in outputs and False not in inputs:
            return call
    return None


def _same(whole: Tensor, parts: list[Tensor], sizes: list[int]) -> bool | None:
    """Do the parts make up the whole? None where nobody can tell how they would."""
    if not whole.is_floating_point() or any(part.dim() != whole.dim() for part in parts):
        return None
    fitting = [
        torch.cat(parts, axis)
        for axis in range(whole.dim())
        if sum(part.shape[axis] for part in parts) == whole.shape[axis] and _others_equal(whole, parts, axis)
    ]
    if not fitting and all(part.shape == whole.shape for part in parts) and whole.numel() > 0:
        # A statistic without rows: that of the whole is the mean, the sum or each of those of the parts.
        rows = sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
        fitting = [rows, sum(parts[1:], parts[0]), parts[0]]  # type: ignore[list-item]
    if not fitting:
        return None
    return any(not bool(changed(one, whole).any()) for one in fitting)


def _others_equal(whole: Tensor, parts: list[Tensor], axis: int) -> bool:
    return all(
        part.shape[:axis] == whole.shape[:axis] and part.shape[axis + 1 :] == whole.shape[axis + 1 :] for part in parts
    )


def _cause(call: Call, how: str) -> Cause:
    cls = type(call.module).__name__
    where = call.name or "the model itself"
    seen = (
        f"other rows' outputs move when one row's input does. `{where}` ({cls}) is the first module that mixes rows"
        if how == "moves"
        else f"`{where}` ({cls}) is the first module that computes something else from a sub-batch than from the batch"
    )
    return Cause("module", f"rows are coupled by a module: {seen}.", _advice(call, where, cls), where)


def _advice(call: Call, where: str, cls: str) -> str:
    module = call.module
    name = f"{call.name} {cls}".lower()
    if isinstance(module, _BatchNorm) or "batchnorm" in cls.lower():
        return (
            f"{where} normalises over the rows it is given. Freeze it (`.eval()`, running statistics), use GroupNorm "
            'or LayerNorm instead, or accept that each sub-batch is normalised by itself: coupled="allow".'
        )
    if isinstance(module, nn.MultiheadAttention) or "attention" in name:
        return (
            f"{where} attends across the batch axis. Is it given (rows, time, ...) where it takes (time, rows, ...)? "
            "Write batch_first=True, or transpose. If it is meant, no cut of the rows can be exact."
        )
    if any(word in name for word in ("router", "moe", "gate", "expert")):
        return (
            f"{where} routes by the whole batch (its capacity, or the balance of load). Give it a capacity per row (or "
            "none), and balance over fixed groups of tokens; or accept that each sub-batch is balanced by itself."
        )
    return (
        f"Let {where} treat each row by itself (statistics per row, or frozen ones); or run it on the joined "
        "outputs of all rows, with the part before it in a CutForward."
    )
