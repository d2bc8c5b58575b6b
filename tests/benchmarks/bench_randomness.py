"""What `randomness="whole"` costs: time of a cut step over that of the same step with fresh randomness, in one run.

python tests/benchmarks/bench_randomness.py
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from batchsplit.randomness import WholeRandomness


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 8)), torch.randn(
        256, 256
    )


def encoder() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True), torch.randn(64, 32, 128)


def lstm() -> tuple[nn.Module, Tensor]:
    class Last(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    return Last(64, 64, 2, dropout=0.3, batch_first=True), torch.randn(64, 16, 64)


def seconds(step: Callable[[], None], repeats: int = 15) -> float:
    step()
    times = []
    for _ in range(repeats):
        begun = perf_counter()
        step()
        times.append(perf_counter() - begun)
    return median(times)


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{'model':<10}{'sub-batches':>12}{'fresh ms':>10}{'whole ms':>10}{'ratio':>7}{'learning ms, once a shape':>27}"
    )
    for make in (mlp, encoder, lstm):
        torch.manual_seed(0)
        model, x = make()
        for parts in (2, 4, 8):
            size = len(x) // parts
            cut = [slice(i, i + size) for i in range(0, len(x), size)]
            plans: dict = {}

            def forward(x: Tensor, model: nn.Module = model) -> Tensor:
                return model(x).square().mean()

            def fresh(cut: list[slice] = cut, x: Tensor = x) -> None:
                for rows in cut:
                    (forward(x[rows]) / len(cut)).backward()

            def whole(cut: list[slice] = cut, x: Tensor = x, plans: dict = plans) -> None:
                lent = WholeRandomness(forward, lambda rows: x[rows], len(x), plans=plans)
                for rows in cut:
                    with lent.rows(rows):
                        (forward(x[rows]) / len(cut)).backward()
                lent.finish()

            begun = perf_counter()
            with WholeRandomness(forward, lambda rows: x[rows], len(x)).rows(cut[0]):  # noqa: B023
                forward(x[cut[0]])
            learning = perf_counter() - begun
            plain, lent = seconds(fresh), seconds(whole)
            times = f"{plain * 1e3:>10.2f}{lent * 1e3:>10.2f}{lent / plain:>7.2f}{learning * 1e3:>27.1f}"
            print(f"{make.__name__:<10}{parts:>12}{times}")


if __name__ == "__main__":
    main()
