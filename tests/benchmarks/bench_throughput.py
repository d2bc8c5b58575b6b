"""Steps of models one might train, beside the loop written by hand: python tests/benchmarks/bench_throughput.py

The loop by hand knows its weights before and checks nothing. Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batchsplit import BatchCutter, StepDriver
from timing import machine, medians

ROWS, SIZE, WIDTH, WORDS = 64, 8, 48, 500
LEAST = 0.98  # of the throughput of the loop by hand
Batch = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.layers(self.words(ids)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 96)
        self.lstm = nn.LSTM(96, 128, batch_first=True)
        self.out = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.words(ids))[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (mlp, lambda: torch.randn(ROWS, 512)),
    "transformer encoder": (Encoder, lambda: torch.randint(WORDS, (ROWS, WIDTH))),
    "LSTM": (Recurrent, lambda: torch.randint(WORDS, (ROWS, WIDTH))),
}


class Trainee:
    """One of several equal models, with its optimizer and loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self, data: Batch) -> Tensor:
        return cross_entropy(self.model(data[0]), data[1])

    def by_hand(self, batch: Batch, size: int = SIZE) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for start in range(0, ROWS, size):
            rows = slice(start, start + size)
            loss = self.loss((batch[0][rows], batch[1][rows])) * (size / ROWS)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total


def bench(name: str, rounds: int) -> tuple[str, bool]:
    make, inputs = MODELS[name]
    batch = (inputs(), torch.randint(10, (ROWS,)))
    hand, whole, driven = Trainee(make), Trainee(make), Trainee(make)
    driver = StepDriver(driven.model, driven.optimizer, driven.loss, BatchCutter(rows=SIZE))
    ways: dict[str, Callable[[], Any]] = {
        "by hand": lambda: hand.by_hand(batch),
        "StepDriver": lambda: driver.step(batch),
        "unsplit": lambda: whole.by_hand(batch, ROWS),
    }
    seconds = medians(ways, rounds, clock=time.process_time)
    for one in (hand, driven):
        pairs = zip(one.model.parameters(), whole.model.parameters())
        assert max((p - q).abs().max().item() for p, q in pairs) < 0.01, (
            "another model was trained: its time means nothing"
        )
    ratio = seconds["by hand"] / seconds["StepDriver"]
    milliseconds = " | ".join(f"{value * 1e3:.1f}" for value in seconds.values())
    to_unsplit = seconds["unsplit"] / seconds["StepDriver"]
    return f"| {name} | {milliseconds} | {ratio:.3f} | {to_unsplit:.2f} |", ratio >= LEAST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    print(
        f"\na step of {ROWS} rows in {ROWS // SIZE} sub-batches; milliseconds, and throughput of StepDriver as a ratio\n"
    )
    print("| model | by hand | StepDriver | unsplit | to by hand | to unsplit |")
    print("|:--|--:|--:|--:|--:|--:|")
    met = True
    for name in MODELS:
        line, enough = bench(name, rounds)
        met &= enough
        print(line, flush=True)
    print(f"\ntarget {LEAST} of the loop by hand: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
