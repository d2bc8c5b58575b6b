"""DistributedDataParallel: any rank may run any number of sub-batches, and one reduction ends the step for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchsplit.cuts import Cut
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

    With `static_graph=True` torch notes in the first backward how often each gradient comes, held back or not. So in
    the first step the sub-batch that runs first is reduced by itself, and the others after it.
    """

    recovers = True

    def __init__(self, model: Any, wrappers: Sequence[DistributedDataParallel], sync: Any = None) -> None:
        found: list[Any] = [wrapper.process_group for wrapper in wrappers]
        groups = {group.size(): group for group in found}
        if len(groups) > 1:
            raise CutError(
                f"the DistributedDataParallel modules of a model are over {sorted(groups)} ranks: use one group."
            )
        device = next((p.device for p in wrappers[0].parameters()), torch.device("cpu"))
        super().__init__(model, sync, self._no_sync, Ranks(list(groups.values()), device))
        self.wrappers = [
            wrapper for wrapper in wrappers if wrapper.require_backward_grad_sync
        ]  # else the user holds it
        self.learning = any(wrapper.static_graph and not getattr(wrapper, STATIC) for wrapper in self.wrappers)
        self.left = 0  # so many reductions are still to come in this step, on every rank
        self.learned = False
        self.called: set[Any] = set()
        self.began: set[Any] = set()  # those that have broadcast their buffers since the last reduction
        self.synced: set[Any] = set()  # those whose forward in this sub-batch was not held back
        self.reached: set[Tensor] = set()  # parameters of terms without weight

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield

    def check(self, recovers: bool, randomness: str) -> None:
        if recovers and any(wrapper.static_graph for wrapper in self.wrappers):
            raise CutError(
                'on_oom="split" (and rows="auto", area="auto") with static_graph=True: a backward that ran out of memory '
                "can't be run again there. Leave static_graph out of DistributedDataParallel, or give a limit in rows."
            )

    def begin(self, cut: Cut, forward: Callable[[], Any]) -> None:
        super().begin(cut, forward)
        most = self.most or len(cut)
        self.left = most if self.each else min(most, 2) if self.learning else 1
        self.learned = False
        self.reached.clear()

    def turn(self, last: bool, missing: int, terms: int, recovers: bool) -> Turn:
        reduces = last or self.each or self.learning
        carries = reduces and not recovers and (self.learning or not missing)
        return Turn(last, reduces, carries, missing, carries and missing == terms)

    @contextmanager
    def around(self, turn: Turn) -> Iterator[None]:
        self.synced.clear()
        with ExitStack() as stack:
            if not turn.carries:
                stack.enter_context(self._no_sync() if self.hold is None else self.hold())
            for wrapper in self.wrappers:
                stack.callback(wrapper.register_forward_pre_hook(self._note).remove)
            yield

    def _note(self, wrapper: Any, args: Any) -> None:
        self.called.add(wrapper)
        if wrapper.require_forward_param_sync:
            self.began.add(wrapper)
        if wrapper.require_backward_grad_sync:
            self.synced.add(wrapper)

    def unweighed(self, loss: Any) -> None:
        if any(_skips(wrapper) for wrapper in self.wrappers):
            terms = loss.values() if isinstance(loss, Mapping) else [loss]
            self.reached |= leaves(term.grad_fn for term in terms)

    def sends(self, loss: Tensor, turn: Turn) -> Tensor | None:
        self.learned = True
        self.sending = turn.carries and bool(self.synced)
        if not turn.carries or not turn.missing:
            return loss
        zeros = [Nothing.apply(*_wanted(wrapper, self.reached)) for wrapper in self.wrappers if wrapper in self.synced]
        return sum(zeros, start=0 if turn.silent else loss) if zeros else None if turn.silent else loss  # type: ignore[return-value]

    def reduce(self, turn: Turn) -> None:
        carried = self.synced if turn.carries else set()
        self.began -= carried
        self._carry([wrapper for wrapper in self.wrappers if wrapper not in carried])
        while turn.last and self.left:  # others have more sub-batches, and reduce after each
            self._carry(self.wrappers)
        self.learning = False
        if self.learned and self.wrappers and not self.called and self.ranks.count > 1:
            raise CutError(
                "loss_fn never calls the DistributedDataParallel model, so its gradients are not synchronised: "
                "call the model itself, not model.module or a part of it."
            )

    def again(self) -> None:
        for wrapper in self.began:  # others have joined in one broadcast of buffers, and will not in a second one
            wrapper.require_forward_param_sync = False

    def leave(self, tell: bool) -> None:
        if not tell or self.ranks.count == 1 or self.sending:
            return  # amid the reduction itself there is no way to tell: the others get an error of the backend
        with suppress(Exception):
            while self.left:
                self._carry(self.wrappers)
            self.ranks.fail()

    def _carry(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        self.sending = True
        for wrapper in wrappers:
            if wrapper in self.began:
                wrapper.require_forward_param_sync = False  # else this rank still has to join in that
            carry(wrapper, self.reached)
            self.began.discard(wrapper)
        self.left -= 1
        self.sending = False


def carry(wrapper: DistributedDataParallel, reached: Set[Tensor] = frozenset()) -> None:
    """Reduce the gradients that have added up in `.grad`, by a backward of zeros through the wrapper."""
    module, wanted = wrapper.module, _wanted(wrapper, reached)
    wrapper._modules["module"] = _Touch(wanted, module)
    try:
        with torch.enable_grad():
            zero: Any = wrapper.forward(torch.zeros((), device=wanted[0].device if wanted else None))
        if zero.requires_grad:
            zero.backward()
    finally:
        wrapper._modules["module"] = module


def _wanted(wrapper: DistributedDataParallel, reached: Set[Tensor]) -> list[Tensor]:
    """The parameters that a reduction waits for; one that no rank uses is to stay without a gradient where it may."""
    wanted = [p for p in wrapper.module.parameters() if p.requires_grad]
    return [p for p in wanted if p.grad is not None or p in reached] or wanted if _skips(wrapper) else wanted


def _skips(wrapper: DistributedDataParallel) -> bool:
    return wrapper.find_unused_parameters or wrapper.static_graph


def leaves(nodes: Iterable[Any]) -> set[Tensor]:
    """The tensors at the other end of an autograd graph."""
    found, seen, todo = set(), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        todo += [following for following, _ in node.next_functions]
    return found


class _Touch(torch.nn.Module):
    """Gives a zero that depends on parameters, in the place of the module that has them."""

    def __init__(self, parameters: list[Tensor], module: torch.nn.Module) -> None:
        super().__init__()
        self.reached = parameters
        self.named_buffers = module.named_buffers  # the wrapper is to find those that it broadcasts

    def forward(self, zero: Tensor) -> Tensor:
        return Nothing.apply(*self.reached) if self.reached else zero  # type: ignore[return-value]
