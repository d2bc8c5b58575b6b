"""Running sub-batches without keeping their activations: each one runs again in backward, just as it ran before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from batchsplit.containers import map_leaves
from batchsplit.cuts import SubBatch
from batchsplit.errors import CutError
from batchsplit.randomness import WholeRandomness
from batchsplit.randomness.operations import RandomnessError, seeded
from batchsplit.randomness.streams import Streams
from batchsplit.wide_sums import WideSums

Call = Callable[[nn.Module, Any, Mapping[str, Tensor]], Any]  # module, data, tensors in place of its own -> output


class Recompute:
    """One forward of a module in several sub-batches, each of which backward runs a second time.

    The second run sees what the first one saw: buffers, train or eval mode, autocast, and the random numbers of torch,
    numpy and Python, of generators that the module holds, or those lent by `whole`. It leaves all of these as it finds
    them, so a buffer is updated by the first run only. Parameters and inputs that were written to in between are an
    error.
    """

    def __init__(self, module: nn.Module, data: Any, call: Call, whole: WholeRandomness | None = None) -> None:
        self.module, self.call, self.whole = module, call, whole
        self.sums = WideSums(module)
        self.modes = [(m, m.training) for m in module.modules()]
        self.generators = {v for m, _ in self.modes for v in vars(m).values() if isinstance(v, torch.Generator)}
        self.has_buffers = any(m._buffers for m, _ in self.modes)
        # torch looks at the arguments for devices whose random state and autocast the second run has to see
        self.anchors = list({p.device: p for p in module.parameters()}.values())
        self.parameters = {p: f'the parameter "{name}"' for name, p in module.named_parameters() if not is_lazy(p)}
        self.inputs: dict[Tensor, str] = {}
        map_leaves(self._note_input, data)
        self.seen = self._versions()

    def _note_input(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.inputs[leaf] = f"an input of shape {tuple(leaf.shape)}"

    def run(self, sub: SubBatch) -> Any:
        """The output of one sub-batch, whose activations are not kept."""
        before = {name: (b, _version(b), b.detach().clone()) for name, b in self._buffers()}
        streams, again = Streams.now(self.generators), False
        changed: dict[str, Tensor] = {}

        def twice(data: Any, anchors: list[Tensor]) -> Any:
            nonlocal again
            if again:
                return self._again(sub, data, changed, streams)
            again = True
            return self.call(self.module, data, self.sums.stand_ins())

        if torch.is_autocast_cache_enabled():
            # a cast shared by several sub-batches would add up their gradients in 16 bits
            torch.clear_autocast_cache()
        output = torch.utils.checkpoint.checkpoint(twice, sub.data, self.anchors, use_reentrant=False)
        now = dict(self._buffers())
        changed.update(
            (name, copy) for name, (b, v, copy) in before.items() if now.get(name) is not b or _version(b) != v
        )
        return output

    def done(self) -> None:
        """After the first run of the last sub-batch.

        Raises:
            CutError: the module has written to an input, which a second run would see.
        """
        what = self._written(self.inputs)
        if what is not None:
            raise CutError(
                f"forward writes to {what}, so CutForward can't run it again: let it work on a clone, or out of place."
            )
        self.seen = self._versions()

    def _again(self, sub: SubBatch, data: Any, changed: Mapping[str, Tensor], streams: Streams) -> Any:
        what = self._written({**self.parameters, **self.inputs})
        if what is not None:
            raise CutError(
                f"{what} was written to between forward and backward, so CutForward can't run its sub-batches again as "
                "they ran before: call backward first, or give it a clone."
            )
        # Copies even of what did not change: batch_norm's update of its statistics leaves no trace.
        buffers = {name: changed.get(name, b).detach().clone() for name, b in self._buffers()}
        try:
            with _in_modes(self.modes), self._same_randomness(sub, streams):
                return self.call(self.module, data, {**buffers, **self.sums.stand_ins()})
        except Exception as error:
            error.add_note(f"This came up in {sub!r}, which CutForward ran again in backward.")
            raise
        finally:
            self.seen = self._versions()

    @contextmanager
    def _same_randomness(self, sub: SubBatch, streams: Streams) -> Iterator[None]:
        if self.whole is not None:
            with self.whole.replay(sub.where):
                yield
            return
        now = Streams.now(self.generators)
        streams.restore()
        try:
            yield
        finally:
            now.restore()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        named = self.module.named_buffers() if self.has_buffers else ()
        return ((name, buffer) for name, buffer in named if not is_lazy(buffer))

    def _versions(self) -> dict[Tensor, int]:
        return {tensor: _version(tensor) for tensor in (*self.parameters, *self.inputs)}

    def _written(self, tensors: Mapping[Tensor, str]) -> str | None:
        """The first of these that is not as it was when last seen."""
        return next((what for tensor, what in tensors.items() if _version(tensor) != self.seen[tensor]), None)


@contextmanager
def _in_modes(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Modules in these modes, train or eval, for a while."""
    changed = [(module, mode) for module, mode in modes if module.training != mode]
    for module, mode in changed:
        module.training = mode
    try:
        yield
    finally:
        for module, mode in changed:
            module.training = not mode


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class NoInnerCheckpoint(TorchDispatchMode):
    """Refuses random numbers drawn under a checkpoint of the module's own, where those of the whole batch are lent.

    That checkpoint runs its part a third time, when nobody lends any more, and would draw others.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if seeded(func) and _in_checkpoint():
            raise RandomnessError(
                f"randomness='whole': {func} runs under torch.utils.checkpoint inside the module, which would draw "
                "other numbers in backward. CutForward keeps no activations anyway: turn the checkpointing inside off, "
                "or use randomness='fresh'"
            )
        return func(*args, **(kwargs or {}))


def _in_checkpoint() -> bool:
    """Is a checkpoint entered, on the way here from the run of a sub-batch?"""
    frame, file = sys._getframe(2), torch.utils.checkpoint.__file__
    while frame is not None and frame.f_globals.get("__name__") != __name__:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
