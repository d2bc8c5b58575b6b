"""Training over several processes, each with its own part of every mathematical batch.

    torchrun --standalone --nproc-per-node 2 docs/examples/ranks.py ddp
    torchrun --standalone --nproc-per-node 2 docs/examples/ranks.py fsdp2

The losses are the same for any number of processes, and the same as without a cut: what a step averages over is
decided by the data, not by who holds which rows, nor by how many fit in memory at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from batchsplit import BatchCutter, StepDriver, label_weight

WORDS, WIDTH, STEPS, ROWS = 50, 12, 6, 13


class Tagger(nn.Module):
    """A label for every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.layer(self.embedding(ids))))


def batches(rank: int, ranks: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of each mathematical batch: not equally many, and with other numbers of labels than others'."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = torch.randint(1, WORDS, (ROWS, WIDTH), generator=generator)
        labels = ids % 5
        lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
        labels[torch.arange(WIDTH) >= lengths[:, None]] = -100  # padding, which has no label
        yield {"ids": ids[rank::ranks], "labels": labels[rank::ranks]}


def train(kind: str, rank: int, ranks: int, device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)  # the same parameters on every rank
    model: nn.Module = Tagger().double().to(device)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model.layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss_fn(data: dict[str, torch.Tensor]) -> torch.Tensor:
        # A mean over the labels of the sub-batch. Call the wrapped model itself: it is what reduces the gradients.
        return cross_entropy(model(data["ids"]).flatten(0, 1), data["labels"].flatten())

    cutter = BatchCutter(rows=2, weight=label_weight("labels"))
    driver = StepDriver(model, optimizer, loss_fn, cutter, clip_norm=1.0, device=device, progress=False)
    return [report.loss.item() for report in driver.run(batches(rank, ranks))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ddp", "fsdp2"])
    kind = parser.parse_args().kind
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    losses = train(kind, dist.get_rank(), dist.get_world_size(), device)
    if dist.get_rank() == 0:  # every rank has the same: the loss of the whole batch
        print("\n".join(f"step {step}: loss {loss:.12f}" for step, loss in enumerate(losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
