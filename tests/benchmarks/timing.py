"""Time several ways of doing one thing, turn by turn, and print them as ratios: seconds differ between machines."""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

import torch


def medians(
    ways: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each way. All ways run once a round, each round in another order.

    Turn by turn, a machine that slows down for a while slows all of them. Always in the same order, a way
    that comes after a long one would find the caches cold each time, and its neighbour never. `clock=time.process_time`
    leaves out what other programs do meanwhile: for what runs in one thread.
    """
    names = list(ways)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for way in ways.values():
        way()
    gc.collect()
    gc.disable()  # as timeit does; a collection between two turns would leave the next one with cold caches
    try:
        for _ in range(rounds):
            shuffle(names)
            for name in names:
                start = clock()
                result = ways[name]()
                seconds[name].append(clock() - start)
                del result  # so that the next way finds as much free memory as this one did
    finally:
        gc.enable()
    return {name: statistics.median(seconds[name]) for name in ways}


def machine() -> str:
    """What the numbers were taken on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "more-itertools"))
    threads = torch.get_num_threads()
    return f"Python {platform.python_version()}, {packages}; {os.cpu_count()} cores, {threads} torch thread(s)"


def show(title: str, seconds: Mapping[str, float], base: str, targets: Mapping[str, float]) -> bool:
    """Print the ways as ratios to `base`, with the targets that are set; return whether all are met."""
    print(f"\n{title}")
    width = max(map(len, seconds))
    met = True
    for name, value in seconds.items():
        ratio = value / seconds[base]
        line = f"  {name:<{width}}  {value * 1e3:10.3f} ms  {ratio:6.2f} x"
        if name in targets:
            met &= ratio <= targets[name]
            line += f"  (target {targets[name]:.2f} x: {'met' if ratio <= targets[name] else 'MISSED'})"
        print(line)
    return met
