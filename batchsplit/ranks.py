"""Several ranks: gradients are reduced once a step, with the sub-batch that runs last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from batchsplit.errors import CutError

Hold = Callable[[], AbstractContextManager[Any]]


def hold_back(model: Any, sync: Any) -> Hold | None:
    """The context that holds gradient reduction back, or None where there is nothing to hold back.

    `sync` is None (find it on the model), False (let every sub-batch reduce), or a function that returns a context.
    """
    if sync is None:
        return getattr(model, "no_sync", None) or _fsdp2(model)
    if sync is False:
        return None
    if not callable(sync):
        raise CutError(f"sync={sync!r}: write None, False, or a function that returns a context, like model.no_sync.")
    return sync


def _fsdp2(model: Any) -> Hold | None:
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is None:
        return None

    @contextmanager
    def held() -> Iterator[None]:
        switch(False)
        try:
            yield
        finally:
            switch(True)

    return held


def several_ranks() -> bool:
    """Do other processes take part in the training?"""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


@contextmanager
def harmless(model: torch.nn.Module) -> Iterator[None]:
    """Backward in here reaches the parameters as zeros, whatever NaN comes along: for a sub-batch of weight 0 that must run."""
    handles = [p.register_hook(torch.zeros_like) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
