"""Gradients of 16-bit parameters: added up in float32 over the sub-batches, rounded to 16 bits once.

A bfloat16 number has 8 bits: 1 + 2⁻⁹ is 1 again, so the small gradients of many sub-batches vanish in the sum so far.
What is rounded before it gets here can't be mended: kernels give each sub-batch's own gradient in 16 bits, with an
error of up to 2⁻⁹ of *that* gradient. Where the gradients of few sub-batches nearly cancel, this is more than the
unsplit batch's error. And a mean in 16 bits divides by its own count of rows, rounded: compute losses in float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from batchsplit.errors import CutError

SHORT = (torch.bfloat16, torch.float16)
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")  # torch 2.10 and later


def check_accumulate(accumulate: str) -> None:
    """Raise for a precision to add gradients up in that is none."""
    if accumulate not in ("float32", "parameter"):
        raise CutError(
            f'accumulate={accumulate!r}: write accumulate="float32", or "parameter" for sums in the parameter\'s dtype.'
        )


class Sums:
    """The gradients of one step while they add up: what `.grad` holds, times `rest`, is the sum so far.

    On its own for parameters of 32 bits and more, whose gradients stay where autograd adds them up.
    """

    def __init__(self, parameters: Sequence[Tensor], model: nn.Module | None = None) -> None:
        self.parameters, self.model, self.rest = parameters, model, 1.0
        self.handles: list[RemovableHandle] = []

    @cached_property
    def can_weigh(self) -> bool:
        """Is the sum so far in `.grad`, and not with a framework that shards it?"""
        return self.model is None or not _is_sharded(self.model)

    def open(self) -> None:
        """Before the first backward."""

    def rest_of(self, shares: Iterable[tuple[float, torch.dtype]]) -> float:
        """The factor that a sub-batch's gradients are yet to be multiplied by, given its shares and the losses' dtypes.

        A loss of 16 bits passes on its share rounded to 16 bits, 0.3 as 0.3008. What is lacking comes back here, in
        float32; of several such shares, for the largest.
        """
        share, dtype = max((one for one in shares if one[1] in SHORT), default=(0.0, None), key=lambda one: one[0])
        if not share or not self.can_weigh:
            return 1.0
        sent = torch.tensor(share, dtype=dtype).item()
        return share / sent if 0 < sent < math.inf else 1.0

    def weigh(self, rest: float) -> None:
        """Before the backward of a sub-batch whose gradients are to count `rest` times."""
        if rest != self.rest:
            for grad in self._held():
                grad.mul_(self.rest / rest)
            self.rest = rest

    def last(self) -> None:
        """Before the backward that reduces the gradients among ranks.

        What they reduce has to be the gradient itself, for `rest` is another one on each rank.
        """
        rest = self.rest
        self.weigh(1.0)
        if rest != 1.0:
            for p in self._as_they_are():
                self.handles.append(p.register_hook(lambda grad: grad * rest))

    def _as_they_are(self) -> Iterable[Tensor]:
        """The parameters whose gradients add up in `.grad`."""
        return self.parameters

    def settle(self) -> None:
        """After the last backward: `.grad` is the whole gradient, to be looked at, unscaled and clipped."""
        self.weigh(1.0)

    def close(self, failed: bool) -> None:
        """Leave each parameter with a gradient of the dtype it had before; after a failure, with the one it had."""
        for handle in self.handles:
            handle.remove()

    def _held(self) -> Iterator[Tensor]:
        return (p.grad for p in self.parameters if p.grad is not None)


class ShortSums(Sums):
    """The same where some parameters are of 16 bits; `before` is what their `.grad` held."""

    def __init__(self, parameters: Sequence[Tensor], model: nn.Module | None = None) -> None:
        super().__init__(parameters, model)
        self.short = [p for p in parameters if _is_short(p)]
        self.before = {p: p.grad for p in self.short if p.grad is not None}

    def _rounded(self, p: Tensor, total: Tensor) -> Tensor:
        """The sum in the parameter's dtype, in the very tensor that held its gradient before, where there was one."""
        old = self.before.get(p)
        if total.is_sparse:
            return total.coalesce().to(p.dtype)
        return total.to(p.dtype) if old is None or old.is_sparse else old.copy_(total)

    def _put_back(self) -> None:
        for p in self.short:
            p.grad = self.before.get(p)


class SumsByDtype(ShortSums):
    """`.grad` is float32 itself, so autograd adds up in float32, and clipping and unscaling see float32 sums."""

    def open(self) -> None:
        for p in self.short:
            p.grad = None
            p.grad_dtype = torch.float32
            p.grad = self.before[p].float() if p in self.before else None

    def close(self, failed: bool) -> None:
        super().close(failed)
        for p in self.short:
            total, p.grad = p.grad, None
            p.grad_dtype = p.dtype
            if not failed and total is not None:
                p.grad = self._rounded(p, total)
        if failed:
            self._put_back()


