"""What passes between the modules of a forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchsplit.checking.loan import INTERNALS, Loan
from batchsplit.checking.runs import Bench
from batchsplit.checking.widening import ROUNDING
from batchsplit.containers import map_leaves


@dataclass
class Call:
    """One call of a module: its tensors on the way in and on the way out."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    depth: int = 0  # 0 for a module that the loss function calls itself
    outputs: list[Tensor] = field(default_factory=list)


def trace(bench: Bench, loan: Loan, data: Any) -> tuple[list[Call], list[Call]]:
    """The calls of a forward, in the order they began and in the order they ended."""
    began: list[Call] = []
    ended: list[Call] = []
    running: list[Call] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(loan.name_of(module), module, _tensors((args, kwargs)), len(running))
        began.append(call)
        running.append(call)

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        call = running.pop()
        own = [
            v for k, v in vars(module).items() if k not in INTERNALS and isinstance(v, Tensor) and v.grad_fn is not None
        ]
        call.outputs = _tensors((result, own))
        ended.append(call)

    handles = []
    try:
        for module in bench.model.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        bench.terms(data)
    finally:
        for handle in handles:
            handle.remove()
    return began, ended


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(leaf: Any) -> None:
        # The entries of a packed sequence move about when lengths change.
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            found.append(leaf.detach().clone())

    map_leaves(note, value)
    return found


def changed(new: Tensor, old: Tensor) -> Tensor:
    """Entry by entry: is one tensor another than the other, by more than rounding?"""
    if not old.is_floating_point() or not old.numel():
        return new != old
    finite = old[torch.isfinite(old)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return ((new - old).abs() > ROUNDING.get(old.dtype, 0.0) * scale) | (torch.isnan(new) != torch.isnan(old))
