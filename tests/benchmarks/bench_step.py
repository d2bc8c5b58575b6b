"""What driving a step costs beside the loop one would write by hand: python tests/benchmarks/bench_step.py

A tiny model on purpose: the smaller the model, the more of a step is the driving. Ratios are medians of
rounds run turn by turn; every way trains a model of its own, and all models must end alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchsplit import BatchCutter, StepDriver, run_step
from timing import machine, medians, show

ROWS, SIZE, STEPS = 256, 16, 10
Batch = tuple[Tensor, Tensor]


class Trainee:
    """One of several equal models, with its optimizer and loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, data: Batch) -> Tensor:
        x, y = data
        return cross_entropy(self.model(x), y)


def by_hand(trainee: Trainee, batch: Batch) -> Tensor:
    """The loop with weights known before: nothing is counted, nothing is checked."""
    x, y = batch
    weight = SIZE / ROWS
    trainee.optimizer.zero_grad()
    total = torch.zeros(())
    for i in range(0, ROWS, SIZE):
        loss = trainee.loss((x[i : i + SIZE], y[i : i + SIZE])) * weight
        loss.backward()
        total += loss.detach()
    trainee.optimizer.step()
    return total


def by_run_step(trainee: Trainee, batch: Batch, cutter: BatchCutter) -> object:
    trainee.optimizer.zero_grad()
    loss = run_step(cutter.cut(batch), trainee.loss, model=trainee.model)
    trainee.optimizer.step()
    return loss


def unsplit(trainee: Trainee, batch: Batch) -> Tensor:
    trainee.optimizer.zero_grad()
    loss = trainee.loss(batch)
    loss.backward()
    trainee.optimizer.step()
    return loss.detach()


def steps(step: Callable[[], object]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(STEPS):
            step()

    return several


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())

    batch = (torch.randn(ROWS, 32), torch.randint(10, (ROWS,)))
    cutter = BatchCutter(rows=SIZE)
    trainees = {name: Trainee() for name in ("by hand", "run_step", "StepDriver", "unsplit")}
    driven = trainees["StepDriver"]
    driver = StepDriver(driven.model, driven.optimizer, driven.loss, cutter)
    seconds = medians(
        {
            "by hand": steps(lambda: by_hand(trainees["by hand"], batch)),
            "run_step": steps(lambda: by_run_step(trainees["run_step"], batch, cutter)),
            "StepDriver": steps(lambda: driver.step(batch)),
            "unsplit": steps(lambda: unsplit(trainees["unsplit"], batch)),
        },
        rounds,
    )
    title = f"{STEPS} steps of an MLP, {ROWS} rows in {ROWS // SIZE} sub-batches, SGD"
    met = show(title, seconds, "by hand", {"run_step": 1.05, "StepDriver": 1.10})

    reference = list(trainees["unsplit"].model.parameters())
    for name, trainee in trainees.items():
        difference = max((p - q).abs().max().item() for p, q in zip(trainee.model.parameters(), reference))
        print(f"  largest parameter difference from unsplit, {name}: {difference:.1e}")
        assert difference < 1e-4, f"{name} has trained another model: its time means nothing"
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