class SumsByHook(ShortSums):
    """Each gradient is added to a float32 sum as soon as autograd has put it in `.grad`, which is emptied again.

    For torch before 2.10, and for DistributedDataParallel, whose buckets take gradients of the parameter's dtype only:
    there the last sub-batch leaves the rounded sum in `.grad`, before DistributedDataParallel's own hook reduces it.
    """

    def __init__(self, parameters: Sequence[Tensor], model: nn.Module | None = None) -> None:
        super().__init__(parameters, model)
        self.totals: dict[Tensor, Tensor] = {}
        self.reducing = False

    def open(self) -> None:
        for p in self.short:
            p.grad = None
            self._add(p, self.before.get(p))
            self.handles.append(p.register_post_accumulate_grad_hook(self._collect))

    def _collect(self, p: Tensor) -> None:
        if self.reducing:
            p.grad = self._final(p) if p.grad is None or p.grad.is_sparse else p.grad.copy_(self._final(p))
        else:
            self._add(p, p.grad)
            p.grad = None

    def _add(self, p: Tensor, grad: Tensor | None) -> None:
        if grad is None:
            return
        total = self.totals.get(p)
        if total is None:
            self.totals[p] = grad.float()
        elif total.is_sparse or grad.is_sparse:
            grad = grad.float()
            self.totals[p] = grad + total if total.is_sparse else total + grad  # a dense one has to come first
        else:
            total.add_(grad)

    def last(self) -> None:
        # A parameter that this sub-batch does not use is reduced as it is, so its sum has to be there. One that it uses
        # gets its gradient added in 16 bits: so that is caught on its way, and the float32 sum written over the result.
        rest, self.reducing = self.rest, True
        super().last()
        for p in self.short:
            if p in self.totals:
                p.grad = self._final(p)
            self.handles.append(p.register_hook(lambda grad, p=p: self._add(p, grad if rest == 1.0 else grad.float() * rest)))

    def _final(self, p: Tensor) -> Tensor:
        return self._rounded(p, self.totals[p] if self.rest == 1.0 else self.totals[p] * self.rest)

    def settle(self) -> None:
        if not self.reducing:
            for p in self.totals:
                p.grad = self._final(p)
        self.totals.clear()
        super().settle()

    def close(self, failed: bool) -> None:
        super().close(failed)
        self.totals.clear()
        if failed:
            self._put_back()

    def _as_they_are(self) -> Iterable[Tensor]:
        short = set(self.short)
        return [p for p in self.parameters if p not in short]

    def _held(self) -> Iterator[Tensor]:
        short = set(self.short)  # theirs is in the sums, or final already
        yield from self.totals.values()
        yield from (p.grad for p in self.parameters if p.grad is not None and p not in short)


@contextmanager
def summed(
    parameters: Iterable[Tensor],
    model: nn.Module | None = None,
    *,
    accumulate: str = "float32",
    whole: bool = False,
) -> Iterator[Sums | None]:
    """Gradients add up in float32 in here and are rounded once, on the way out; gives None where torch adds them up.

    A parameter takes part that is of 16 bits, and whose gradient is too: one whose `grad_dtype` you have set to float32
    (for an optimizer that takes such gradients) keeps it in float32. `model` tells of frameworks that reduce gradients.
    With `whole`, one backward is all there will be: nothing to add, so no copy is made.

    Example:
        >>> import torch
        >>> from batchsplit.precision import summed
        >>> w = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
        >>> with summed([w]):
        ...     for gradient in [1.0] + [2**-9] * 256:  # in bfloat16, 1 + 2⁻⁹ is 1
        ...         (w * gradient).sum().backward()
        >>> w.grad
        tensor([1.5000], dtype=torch.bfloat16)
    """
    wanted = [p for p in parameters if p.requires_grad]
    sums: Sums | None = Sums(wanted, model)
    if any(_is_short(p) for p in wanted):
        sums = None if accumulate == "parameter" or whole else _short_sums(wanted, model)
    failed = True
    try:
        if sums is not None:
            sums.open()
        yield sums
        failed = False
    finally:
        if sums is not None:
            sums.close(failed)


def _short_sums(parameters: Sequence[Tensor], model: nn.Module | None) -> Sums | None:
    if model is not None and _is_sharded(model):
        warnings.warn(
            "the gradients of this FSDP model's 16-bit parameters add up as FSDP has them: keep the parameters in "
            "float32 and give FSDP its own mixed precision, with reduce_dtype=torch.float32. "
            'accumulate="parameter" says that this is known.',
            stacklevel=2,
        )
        return None
    if HAS_GRAD_DTYPE and not (model is not None and _is_replicated(model)):
        return SumsByDtype(parameters, model)
    return SumsByHook(parameters, model)


def _is_short(p: Tensor) -> bool:
    return p.dtype in SHORT and getattr(p, "grad_dtype", p.dtype) == p.dtype


def _is_replicated(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def _is_sharded(model: nn.Module) -> bool:
    return any(
        hasattr(module, "set_requires_gradient_sync") or type(module).__name__ == "FullyShardedDataParallel"
        for module in model.modules()
    )
