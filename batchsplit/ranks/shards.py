"""FSDP2 (`fully_shard`): forward and backward are collective, so ranks run equally many sub-batches, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from batchsplit.cuts import Cut
from batchsplit.errors import CutError, LossError
from batchsplit.ranks.others import Ranks
from batchsplit.ranks.reduction import Nothing, Reduction, Turn, harmless


class Shards(Reduction):
    """The reduction of models sharded by `fully_shard`; `roots` are the outermost ones, `modules` all of them.

    Each forward and backward gathers parameters from all ranks. A sub-batch without weight therefore runs as any other,
    only that its gradients are zero, and a rank with fewer sub-batches than others runs some of its own so once more.
    """

    def __init__(self, model: Any, modules: Sequence[Any], sync: Any = None) -> None:
        inside = {child for module in modules for child in module.modules() if child is not module}
        self.modules, self.roots = modules, [module for module in modules if module not in inside]
        super().__init__(model, sync, self._no_sync, _ranks(model))
        self.outputs: list[Tensor] = []

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        # False already where the user accumulates over several batches, and then it stays that
        before = [all(group.reduce_grads for group in _groups(list(root.modules()))) for root in self.roots]
        for root in self.roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root, value in zip(self.roots, before, strict=True):
                root.set_requires_gradient_sync(value)

    def check(self, recovers: bool, randomness: str) -> None:
        if self.ranks.count == 1:
            return
        if recovers:
            raise CutError(
                'on_oom="split" (and rows="auto", area="auto") with a model sharded over several ranks: they wait for each '
                "other in the midst of a forward, so none can run its own again. Give a limit in rows or area, found "
                "with one process, or use DistributedDataParallel."
            )
        if randomness == "whole":
            raise CutError(
                'randomness="whole" with a model sharded over several ranks: the forward is run ahead to learn where it '
                'draws, which the others would have to join. Write randomness="fresh".'
            )

    def begin(self, cut: Cut, forward: Callable[[], Any]) -> None:
        super().begin(cut, forward)
        for _ in range(self.most - len(cut) if self.ranks.count > 1 else 0):
            turn = Turn(False, self.each, self.each, missing=1, silent=True)
            with self.around(turn), torch.random.fork_rng():
                forward()
                self.sends(torch.zeros(()), turn).backward()

    def turn(self, last: bool, missing: int, terms: int, recovers: bool) -> Turn:
        reduces = last or self.each
        return Turn(last, reduces, reduces, missing, missing == terms and (reduces or self.ranks.count > 1))

    @contextmanager
    def around(self, turn: Turn) -> Iterator[None]:
        self.outputs.clear()
        with ExitStack() as stack:
            if not turn.carries and self.hold is not None:
                stack.enter_context(self.hold())
            for root in self.roots:
                stack.callback(root.register_forward_hook(self._keep).remove)
            if turn.silent:
                stack.enter_context(harmless(None, self.modules))
            stack.callback(self.outputs.clear)
            yield

    def _keep(self, root: Any, args: Any, output: Any) -> None:
        self.outputs += [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]

    def uncalled(self) -> bool:
        return self.ranks.count > 1 and not self.outputs

    def sends(self, loss: Tensor, turn: Turn) -> Tensor:
        if not turn.missing:
            return loss
        if not self.outputs:
            raise LossError("loss_fn did not call the sharded model for any sub-batch, and other ranks wait for that.")
        nothing: Any = Nothing.apply(*self.outputs)  # reaches every layer, as on ranks that have all the terms
        return nothing if turn.silent else loss + nothing

    def leave(self, tell: bool) -> None:
        for root in self.roots:
            if hasattr(root, "reset_iter_state"):
                with suppress(Exception):
                    root.reset_iter_state()
        for p in _sharded_parameters(
            self.modules
        ):  # gradients that were held back are in neither `.grad` nor the model
            p.unsharded_accumulated_grad = None
            if getattr(p, "_unsharded_param", None) is not None:
                p._unsharded_param.grad = None
        if tell and self.done:  # else others are in the midst of a forward or backward, and get an error of the backend
            self.ranks.fail()


def _groups(modules: Sequence[Any]) -> Iterator[Any]:
    """What torch keeps of sharded parameters; nothing where it keeps that in another way than known here."""
    for module in modules:
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        one = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) is not None else []
        yield from getattr(state, "_fsdp_param_groups", one)


def _sharded_parameters(modules: Sequence[Any]) -> Iterator[Any]:
    for group in _groups(modules):
        yield from getattr(group, "fsdp_params", ())


def _ranks(model: Any) -> Ranks:
    """The ranks that a model is sharded over, as its parameters have it."""
    mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None:
        return Ranks()
    if mesh.ndim > 1 and not _replicated_and_sharded(model):
        raise CutError(
            f"the model is sharded over a mesh of {mesh.ndim} axes {mesh.mesh_dim_names or ''}, and which of them hold "
            "different batches can't be seen: only one axis, or replicas of shards, are known here."
        )
    return Ranks([mesh.get_group(axis) for axis in reversed(range(mesh.ndim))], mesh.device_type)


def _replicated_and_sharded(model: Any) -> bool:
    kinds = {
        tuple(p.is_replicate() for p in one.placements) for one in model.parameters() if hasattr(one, "placements")
    }
    return kinds == {(True, False)}
