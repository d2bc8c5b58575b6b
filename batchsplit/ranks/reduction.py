"""How the gradients of a step get from one rank to the others: held back until the sub-batch that runs last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchsplit.cuts import Cut
from batchsplit.errors import CutError
from batchsplit.losses import Accumulated
from batchsplit.ranks.others import Ranks

Hold = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Turn:
    """What one sub-batch is to do for the other ranks."""

    last: bool
    reduces: bool  # after it, gradients are reduced
    carries: bool  # by its own backward
    missing: int  # so many terms of the loss have no weight in it
    silent: bool  # none has, but its backward has to run


def chosen_hold(sync: Any, found: Hold | None) -> Hold | None:
    """The context that holds the reduction back: as `sync` says, None for the one found on the model, False for none."""
    if sync is None:
        return found
    if sync is False:
        return None
    if not callable(sync):
        raise CutError(f"sync={sync!r}: write None, False, or a function that returns a context, like model.no_sync.")
    chosen: Any = sync
    return chosen


class Reduction:
    """The reduction of one step's gradients; this class knows but a context that holds it back, or not even that.

    The sub-batch that runs last is not held back, and so carries the reduction; with `sync=False` every one does.
    """

    recovers = False  # can a sub-batch that ran out of memory be run again, whichever it is?

    def __init__(
        self, model: Any = None, sync: Any = None, found: Hold | None = None, ranks: Ranks | None = None
    ) -> None:
        self.model, self.each = model, sync is False
        self.hold = chosen_hold(sync, found)
        self.ranks = Ranks() if ranks is None else ranks
        self.most = 0  # sub-batches on the rank that has most
        self.done = False  # is the reduction through?
        self.sending = False  # is it under way, so that nothing can be taken back?
        self.told = False  # have the others heard how the step went?

    @property
    def idle(self) -> bool:
        """Is there nothing to do here?"""
        return self.hold is None and self.ranks.count == 1

    def agreed(self, prepare: Callable[[], Cut]) -> Cut:
        """The cut to run: see `Ranks.agreed`."""
        cut, self.most = self.ranks.agreed(prepare)
        return cut

    def check(self, recovers: bool, randomness: str) -> None:
        """Raise for what these ranks can't do together."""

    def begin(self, cut: Cut, forward: Callable[[], Any]) -> None:
        """The sub-batches of a step are about to run, perhaps anew; `forward` runs one that has weight."""
        self.done = self.sending = self.told = False

    def turn(self, last: bool, missing: int, terms: int, recovers: bool) -> Turn:
        """What a sub-batch is to do that has no weight for `missing` of the loss's `terms`."""
        return Turn(last, last or self.each, last, missing, missing == terms and last)

    @contextmanager
    def around(self, turn: Turn) -> Iterator[None]:
        """Forward and backward of a sub-batch run in here."""
        held = nullcontext() if turn.carries or self.hold is None else self.hold()
        with held, harmless(self.model) if turn.silent else nullcontext():
            yield

    def unweighed(self, loss: Any) -> None:
        """A sub-batch has no weight for some terms of this loss, which therefore send nothing backward."""

    def uncalled(self) -> bool:
        """Do other ranks wait for a forward of the model, which this sub-batch did without?"""
        return False

    def sends(self, loss: Tensor, turn: Turn) -> Tensor | None:
        """What to send backward, just before it is, of a weighed loss (any loss in a silent turn)."""
        return loss

    def reduce(self, turn: Turn) -> None:
        """A sub-batch that is to reduce the gradients is through; where it could not carry that, it is done now."""
        self.done = True

    def again(self) -> None:
        """A sub-batch ran out of memory, and will be run again in parts."""

    def union(self, result: Accumulated) -> Accumulated:
        """All sub-batches are through here: see `Ranks.union`."""
        self.told = True
        return self.ranks.union(result)

    def failed(self, tell: bool) -> None:
        """The step ends with an error: forget its gradients, and (if told to) let the others hear of it, not wait."""
        if not self.told:
            self.told = True
            self.leave(tell)

    def leave(self, tell: bool) -> None:
        """The same, for a step that the others have not heard of."""


@contextmanager
def harmless(model: torch.nn.Module | None, later: Sequence[torch.nn.Module] = ()) -> Iterator[None]:
    """Backward in here reaches the parameters as zeros, whatever NaN comes along: for a sub-batch of weight 0 that must run.

    The modules `later` have their parameters only once their forward begins.
    """
    handles: list[Any] = []
    seen: set[Tensor] = set()

    def silence(module: torch.nn.Module, args: Any = ()) -> None:
        for p in module.parameters():
            if p.requires_grad and p not in seen:
                seen.add(p)
                handles.append(p.register_hook(torch.zeros_like))

    if model is not None:
        silence(model)
    handles += [module.register_forward_pre_hook(silence) for module in later]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Nothing(torch.autograd.Function):
    """`Nothing.apply(*tensors)`: a zero that depends on tensors, with zeros for their gradients, whatever they hold."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device, sparse(t)) for t in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
            if is_sparse
            else torch.zeros((), dtype=dtype, device=device).expand(shape)  # takes no memory
            for shape, dtype, device, is_sparse in ctx.like
        )


def sparse(tensor: Tensor) -> bool:
    """Is the gradient so far a sparse one?"""
    return tensor.is_leaf and tensor.grad is not None and tensor.grad.is_sparse
