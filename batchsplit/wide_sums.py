"""Gradients of 16-bit parameters that several uses in one graph add up: in float32, rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SHORT = (torch.bfloat16, torch.float16)


class WideSums:
    """Stand-ins for the 16-bit parameters of a module, one set for each use of it in one graph.

    Autograd adds up what several uses of a parameter send back in the parameter's own dtype, where the small gradients
    of many sub-batches vanish: in bfloat16, 1 + 2⁻⁹ is 1. A stand-in has the parameter's values (its very memory) and
    sends its gradient back in float32; the sum of all is rounded to the parameter's dtype once. Recurrent layers keep a
    list of their weights that no stand-in reaches: theirs add up in 16 bits.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> sums = WideSums(layer)
        >>> x = [1.0] + [2**-9] * 256
        >>> outputs = [torch.func.functional_call(layer, sums.stand_ins(), torch.tensor([[v]]).bfloat16()) for v in x]
        >>> sum(output.sum().float() for output in outputs).backward()
        >>> layer.weight.grad
        tensor([[1.5000]], dtype=torch.bfloat16)
    """

    def __init__(self, module: nn.Module) -> None:
        learned = {name: p for name, p in module.named_parameters() if p.requires_grad and type(p) is nn.Parameter}
        self._parameters = {name: (_Sum.apply(p), p) for name, p in learned.items() if p.dtype in SHORT}

    def stand_ins(self) -> dict[str, Tensor]:
        """A new stand-in for each of the parameters, by name."""
        return {name: _StandIn.apply(total, p.detach()) for name, (total, p) in self._parameters.items()}


class _Sum(torch.autograd.Function):
    """Where the gradients meet: float32 in shape and dtype, without the memory."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        # torch from 2.10 on lets a parameter ask for gradients of another dtype
        ctx.dtype = getattr(p, "grad_dtype", None) or p.dtype
        return p.new_zeros((), dtype=torch.float32).expand(p.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.to(ctx.dtype)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.float(), None
