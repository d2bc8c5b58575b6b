"""What a CutTrainer can't do, said before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError


def check_cutter(cutter: Any) -> None:
    """Raise for a cutter that a Trainer can't use."""
    if not isinstance(cutter, BatchCutter):
        raise CutError(f"cutter={cutter!r:.60}: write cutter=BatchCutter(rows=4).")
    if cutter.auto:
        raise CutError(
            f"{cutter!r}: a CutTrainer does not look for what fits in memory. Give a number, or use a StepDriver."
        )
    if isinstance(cutter.weight, Mapping) or cutter.weight == "once":
        raise CutError(
            f"weight={cutter.weight!r:.60}: a Trainer has one loss, without named terms. "
            "Leave weight out, or give one weight."
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise for a setting under which sub-batches would be something else than parts of one batch."""
    args, accelerator = trainer.args, trainer.accelerator
    if args.n_gpu > 1:
        raise CutError(
            f"{args.n_gpu} GPUs in one process: DataParallel cuts batches in its own way. Start one process a GPU "
            "(torchrun, accelerate launch), or show this one a single GPU with CUDA_VISIBLE_DEVICES=0."
        )
    if is_sagemaker_mp_enabled():
        raise CutError("SageMaker's model parallelism cuts batches and runs the backward itself: use Trainer with it.")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise CutError(
            "DeepSpeed steps inside the backward, so each sub-batch would be a step: use DDP or FSDP, or DeepSpeed's "
            "own gradient accumulation."
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        raise CutError("context and sequence parallelism cut batches along their width: use Trainer with them.")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise CutError(
            f'optim="{optimizer}" steps inside the backward, so each sub-batch would be a step: use another optimizer.'
        )
    if args.auto_find_batch_size:
        raise CutError(
            "auto_find_batch_size=True makes the mathematical batch smaller when memory runs out, which is another "
            "training. Leave it out and give the cutter fewer rows."
        )


def shards(trainer: Trainer) -> bool:
    """Is the model sharded among ranks, so that every forward is theirs together?"""
    if trainer.accelerator.num_processes == 1:
        return False
    fsdp = trainer.accelerator.distributed_type == DistributedType.FSDP
    return fsdp or hasattr(trainer.model, "set_requires_gradient_sync")


def check_ranks(trainer: Trainer, cut: Cut) -> None:
    """Raise on all ranks, where some would wait for the forwards of others for ever."""
    if not shards(trainer):
        return
    accelerator = trainer.accelerator
    mine = torch.tensor([len(cut)], device=accelerator.device)
    counts = cast(torch.Tensor, accelerator.gather(mine)).tolist()
    if len(set(counts)) > 1:
        raise CutError(
            f"FSDP, and the ranks cut their batches into {counts} sub-batches: forwards are the ranks' together, so "
            "their number has to be the same. Give the cutter rows= and all ranks the same number of rows, or parts=."
        )
