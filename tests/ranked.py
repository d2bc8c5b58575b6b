"""Several processes for a test: each runs the same function as one rank of a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60.0  # seconds until a group counts as hung
BACKEND = 20.0  # seconds until the backend gives up waiting for a rank


class Failed:
    """What a rank raised."""

    def __init__(self, error: BaseException) -> None:
        self.kinds = [kind.__name__ for kind in type(error).__mro__]
        self.text = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
        self.trace = "".join(traceback.format_exception(error))


def on_ranks(count: int, function: Callable[..., Any], *args: Any, backend: float = BACKEND) -> list[Any]:
    """What `function(rank, *args)` returns on each of `count` ranks; an assertion fails where one raises or none ends."""
    results = each_rank(count, function, *args, backend=backend)
    for result in results:
        assert not isinstance(result, Failed), result.trace
    return results


def each_rank(count: int, function: Callable[..., Any], *args: Any, backend: float = BACKEND) -> list[Any]:
    """The same, with a `Failed` for a rank that raised and None for one that died."""
    context = multiprocessing.get_context("fork")  # torch is there already: a group is up in half a second
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, count, folder, backend, function, args)) for rank in range(count)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hung:
            processes[rank].kill()
            processes[rank].join()
        assert not hung, f"ranks {hung} did not end"
        files = [Path(folder, f"result{rank}") for rank in range(count)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _rank(rank: int, count: int, folder: str, backend: float, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1000 + rank)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=count, timeout=timedelta(seconds=backend))
    try:
        result = function(rank, *args)
    except Exception as error:
        result = Failed(error)
    torch.save(result, f"{folder}/part{rank}")
    os.rename(f"{folder}/part{rank}", f"{folder}/result{rank}")
    os._exit(0)  # no farewell to the other ranks, which may have gone already
