"""A module that cuts its own inputs: any loss of its outputs is exact, at the memory of one sub-batch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from batchsplit.coupling import Coupled
from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError, LeafError
from batchsplit.joining import join_outputs
from batchsplit.layout import Layout
from batchsplit.randomness import WholeRandomness
from batchsplit.recompute import NoInnerCheckpoint, Recompute


class CutForward(nn.Module):
    """Stands in for a module: forward cuts the inputs, runs sub-batch by sub-batch and joins the outputs.

    No activations are kept: backward runs each sub-batch a second time, so a step costs one more forward and needs the
    activations of one sub-batch. Since the loss sees the outputs of all rows, any loss is exact: contrastive, ranking,
    correlation. Without gradients (`no_grad`, `inference_mode`) each sub-batch runs once.

    The arguments are read as a batch is: `layout` of the cutter calls them by their names, positional ones by "0", "1"
    and so on. Outputs are joined by rows, as `Cut.join` does; `output_layout` declares those whose rows lie elsewhere
    (`{"": axis(1)}` for a module that returns one time-first tensor). A floating scalar is added up, each times its
    sub-batch's share by the cutter's `weight`: a mean loss over what `weight` counts, or a number that is the same in
    all, comes out as the unsplit batch's (with `weight=None`, a sum). Other scalars have to agree.

    It has the module's parameters, buffers and submodules under their own names, so a `state_dict` loads both ways, and
    optimizers and DistributedDataParallel (around it) see what they would have seen. Attributes are the module's;
    methods other than `forward`, such as `generate`, run uncut. Hooks on the module and inside of it run once for each
    sub-batch and again in backward, hooks on the CutForward once.

    `randomness="whole"` gives each row the random numbers that the unsplit batch would have given it. `coupled` says
    what a train-mode BatchNorm about to be cut gets: "raise", "warn" (once) or "allow"; its running statistics are
    updated once by each sub-batch. Python attributes that forward changes (counters) are changed twice.

    Raises:
        CutError: an argument of the wrong kind; in forward, arguments or outputs whose rows are in doubt; in backward,
            parameters or inputs that were written to since forward.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, CutForward
        >>> encoder = CutForward(torch.nn.Linear(3, 2), BatchCutter(rows=4))
        >>> embeddings = encoder(torch.rand(10, 3))
        >>> loss = (embeddings @ embeddings.T).logsumexp(1).mean()  # every row meets every other
        >>> loss.backward()
        >>> embeddings.shape, encoder.weight.grad.shape
        (torch.Size([10, 2]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        module: nn.Module,
        cutter: BatchCutter,
        *,
        output_layout: Mapping[str, Any] | None = None,
        randomness: str = "fresh",
        coupled: str = "warn",
    ) -> None:
        _check(module, cutter, randomness)
        super().__init__()
        own = {"module": module, "cutter": cutter, "randomness": randomness, "training": module.training}
        self.__dict__.update(own, output_layout=Layout(output_layout), _coupled=Coupled(module, coupled), _plans={})
        # The very dictionaries of the module: whatever is registered, replaced or moved in one is so in the other.
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for all rows."""
        cut = self.cutter.cut({**dict(enumerate(args)), **kwargs})
        if len(cut) == 1:
            return self.module(*args, **kwargs)
        self._coupled.look(stacklevel=5)
        outputs = self._outputs(cut)
        try:
            return join_outputs(cut, outputs, self.output_layout)
        except LeafError as error:
            text = str(error).replace("layout={", "output_layout={").replace("the batch;", "the outputs;")
            raise LeafError(text) from None

    def _outputs(self, cut: Cut) -> list[Any]:
        whole = None
        if self.randomness == "whole":
            whole = WholeRandomness(self._learn, _rows_of(cut), cut.rows, model=self.module, plans=self._plans)
        recompute = Recompute(self.module, cut.batch, _call, whole) if torch.is_grad_enabled() else None
        outputs = []
        for sub in cut:
            try:
                with nullcontext() if whole is None else whole.rows(sub.where):
                    if recompute is None:
                        outputs.append(_call(self.module, sub.data))
                    else:
                        with nullcontext() if whole is None else NoInnerCheckpoint():
                            outputs.append(recompute.run(sub))
            except Exception as error:
                error.add_note(f"This came up in {sub!r}, which CutForward ran.")
                raise
        if recompute is not None:
            recompute.done()
        if whole is not None:
            whole.finish()
        return outputs

    def _learn(self, data: Any) -> Any:
        return _call(self.module, data)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:  # half built, as when it is unpickled
                raise
            return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            raise AttributeError("the module of a CutForward can't be replaced: make a new CutForward.")
        if name in self.__dict__ or name.startswith("__"):  # FSDP gives what it shards another __class__
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # of an nn.Sequential, say

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __repr__(self) -> str:
        return f"CutForward(\n  {self.cutter!r},\n{textwrap.indent(repr(self.module), '  ')}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}

    # What torch asks a module for goes to the module itself, which may have ways of its own.

    def train(self, mode: bool = True) -> CutForward:
        self.module.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> CutForward:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CutForward:
        self.module._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        raise CutError("DataParallel can't copy a CutForward: use DistributedDataParallel around it.")


_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_post_hooks")


def _check(module: Any, cutter: Any, randomness: str) -> None:
    if not isinstance(module, nn.Module):
        raise CutError(f"CutForward wants a module, not a {type(module).__name__}: write CutForward(model, cutter).")
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        name = type(module).__name__
        raise CutError(f"{name} belongs around CutForward: write DistributedDataParallel(CutForward(model, cutter)).")
    if not isinstance(cutter, BatchCutter):
        kind = type(cutter).__name__
        raise CutError(f"CutForward wants a BatchCutter, not a {kind}: write CutForward(model, BatchCutter(rows=8)).")
    if cutter.auto:
        raise CutError(
            f'{cutter!r}: only a StepDriver finds out what "auto" is; give a number, as in BatchCutter(rows=8).'
        )
    if randomness not in ("fresh", "whole"):
        raise CutError(f'randomness={randomness!r}: write randomness="fresh" or "whole".')


def _call(module: nn.Module, data: Mapping[Any, Any], tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The module's output for arguments by position and name, with other tensors in place of its own."""
    args = tuple(value for key, value in data.items() if isinstance(key, int))
    kwargs = {key: value for key, value in data.items() if not isinstance(key, int)}
    return functional_call(module, dict(tensors), args, kwargs) if tensors else module(*args, **kwargs)


def _rows_of(cut: Cut) -> Callable[[slice], Any]:
    """A function from the first rows of a batch to their data."""

    def first(rows: slice) -> Any:
        sizes = [rows.stop, cut.rows - rows.stop]
        return cut._again([[size for size in sizes if size]])[0].data

    return first
