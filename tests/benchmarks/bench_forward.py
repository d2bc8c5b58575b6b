"""What CutForward saves and costs for a contrastive loss: python tests/benchmarks/bench_forward.py

Bytes are those of all tensors made during a step and alive at once, gradients and the loss of all rows among them; time
is that of a step, turn by turn. Both are ratios to the unsplit batch, whose gradient every way must give. One pass over
sub-batches of the same size (accumulation, which gives another gradient) tells how much of the time is that of small
sub-batches, and how much that of running them twice.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchsplit import BatchCutter, CutForward
from timing import machine, medians, show

ROWS, LENGTH, WIDTH = 64, 64, 64


class PeakBytes(TorchDispatchMode):
    """The most bytes in tensors made in here that were alive at once."""

    def __init__(self, *outside: Tensor) -> None:
        super().__init__()
        self.outside = {StorageWeakRef(t.untyped_storage()) for t in outside}
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.live.update((ref, s.nbytes()) for s in storages if (ref := StorageWeakRef(s)) not in self.outside)
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return result


class Encoder(nn.Module):
    """Embeds rows of `(rows, length, width)`."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.layers(x).mean(1))


def step(encoder: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Both towers through one encoder, and the gradient of InfoNCE."""
    for p in encoder.parameters():
        p.grad = None
    cross_entropy(encoder(x) @ encoder(y).T / 0.1, torch.arange(len(x))).backward()
    return [p.grad for p in encoder.parameters() if p.grad is not None]


def one_pass(encoder: nn.Module, x: Tensor, y: Tensor, parts: int) -> None:
    """Accumulated over parts that see only themselves."""
    for p in encoder.parameters():
        p.grad = None
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (cross_entropy(encoder(a) @ encoder(b).T / 0.1, torch.arange(len(a))) / parts).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    encoder, x, y = Encoder(), torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)
    ways: dict[str, nn.Module] = {"unsplit": encoder}
    for parts in (2, 4, 8, 16):
        ways[f"{parts} sub-batches"] = CutForward(encoder, BatchCutter(parts=parts))

    right = [grad.clone() for grad in step(encoder, x, y)]
    print(f"\npeak bytes of a step: InfoNCE of {ROWS} pairs, 4 transformer layers, width {WIDTH}, length {LENGTH}")
    peaks = {}
    for name, way in ways.items():
        with PeakBytes(x, y, *encoder.parameters()) as bytes_:
            found = step(way, x, y)
        peaks[name] = bytes_.peak
        off = max(float((f - r).norm() / r.norm()) for f, r in zip(found, right, strict=True) if r.norm() > 1e-6)
        assert off < 1e-4, f"{name}: another gradient, by {off:.1e}: its numbers mean nothing"
        ratio = peaks[name] / peaks["unsplit"]
        print(f"  {name:<24}{peaks[name] / 2**20:9.1f} MiB  {ratio:5.2f} x  (gradient off by {off:.0e})")

    steps: dict[str, Any] = {name: lambda way=way: step(way, x, y) for name, way in ways.items()}
    steps |= {f"{parts} parts, one pass": lambda parts=parts: one_pass(encoder, x, y, parts) for parts in (4, 16)}
    seconds = medians(steps, rounds)
    show("time of that step", seconds, "unsplit", {})


if __name__ == "__main__":
    main()
