"""Where the driving of a step goes, from the loop by hand to StepDriver bit by bit: python tests/benchmarks/profile_step.py

The model is that of bench_step.py. Seconds are processor time of one thread.
"""

from __future__ import annotations

import time

import torch

from batchsplit import BatchCutter, StepDriver
from batchsplit.losses import Losses, total, weighed
from batchsplit.step import accumulate
from bench_step import ROWS, SIZE, Batch, Trainee, by_hand, by_run_step
from timing import machine, medians

ROUNDS = 300


def over_a_cut(trainee: Trainee, batch: Batch, cutter: BatchCutter) -> None:
    trainee.optimizer.zero_grad()
    whole = torch.zeros(())
    for sub in cutter.cut(batch):
        loss = trainee.loss(sub.data) * sub.share
        loss.backward()
        whole += loss.detach()
    trainee.optimizer.step()


def checked(trainee: Trainee, batch: Batch, cutter: BatchCutter) -> None:
    trainee.optimizer.zero_grad()
    losses, cut = Losses(), cutter.cut(batch)
    for sub in cut:
        loss, _ = weighed(trainee.loss(sub.data), sub, losses, None)
        assert loss is not None
        loss.backward()
    total(losses, cut, [None] * len(cut))
    trainee.optimizer.step()


def accumulated(trainee: Trainee, batch: Batch, cutter: BatchCutter) -> None:
    trainee.optimizer.zero_grad()
    accumulate(cutter.cut(batch), trainee.loss)
    trainee.optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    batch, cutter = (torch.randn(ROWS, 32), torch.randint(10, (ROWS,))), BatchCutter(rows=SIZE)
    one, two, three, four, five, six, seven = (Trainee() for _ in range(7))
    driver = StepDriver(six.model, six.optimizer, six.loss, cutter)
    ways = {
        "loop by hand": lambda: by_hand(one, batch),
        "the same again": lambda: by_hand(seven, batch),
        "over a cut: views and shares": lambda: over_a_cut(two, batch, cutter),
        "+ losses checked and noted": lambda: checked(three, batch, cutter),
        "accumulate: + outputs, errors, devices, ranks": lambda: accumulated(four, batch, cutter),
        "run_step: + put back after an error": lambda: by_run_step(five, batch, cutter),
        "StepDriver": lambda: driver.step(batch),
    }
    seconds = medians(ways, ROUNDS, clock=time.process_time)
    print(f"\n| a step of {ROWS // SIZE} sub-batches | microseconds | to by hand |\n|:--|--:|--:|")
    for name, value in seconds.items():
        print(f"| {name} | {value * 1e6:.0f} | {value / seconds['loop by hand']:.3f} |")


if __name__ == "__main__":
    main()
