"""Hugging Face Accelerate: one `accumulate` per mathematical batch, whatever number of sub-batches it is cut into.

Written against accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import DistributedType
from torch import Tensor

from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.loader import CutLoader
from batchsplit.ranks import reduction_of
from batchsplit.step import LossFn, check_randomness, gradients_of

_ENGINES = {
    DistributedType.DEEPSPEED: "DeepSpeed steps inside its backward",
    DistributedType.MEGATRON_LM: "Megatron-LM runs forward and backward itself",
}


def over(cutter: BatchCutter, loader: Any) -> CutLoader:
    """Wrap a loader that `accelerator.prepare` has returned: one iteration gives one mathematical batch as one Cut.

    Prepare first, wrap after: `prepare` lets what is no DataLoader through as it is, without moving its batches to the
    device or sharing them out among processes, and says nothing.

    Raises:
        CutError: the loader is not prepared.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from torch.utils.data import DataLoader
        >>> from batchsplit import BatchCutter
        >>> loader = Accelerator(cpu=True).prepare(DataLoader(torch.rand(20, 3), batch_size=8))
        >>> [len(cut) for cut in over(BatchCutter(rows=4), loader)]
        [2, 2, 1]
    """
    if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        raise CutError(
            f"over wants a loader from accelerator.prepare, not a {type(loader).__name__}: "
            "write loader = accelerator.prepare(loader) first, then over(cutter, loader)."
        )
    return cutter.over(loader)


def cut_step(
    accelerator: Accelerator,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    cut: Cut,
    loss_fn: LossFn,
    *,
    batches_per_step: int = 1,
    sync: Any = None,
    randomness: str = "fresh",
) -> Tensor:
    """Forward and backward of one mathematical batch, in one `accelerator.accumulate`; returns the batch's loss.

    `model` is what `prepare` returned (several models: a list of them). Clip, step, schedule and zero gradients after
    it as without a cut; `optimizer.step()` still does nothing where Accelerate goes on accumulating.
    `batches_per_step` has to be the accelerator's `gradient_accumulation_steps`: so many *mathematical batches* make a
    step, and Accelerate divides each one's loss by it, as without a cut. The number of sub-batches is no business of
    Accelerate's. `sync` and `randomness` are as in `run_step`; Accelerate's `sync_each_batch=True` implies `sync=False`.
    After an error gradients are as they were before, and the accelerator counts as if the batch had not been.

    Raises:
        CutError: `gradient_accumulation_steps` is another number, DeepSpeed, Megatron-LM, an optimizer that steps
            inside the backward, or whatever `run_step` raises.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from batchsplit import BatchCutter
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> cut = BatchCutter(rows=2).cut(torch.rand(5, 3))
        >>> cut_step(accelerator, model, cut, lambda x: model(x).mean()).shape
        torch.Size([])
    """
    if not isinstance(cut, Cut):
        raise CutError(
            f"cut_step wants a Cut, not a {type(cut).__name__}: iterate over(cutter, loader), or write cutter.cut(batch)."
        )
    check_randomness(randomness)
    _check(accelerator, batches_per_step)
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if sync is None and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        sync = False
    before, synced = accelerator.step, accelerator.sync_gradients
    try:
        with accelerator.accumulate(*models):
            # `accelerator.no_sync` must not be entered in here: under FSDP2 it turns the reduction on again when it
            # ends, also where `accumulate` has turned it off. Ours puts back what it found.
            whole = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
            return gradients_of(cut, loss_fn, reduction_of(whole, sync), accelerator.backward, randomness)
    except BaseException:
        accelerator.step = before
        accelerator.gradient_state._set_sync_gradients(synced)
        raise


def _check(accelerator: Accelerator, batches_per_step: int) -> None:
    """Raise for what would scale the loss twice, or step within a batch."""
    engine = _ENGINES.get(accelerator.distributed_type)
    if engine is not None:
        raise CutError(f"{engine}, so that sub-batches can't be parts of one step there: use DDP or FSDP2.")
    if accelerator.has_lomo_optimizer:
        raise CutError("LOMO steps inside the backward, so each sub-batch would be a step: use another optimizer.")
    steps = accelerator.gradient_accumulation_steps
    if steps != batches_per_step:
        raise CutError(
            f"gradient_accumulation_steps={steps}, and accelerator.backward divides every loss by it, on top of the shares "
            f"(batches_per_step={batches_per_step}). A batch in sub-batches is one step: write "
            f"Accelerator(gradient_accumulation_steps={batches_per_step}). If {steps} loader batches are to make a step, write "
            f"cut_step(..., batches_per_step={steps}), or group(loader, batches={steps}) for the exact mean over all of them."
        )
