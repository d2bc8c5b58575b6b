"""Running out of memory: telling it from other errors, letting go of what it holds, and what it asked for."""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator

import torch

from batchsplit.errors import CutError

if sys.platform != "win32":
    import resource

# Where torch has no class of its own it raises a plain RuntimeError, and its text begins (or goes on) like this.
# Text of c10/core/impl/alloc_cpu.cpp, aten/src/ATen/mps/MPSAllocator.mm, c10/cuda/CUDAException.cpp, and of C++ itself.
_CLASSLESS = re.compile(
    r"(\[enforce fail at [^\]]*\] .*)?DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|MPS backend out of memory"
    r"|CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)"
    r"|std::bad_alloc$"
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def out_of_memory(error: BaseException, before: BaseException | None = None) -> bool:
    """Does an error, or one that it was raised from or while handling, say that memory ran out?

    `before` is what was being handled already when the work began: that, and all that came before it, is another story.

    >>> out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), out_of_memory(RuntimeError("shape memory"))
    (True, False)
    """
    return any(_says_so(one) for one in chain(error, before))


def chain(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """An error and those behind it, as a traceback would show them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and current is not before and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__cause__ is not None or current.__suppress_context__
        current = current.__cause__ if hidden else current.__context__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, CutError):  # ours is the last word on a row that does not fit
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CLASSLESS.match(str(error)) is not None


def let_go(error: BaseException, before: BaseException | None = None) -> None:
    """Clear the frames that an error holds, and with them the activations in their local variables.

    Frames that are still running keep theirs. Call `collect` when the error is out of scope.
    """
    seen: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is None or one is before or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        found += [one.__cause__, one.__context__]  # both: what `from` hides is held all the same


def collect(device: torch.device | None = None) -> None:
    """Give back what nothing refers to any more, in reference cycles and in the device's cache."""
    gc.collect()
    if device is not None and device.type != "cpu":
        empty = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty is not None:
            empty()


def asked_bytes(error: BaseException) -> int | None:
    """How many bytes the failed allocation wanted, where the error says it.

    >>> asked_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 KiB. GPU 0 has"))
    1536
    """
    for one in chain(error):
        found = _ASKED.search(str(one))
        if found:
            return int(float(found[1]) * _UNITS[found[2]])
    return None


def free_bytes(device: torch.device | None) -> int | None:
    """How many bytes are free on a device (on the CPU within the process's limit), where that can be known."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device is not None and device.type != "cpu":
        return None
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * page
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            with open("/proc/self/statm", encoding="ascii") as statm:
                free = min(free, max(limit - int(statm.read().split()[0]) * page, 0))
    except (NameError, AttributeError, ValueError, OSError):
        return None
    return free
