"""Which kind of reduction a model has."""

from __future__ import annotations

from typing import Any

import torch

from batchsplit.errors import CutError
from batchsplit.ranks.reduction import Reduction


def reduction_of(model: Any, sync: Any = None) -> Reduction:
    """How the gradients of a model are reduced among ranks, by the wrappers in it.

    `sync` is None (hold the reduction back in the way of the wrapper), False (let every sub-batch reduce), or a function
    that returns a context which holds it back.

    Raises:
        CutError: `sync` is neither, or ranks share the model in a way that is not known here.

    Example:
        >>> import torch
        >>> from batchsplit.ranks import reduction_of
        >>> reduction_of(torch.nn.Linear(2, 2)).ranks.count
        1
    """
    if model is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Reduction(model, sync, getattr(model, "no_sync", None))
    from torch.nn.parallel import DistributedDataParallel

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else [model]
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    shards = [module for module in modules if hasattr(module, "set_requires_gradient_sync")]
    if wrappers and shards:
        raise CutError(
            "a model with both DistributedDataParallel and fully_shard in it: use one of them for all of it."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" and _many(module) for module in modules):
        raise CutError(
            "FullyShardedDataParallel over several ranks: write torch.distributed.fsdp.fully_shard(model) instead."
        )
    if wrappers:
        from batchsplit.ranks.replicas import Replicas

        return Replicas(model, wrappers, sync)
    if shards:
        from batchsplit.ranks.shards import Shards

        return Shards(model, shards, sync)
    return Reduction(model, sync, getattr(model, "no_sync", None))


def _many(module: Any) -> bool:
    return module.process_group.size() > 1
