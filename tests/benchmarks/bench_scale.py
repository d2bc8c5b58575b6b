"""What driving and cutting cost as things grow: python tests/benchmarks/bench_scale.py

The driving of a sub-batch must not cost more where there are more of them, or more parameters. Seconds are processor time
of one thread; costs are differences to a loop by hand, taken turn by turn.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from batchsplit import BatchCutter, StepDriver
from timing import machine, medians

FLAT = 1.1  # a sub-batch costs at most so many times what it costs by hand, however many there are


class Pair:
    """Two equal models and one batch, of 4 rows a sub-batch: one model for the loop by hand, one for a driver."""

    def __init__(self, make: Callable[[], nn.Module], parts: int) -> None:
        self.x, self.parts = torch.randn(4 * parts, 8), parts
        self.model, driven = make(), make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(driven.parameters(), lr=0.01)
        self.driver = StepDriver(driven, optimizer, lambda data: driven(data).mean(), BatchCutter(parts=parts))

    def by_hand(self) -> None:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for start in range(0, len(self.x), 4):
            loss = self.model(self.x[start : start + 4]).mean() * (1 / self.parts)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()

    def by_driver(self) -> None:
        self.driver.step(self.x)


def in_sub_batches(rounds: int) -> bool:
    print("\ndriving a step of a linear layer, 4 rows a sub-batch; microseconds\n")
    print("| sub-batches | by hand, each | StepDriver, each | difference, each | ratio |")
    print("|--:|--:|--:|--:|--:|")
    costs = []
    for parts in (4, 64, 1024, 4096):
        pair = Pair(lambda: nn.Linear(8, 1), parts)
        turns = max(9, rounds * 64 // max(parts, 16))
        seconds = medians({"hand": pair.by_hand, "driver": pair.by_driver}, turns, clock=time.process_time)
        each = {name: value / parts * 1e6 for name, value in seconds.items()}
        costs.append(each["driver"] / each["hand"])
        difference, ratio = each["driver"] - each["hand"], each["driver"] / each["hand"]
        print(f"| {parts} | {each['hand']:.1f} | {each['driver']:.1f} | {difference:.1f} | {ratio:.2f} |", flush=True)
    many = costs[1:]  # four share the cost of a whole step
    return max(many) <= FLAT


class Wide(nn.Module):
    """Many parameters, of which the forward uses one pair: what the rest costs is the driving alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.used = nn.Linear(8, 1)
        self.rest = nn.ParameterList([torch.zeros(1) for _ in range(count - 2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def in_parameters(rounds: int) -> bool:
    print(
        "\nthe same with more parameters; microseconds a sub-batch (64 against 4 of them), and what is left for a step\n"
    )
    print("| parameters | by hand, a sub-batch | StepDriver, a sub-batch | by hand, a step | StepDriver, a step |")
    print("|--:|--:|--:|--:|--:|")
    costs = []
    for count in (10, 100, 1_000, 10_000):
        ways: dict[str, Callable[[], None]] = {}
        for parts in (4, 64):
            pair = Pair(partial(Wide, count), parts)
            ways |= {f"hand {parts}": pair.by_hand, f"driver {parts}": pair.by_driver}
        found = medians(ways, rounds, clock=time.process_time)
        cells = {}
        for name in ("hand", "driver"):
            each = (found[f"{name} 64"] - found[f"{name} 4"]) / 60 * 1e6
            cells[name] = each, found[f"{name} 4"] * 1e6 - 4 * each
        costs.append(cells["driver"][0] / cells["hand"][0])
        (a, b), (c, d) = cells["hand"], cells["driver"]
        print(f"| {count} | {a:.1f} | {c:.1f} | {b:.0f} | {d:.0f} |", flush=True)
    return max(costs) <= FLAT


def cutting(rounds: int) -> bool:
    print("\na batch of 1,000,000 rows × 64 columns: plan, cut and hand over\n")
    print("| sub-batches | slices by hand, ms | batchsplit, ms | ratio | bytes a sub-batch | tensor bytes copied |")
    print("|--:|--:|--:|--:|--:|--:|")
    x = torch.zeros(1_000_000, 64)
    met, costs = True, []
    for parts in (100, 1_000, 10_000):
        cutter, size = BatchCutter(parts=parts), 1_000_000 // parts

        def hand(size: int = size) -> list[Tensor]:
            return [x[start : start + size] for start in range(0, len(x), size)]

        def cut(cutter: BatchCutter = cutter) -> list[Tensor]:
            return [sub.data for sub in cutter.cut(x)]

        seconds = medians({"hand": hand, "cut": cut}, rounds, clock=time.process_time)
        tracemalloc.start()
        kept = cutter.cut(x)
        subs = list(kept)
        memory = tracemalloc.get_traced_memory()[1] / parts
        tracemalloc.stop()
        storage = x.untyped_storage().data_ptr()
        copied = sum(sub.data.nbytes for sub in subs if sub.data.untyped_storage().data_ptr() != storage)
        ratio = seconds["cut"] / seconds["hand"]
        costs.append(memory)
        print(
            f"| {parts:,} | {seconds['hand'] * 1e3:.2f} | {seconds['cut'] * 1e3:.2f} | {ratio:.2f} | {memory:.0f} | {copied} |",
            flush=True,
        )
        met &= not copied and (ratio < 1 or parts < 10_000)
    return met and costs[-1] <= FLAT * costs[-2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    met = in_sub_batches(rounds) & in_parameters(rounds) & cutting(rounds)
    print(
        f"\na sub-batch within {FLAT} x of one by hand, and the cut under the loop by hand: {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
