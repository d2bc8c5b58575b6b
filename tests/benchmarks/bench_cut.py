"""What a cut costs beside the loop one would write by hand: python tests/benchmarks/bench_cut.py

Each way ends with all sub-batches' data in a list. Ratios are medians of rounds run turn by turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from batchsplit import BatchCutter
from timing import machine, medians, show

ROWS, PARTS = 512, 64
SIZE = ROWS // PARTS


def mixed_batch() -> dict[str, Any]:
    names = ("input_ids", "attention_mask", "token_type_ids", "labels")
    batch: dict[str, Any] = {name: torch.randint(1000, (ROWS, 512)) for name in names}
    return batch | {"images": torch.rand(ROWS, 3, 32, 32), "ids": [f"row {i}" for i in range(ROWS)], "extra": None}


def by_slices(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v if v is None else v[i : i + SIZE] for k, v in batch.items()} for i in range(0, ROWS, SIZE)]


def by_split(batch: dict[str, Any]) -> list[dict[str, Any]]:
    columns = []
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            columns.append(value.split(SIZE))
        elif value is None:
            columns.append([None] * PARTS)
        else:
            columns.append([value[i : i + SIZE] for i in range(0, ROWS, SIZE)])
    return [dict(zip(batch, values)) for values in zip(*columns)]


def by_pytree(batch: Any) -> list[Any]:
    """Every sub-batch walks the whole tree, 512 strings too (which it does not even cut)."""
    return [
        pytree.tree_map(lambda v: v[i : i + SIZE] if isinstance(v, torch.Tensor) else v, batch)  # noqa: B023
        for i in range(0, ROWS, SIZE)
    ]


def by_cutter(cutter: BatchCutter, batch: Any) -> list[Any]:
    return [sub.data for sub in cutter.cut(batch)]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def nothing_copied(batch: Any, datas: list[Any]) -> bool:
    """Print how many bytes of the sub-batches' tensors lie outside the batch's own; return whether none do."""
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors(batch)]

    def inside(t: torch.Tensor) -> bool:
        return any(start <= t.data_ptr() and t.data_ptr() + t.nbytes <= end for start, end in spans)

    pieces = tensors(datas)
    assert not inside(pieces[0].clone()), "a copy has to be seen as one"
    assert sum(t.nbytes for t in pieces) == sum(t.nbytes for t in tensors(batch)), "rows are missing"
    copied = sum(t.nbytes for t in pieces if not inside(t))
    print(f"  bytes of tensors copied: {copied}")
    return copied == 0


def bench_mixed(rounds: int) -> bool:
    batch, cutter = mixed_batch(), BatchCutter(parts=PARTS)
    ways: dict[str, Callable[[], object]] = {
        "slices by hand": lambda: by_slices(batch),
        "Tensor.split by hand": lambda: by_split(batch),
        "batchsplit": lambda: by_cutter(cutter, batch),
    }
    title = f"dict of 5 tensors, 512 strings, None; {PARTS} sub-batches"
    met = show(title, medians(ways, rounds), "slices by hand", {"batchsplit": 0.80})
    # In rounds of its own: after something so long, whatever comes next finds its caches cold.
    pytree_ways = {"slices by hand": ways["slices by hand"], "pytree by hand": lambda: by_pytree(batch)}
    show("the same with torch's pytree", medians(pytree_ways, min(rounds, 20)), "slices by hand", {})
    return met & nothing_copied(batch, by_cutter(cutter, batch))


def bench_pair(rounds: int) -> bool:
    x, y = torch.rand(ROWS, 3, 32, 32), torch.randint(10, (ROWS,))
    cutter = BatchCutter(parts=PARTS)
    ways: dict[str, Callable[[], object]] = {
        "slices by hand": lambda: [(x[i : i + SIZE], y[i : i + SIZE]) for i in range(0, ROWS, SIZE)],
        "Tensor.split by hand": lambda: list(zip(x.split(SIZE), y.split(SIZE))),
        "batchsplit": lambda: by_cutter(cutter, (x, y)),
    }
    met = show(f"(x, y); {PARTS} sub-batches", medians(ways, rounds), "slices by hand", {"batchsplit": 0.75})
    return met & nothing_copied((x, y), by_cutter(cutter, (x, y)))


def bench_scaling(rounds: int) -> None:
    """Cost per leaf and sub-batch stays flat where the cost is linear in both."""
    print("\nscaling: microseconds a leaf and sub-batch (ratio to slices by hand)")
    counts, rows = (4, 64, 1024), 1024
    print("  leaves" + "".join(f"{f'{count} sub-batches':>24}" for count in counts))
    for leaves in (10, 100, 1000):
        batch = {f"leaf{i}": torch.rand(rows, 4) for i in range(leaves)}
        cells = []
        for count in counts:
            cutter, size = BatchCutter(parts=count), rows // count

            def by_hand(batch: dict[str, torch.Tensor] = batch, size: int = size) -> None:
                for i in range(0, rows, size):
                    _ = {k: v[i : i + size] for k, v in batch.items()}

            def by_batchsplit(batch: dict[str, torch.Tensor] = batch, cutter: BatchCutter = cutter) -> None:
                for sub in cutter.cut(batch):
                    _ = sub.data

            pieces = leaves * count
            seconds = medians({"hand": by_hand, "cut": by_batchsplit}, max(3, min(rounds, 200_000 // pieces)))
            cells.append(f"{seconds['cut'] / pieces * 1e6:.2f} ({seconds['cut'] / seconds['hand']:.2f} x)")
        print(f"  {leaves:6}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--no-scaling", action="store_true", help="leave out the table of leaves × sub-batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    met = bench_mixed(arguments.rounds) & bench_pair(arguments.rounds)
    if not arguments.no_scaling:
        bench_scaling(arguments.rounds)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
