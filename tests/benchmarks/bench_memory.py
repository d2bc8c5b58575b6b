"""What a cut step takes in memory beside the unsplit one: python tests/benchmarks/bench_memory.py

For each number of sub-batches a new process takes one step. What it should take at most is computed: parameters,
gradients, the batch, and what one sub-batch makes in forward and backward by hand, where there are gradients to add to
(counted tensor by tensor). Bytes saved for backward are counted by hooks, peak resident memory by the kernel (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from batchsplit import BatchCutter, StepDriver
from timing import machine

ROWS, FEATURES, HIDDEN = 4096, 512, 1024
TARGET = 1.1
# glibc gives large blocks back when they are freed only below a size that grows with what was freed; it is to stay as it is,
# so that what is resident is what is in use.
ALLOCATOR = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MIB = 2**20


class Live(TorchDispatchMode):
    """The most bytes alive at once in tensors that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.seen | given:
                self.add(t.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Saved:
    """The most bytes saved for backward at once; a storage saved several times is counted once."""

    def __init__(self, leave_out: set[int]) -> None:
        self.leave_out = leave_out
        self.held: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        token = Token(tensor)
        if key not in self.leave_out:
            if not self.held.get(key):
                self.now += size
                self.peak = max(self.peak, self.now)
            self.held[key] = self.held.get(key, 0) + 1
            weakref.finalize(token, self.gone, key, size)
        return token

    def gone(self, key: int, size: int) -> None:
        self.held[key] -= 1
        self.now -= 0 if self.held[key] else size

    def __enter__(self) -> Saved:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda token: token.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)


class Token:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def trainee() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    sizes = [FEATURES, HIDDEN, HIDDEN, HIDDEN]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, 10))
    return model, lambda data: cross_entropy(model(data[0]), data[1])


def size_of(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def one(parts: int) -> dict[str, int]:
    """One step in this process: bytes, as computed and as found."""
    torch.set_num_threads(1)
    model, loss_fn = trainee()
    cutter = BatchCutter(parts=parts)

    def driver() -> StepDriver:
        return StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, cutter)

    driver().step((torch.randn(128, FEATURES), torch.randint(10, (128,))))  # code and threads are loaded
    model.zero_grad()
    parameters = size_of(model.parameters())
    before = resident("VmRSS")
    batch = (torch.randn(ROWS, FEATURES), torch.randint(10, (ROWS,)))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    driver().step(batch)
    peak = resident("VmHWM") - before + parameters  # which were there before

    size = -(-ROWS // parts)
    outside = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *batch]}
    model.zero_grad()
    part = (batch[0][:size], batch[1][:size])
    with Saved(outside) as by_hand:
        loss_fn(part).backward()
    with Live() as live:  # the second one: its gradients are added to those there are
        loss_fn(part).backward()
    with Saved(outside) as saved:
        driver().step(batch)
    return {
        "saved": saved.peak,
        "saved by hand": by_hand.peak,
        "resident": peak,
        "computed": live.peak + 2 * parameters + size_of(batch),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=64, help="sub-batches at most")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return 0
    print(machine())
    print(f"\na step of an MLP, {ROWS} rows; MiB\n")
    print("| sub-batches | saved for backward | of one by hand | ratio | peak resident | computed | ratio |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    met, parts = True, 1
    while parts <= arguments.most:
        command = [sys.executable, __file__, "--one", str(parts)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=ALLOCATOR).stdout)
        saved, resident_ = found["saved"] / found["saved by hand"], found["resident"] / found["computed"]
        mib = {name: f"{value / MIB:.1f}" for name, value in found.items()}
        print(
            f"| {parts} | {mib['saved']} | {mib['saved by hand']} | {saved:.2f} "
            f"| {mib['resident']} | {mib['computed']} | {resident_:.2f} |",
            flush=True,
        )
        met &= max(saved, resident_) <= TARGET
        parts *= 2
    print(f"\ntarget {TARGET} x: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
