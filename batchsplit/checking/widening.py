"""Computing in float64 what was written for a lower precision, and seeing the calls that a check has to know of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# Relative to the largest of a tensor's numbers: what is less apart is the same, but for rounding.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
CASTS = {"float", "half", "bfloat16"}


@dataclass
class Seen:
    """What was called on the way: class weights and ignored labels of losses, widths of sequences that were padded."""

    class_weights: list[Tensor] = field(default_factory=list)
    ignored: set[int] = field(default_factory=set)
    padded_widths: list[int] = field(default_factory=list)


class Widening(TorchFunctionMode):
    """Puts stand-ins in the place of the user's tensors, and float64 in the place of lower precisions.

    With `dtype=None` only the first. Casts (`x.float()`, `dtype=torch.float32`) become casts to float64: a model that
    computes its softmax in float32 would otherwise be no more exact than that. `pad_to` is the width to which
    sequences are padded inside the model (`pad_packed_sequence`, `pad_sequence`), instead of to the longest.
    """

    def __init__(self, lent: Callable[[Tensor, bool], Tensor | None], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.lent, self.dtype = lent, dtype
        self.seen = Seen()
        self.pad_to: list[int] | None = None

    def wide(self, tensor: Tensor) -> Tensor:
        """The tensor in float64, where that is wanted and it is of a lower precision."""
        return tensor.to(WIDE[tensor.dtype]) if self.narrow(tensor) else tensor

    def narrow(self, tensor: Tensor) -> bool:
        """Is it of a lower precision than wanted?"""
        return self.dtype is not None and tensor.dtype in WIDE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name == "view" and any(isinstance(arg, torch.dtype) for arg in args):  # bits read as another type
            return func(*args, **kwargs)
        own_first = name in ("__get__", "__set__", "__setitem__") or name.startswith("__i") or _in_place(name)
        new_args = [self._given(arg, keep=own_first and i == 0) for i, arg in enumerate(args)]
        new_kwargs = {key: self._given(arg, keep=key == "out") for key, arg in kwargs.items()}
        if self.dtype is not None and name in CASTS and new_args:
            return new_args[0].to(self.dtype)
        self._note(func, name, new_args, new_kwargs)
        result = func(*new_args, **new_kwargs)
        return self._padded(name, result, new_args)

    def _given(self, arg: Any, keep: bool = False) -> Any:
        """What an operation gets for one argument; `keep` where it writes into it, so that a copy will not do."""
        if isinstance(arg, Tensor):
            # A leaf of another kind that wants a gradient is a parameter, reached by another way than its module.
            missed = arg.requires_grad and arg.is_leaf and (isinstance(arg, torch.nn.Parameter) or self.narrow(arg))
            own = self.lent(arg, missed)
            return own if own is not None else arg if keep else self.wide(arg)
        if type(arg) in (list, tuple):
            return type(arg)(self._given(item) for item in arg)
        if self.dtype is not None and isinstance(arg, torch.dtype):
            return WIDE.get(arg, arg)
        return arg

    def _note(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        if func in (F.cross_entropy, F.nll_loss):
            named = (
                dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)) | kwargs
            )
            self.seen.ignored.add(named.get("ignore_index", -100))
            if named.get("weight") is not None:
                self.seen.class_weights.append(named["weight"].detach())
        if name == "_pad_packed_sequence" and self.pad_to is not None and len(args) == 5:
            args[4] = max(args[4], self.pad_to[len(self.seen.padded_widths)])

    def _padded(self, name: str, result: Any, args: list[Any]) -> Any:
        if name == "_pad_packed_sequence":
            self.seen.padded_widths.append(result[0].shape[1 if args[2] else 0])
        elif name == "pad_sequence":
            axis = 1 if len(args) > 1 and args[1] else 0
            if self.pad_to is not None:
                missing = self.pad_to[len(self.seen.padded_widths)] - result.shape[axis]
                after = [0, 0] * (result.dim() - 1 - axis) + [0, max(missing, 0)]
                result = F.pad(result, after, value=args[2] if len(args) > 2 else 0.0)
            self.seen.padded_widths.append(result.shape[axis])
        return result


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
