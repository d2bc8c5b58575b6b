"""DistributedDataParallel: any rank may run any number of sub-batches, and one reduction ends the step for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchsplit.cutter import Cut
from batchsplit.errors import CutError
from batchsplit.ranks.others import Ranks
from batchsplit.ranks.reduction import Nothing, Reduction, Turn

STATIC = "_static_graph_delay_allreduce_enqueued"  # torch's: has the first reduction of a static graph been arranged?


class Replicas(Reduction):
    """The reduction of models wrapped in DistributedDataParallel.

    It waits for a gradient of every parameter, from a backward whose forward went through the wrapper outside of
    `no_sync`. The last sub-batch carries it, unless that gives no gradient for some terms, or might run out of memory:
    then a backward of zeros does, which costs nothing. So it is that a rank with nothing to learn from, or one that has
    failed, does not leave the others waiting.
    """

    recovers = True

    def __init__(self, model: Any, wrappers: Sequence[DistributedDataParallel], sync: Any = None) -> None:
        groups = {wrapper.process_group.size(): wrapper.process_group for wrapper in wrappers}
        if len(groups) > 1:
            raise CutError(f"the DistributedDataParallel modules of a model are over {sorted(groups)} ranks: use one group.")
        device = next((p.device for p in wrappers[0].parameters()), torch.device("cpu"))
        super().__init__(model, sync, self._no_sync, Ranks(list(groups.values()), device))
        self.wrappers = [wrapper for wrapper in wrappers if wrapper.require_backward_grad_sync]  # else the user holds it
        self.called: set[Any] = set()
        self.began: set[Any] = set()  # those that have broadcast their buffers in this step
        self.synced: set[Any] = set()
        self.learned = False

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield

    def begin(self, cut: Cut, forward: Callable[[], Any]) -> None:
        super().begin(cut, forward)
        self.learned = False
        for _ in range(self.most - len(cut) if self.each else 0):
            self._carry(self.wrappers)  # others have more sub-batches, and this rank joins in their reductions

    def turn(self, last: bool, missing: int, terms: int, recovers: bool) -> Turn:
        reduces = last or self.each
        return Turn(reduces, reduces and not missing and not recovers, missing, silent=False)

    @contextmanager
    def around(self, turn: Turn) -> Iterator[None]:
        self.synced.clear()
        with ExitStack() as stack:
            if not turn.carries:
                stack.enter_context(self._held())
            for wrapper in self.wrappers:
                stack.callback(wrapper.register_forward_pre_hook(self._note).remove)
            yield

    @contextmanager
    def _held(self) -> Iterator[None]:
        # Before its first reduction a static graph arranges for that in any backward, in `no_sync` too.
        first = [w for w in self.wrappers if w.static_graph and not getattr(w, STATIC)]
        with self.hold() if self.hold is not None else self._no_sync():
            for wrapper in first:
                setattr(wrapper, STATIC, True)
            try:
                yield
            finally:
                for wrapper in first:
                    setattr(wrapper, STATIC, False)

    def _note(self, wrapper: Any, args: Any) -> None:
        self.called.add(wrapper)
        if wrapper.require_forward_param_sync:
            self.began.add(wrapper)
        if wrapper.require_backward_grad_sync:
            self.synced.add(wrapper)

    def sends(self, loss: Tensor, turn: Turn) -> Tensor:
        self.learned = True
        self.sending = turn.carries and bool(self.synced)
        return loss

    def reduce(self, turn: Turn) -> None:
        self._carry([wrapper for wrapper in self.wrappers if not (turn.carries and wrapper in self.synced)])
        self.done, self.sending = True, False
        if self.learned and self.wrappers and not self.called and self.ranks.count > 1:
            raise CutError(
                "loss_fn never calls the DistributedDataParallel model, so its gradients are not synchronised: "
                "call the model itself, not model.module or a part of it."
            )

    def again(self) -> None:
        for wrapper in self.began:  # others have joined in one broadcast of buffers, and will not in a second one
            wrapper.require_forward_param_sync = False

    def leave(self, tell: bool) -> None:
        if not tell or self.ranks.count == 1 or (self.sending and not self.done):
            return  # amid the reduction itself there is no way to tell: the others get an error of the backend
        with suppress(Exception):
            if not self.done:
                self._carry(self.wrappers)
            self.ranks.fail()

    def _carry(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        for wrapper in wrappers:
            carry(wrapper)


def carry(wrapper: DistributedDataParallel) -> None:
    """Reduce the gradients that have added up in `.grad`, by a backward of zeros through the wrapper."""
    skips = wrapper.find_unused_parameters or wrapper.static_graph  # what no rank uses stays without a gradient
    module = wrapper.module
    wanted = [p for p in module.parameters() if p.requires_grad and (p.grad is not None or not skips)]
    wrapper.require_forward_param_sync = False  # the buffers have been broadcast in this step
    wrapper._modules["module"] = _Touch(wanted)
    try:
        with torch.enable_grad():
            reached = wrapper.forward(torch.zeros((), device=wanted[0].device if wanted else None))
        if reached.requires_grad:
            reached.backward()
    finally:
        wrapper._modules["module"] = module


class _Touch(torch.nn.Module):
    """Gives a zero that depends on parameters, which are not its own."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.reached = parameters

    def forward(self, zero: Tensor) -> Tensor:
        return Nothing.apply(*self.reached) if self.reached else zero  # type: ignore[return-value]
