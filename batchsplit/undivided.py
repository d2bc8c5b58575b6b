"""A `backward` that divides the loss once more, on top of the shares, is found out in its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from batchsplit.errors import LossError


class Undivided:
    """Calls a `backward` of somebody else's, and raises if it makes the loss smaller: shares add up to 1 by themselves.

    Engines that accumulate gradients divide each loss by the number of their steps. A `GradScaler` makes it larger.

    Raises:
        LossError: before anything ran, where `backward` is the method of an Accelerator that is known to divide; else
            after the first call.

    Example:
        >>> import torch
        >>> loss = torch.ones((), requires_grad=True)
        >>> Undivided(lambda loss: (loss / 4).backward())(loss)
        Traceback (most recent call last):
        batchsplit.errors.LossError: backward multiplies the loss by 0.25, ...
    """

    def __init__(self, backward: Callable[[Tensor], Any]) -> None:
        self.backward, self.seen = backward, False
        steps = getattr(getattr(backward, "__self__", None), "gradient_accumulation_steps", 1)
        if callable(backward) and isinstance(steps, int) and steps > 1:
            raise LossError(
                f"backward is a method of an object with gradient_accumulation_steps={steps}, which divides the loss by "
                f"{steps} on top of the shares: write gradient_accumulation_steps=1. To step on several loader batches "
                f"as one, write group(loader, batches={steps}); batchsplit.trainers.accelerate takes both into account."
            )

    def __call__(self, loss: Tensor) -> None:
        if self.seen:
            self.backward(loss)
            return
        grads: list[Tensor] = []
        handle = loss.register_hook(grads.append)
        try:
            self.backward(loss)
        finally:
            handle.remove()
        self.seen = True
        factor = float(grads[0]) if grads else 1.0
        if 0 < factor < 1:
            raise LossError(
                f"backward multiplies the loss by {factor:.6g}, on top of the shares, which add up to 1 by themselves: "
                "gradients would be that much too small. Switch its division off (an accumulation count of 1); a "
                "factor that you do want belongs into loss_fn."
            )
