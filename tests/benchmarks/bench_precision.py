"""What float32 sums cost beside plain accumulation in time: python tests/benchmarks/bench_precision.py

Ratios are medians of rounds run turn by turn. The plain path (accumulate="parameter") is the base; the hooks are what
torch before 2.10 and DistributedDataParallel get. In float32 all three run the same code: their ratios are the noise.
The errors against float64 show what is bought.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from batchsplit import BatchCutter, StepDriver, precision
from timing import machine, medians, show

Batch = tuple[Tensor, Tensor]
WAYS = {"plain": ("parameter", True), "float32 by dtype": ("float32", True), "float32 by hook": ("float32", False)}


def network(width: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)).to(dtype)


def loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    def loss(data: Batch) -> Tensor:
        return mse_loss(model(data[0]), data[1])

    return loss


def stepper(model: nn.Module, way: str, rows: int | None) -> Callable[[Batch], object]:
    accumulate, by_dtype = WAYS[way]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    driver = StepDriver(model, optimizer, loss_of(model), BatchCutter(rows=rows), accumulate=accumulate, progress=False)

    def step(batch: Batch) -> object:
        precision.HAS_GRAD_DTYPE = by_dtype and hasattr(Tensor, "grad_dtype")
        return driver.step(batch)

    return step


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def errors(rows: int, width: int = 16) -> None:
    batch = (torch.randn(rows, width).bfloat16(), torch.randn(rows, width).bfloat16())
    model = network(width, torch.bfloat16)
    truth = copy.deepcopy(model).double()
    loss_of(truth)((batch[0].double(), batch[1].double())).backward()
    right = gradient(truth)
    print(f"\nError of an MLP's bfloat16 gradient against float64, {rows} rows")
    for name, way, size in [("unsplit", "plain", None), *((way, way, 1) for way in WAYS)]:
        stepper(model, way, size)(batch)
        print(f"  {name:<17} {((gradient(model) - right).norm() / right.norm()).item():.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())

    for dtype, width, rows in ((torch.bfloat16, 16, 64), (torch.bfloat16, 256, 64), (torch.float32, 16, 64)):
        batch = (torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype))
        seconds = medians({way: partial(stepper(network(width, dtype), way, 4), batch) for way in WAYS}, rounds)
        title = f"A step of an MLP of width {width} in {dtype}, {rows} rows in {rows // 4} sub-batches"
        show(title, seconds, "plain", {})
    errors(512)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
