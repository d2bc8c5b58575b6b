"""What modules remember from one forward to the next: buffers, parameters changed by hand, numbers and containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from batchsplit.checking.widening import ROUNDING

if TYPE_CHECKING:
    from batchsplit.checking.loan import Loan

State = dict[str, Any]  # by qualified name
_CONTAINERS = (list, tuple, deque, set, frozenset)


def state_of(loan: Loan) -> State:
    """A copy of what the modules remember now."""
    from batchsplit.checking.loan import INTERNALS

    state: State = {}
    for name, module in loan.named_modules():
        for key, value in module._buffers.items():
            if value is not None:
                state[_join(name, key)] = value.detach().clone()
        for key, changed in loan.changed_parameters(module):
            state[_join(name, key)] = changed.detach().clone()
        for key, value in vars(module).items():
            if key not in INTERNALS and key != "training":
                kept = _kept(value)
                if kept is not None:
                    state[_join(name, key)] = kept
    return state


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _kept(value: Any) -> Any:
    """A copy of a value that can be compared; None for any other."""
    if isinstance(value, Tensor):
        return None if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, _CONTAINERS):
        return [_kept(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _kept(item) for key, item in value.items()}
    return None


def same(a: Any, b: Any) -> bool:
    """Are two remembered values equal, up to rounding?"""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool(np.array_equal(a, b) or np.allclose(a, b, 1e-9, 0, equal_nan=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        scale = float(b.abs().max()) if b.numel() else 0.0
        return torch.allclose(a, b, rtol=0.0, atol=ROUNDING.get(a.dtype, 0.0) * scale, equal_nan=True)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b or (isinstance(a, float) and abs(a - b) <= 1e-9 * abs(b)))


def differing(before: State, after: State) -> list[str]:
    """The names of what differs between two states."""
    names = [name for name in after if name in before]
    return [name for name in names if not same(before[name], after[name])]
