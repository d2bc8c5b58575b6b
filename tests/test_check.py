"""`check`: planted faults whose cause has to be named, clean models without a false alarm, and all put back."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from batchsplit import PER_ROW, BatchCutter, CheckReport, CutError, axis, check, label_weight, mask_weight, row_weight
from batchsplit.cli import main

WORDS, WIDTH, ROWS = 13, 6, 7
Given = tuple[nn.Module, Any, Callable[[Any], Any], BatchCutter]


def numbers(rows: int = ROWS, features: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, features), "y": torch.randn(rows, 1)}


def text(rows: int = ROWS, width: int = WIDTH) -> dict[str, Tensor]:
    lengths = torch.randint(2, width + 1, (rows,))
    lengths[0], lengths[1], lengths[-1] = width, 2, 3
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.randint(1, WORDS, (rows, width)) * mask
    return {"ids": ids, "mask": mask.float(), "labels": ids.masked_fill(~mask, -100)}


def mlp(middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), middle or nn.Tanh(), nn.Linear(8, 1))


class Tagger(nn.Module):
    """Reads tokens one by one."""

    def __init__(self, middle: nn.Module | None = None, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.middle = middle or nn.Identity()
        self.words = nn.Linear(size, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(self.middle(self.embed(ids)))


def mse(model: nn.Module, **options: Any) -> Callable[[Any], Tensor]:
    return lambda data: F.mse_loss(model(data["x"]), data["y"], **options)


def token_loss(model: nn.Module, shifted: bool = False, **options: Any) -> Callable[[Any], Tensor]:
    def loss(data: Any) -> Tensor:
        logits, labels = model(data["ids"]), data["labels"]
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)

    return loss


def in_rows(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Any], weight: Any = row_weight, **options: Any
) -> Given:
    return model, batch, loss_fn, BatchCutter(rows=3, weight=weight, **options)


# Planted faults, by name: the kind of cause, what its text or place must say, and how it is made.
FAULTS: dict[str, tuple[str, str, Callable[[], Given]]] = {}


def fault(kind: str, words: str = "") -> Callable[[Callable[[], Given]], Callable[[], Given]]:
    def add(build: Callable[[], Given]) -> Callable[[], Given]:
        FAULTS[build.__name__] = (kind, words, build)
        return build

    return add


@fault("weight", "weight=label_weight('labels')")
def rows_for_tokens() -> Given:
    model = Tagger()
    return in_rows(model, text(), token_loss(model))


@fault("weight", "`labels != -100`, shifted")
def rows_for_shifted_tokens() -> Given:
    model = Tagger()
    return in_rows(model, text(), token_loss(model, shifted=True))


@fault("weight", "weight=label_weight('labels', shifted=True)")
def unshifted_for_shifted_tokens() -> Given:
    model = Tagger()
    return in_rows(model, text(), token_loss(model, shifted=True), label_weight("labels"))


@fault("weight", "weight=label_weight('labels')")
def shifted_for_unshifted_tokens() -> Given:
    model = Tagger()
    return in_rows(model, text(), token_loss(model), label_weight("labels", shifted=True))


@fault("weight", "ignore_index=0")
def another_ignored_label() -> Given:
    model, batch = Tagger(), text()
    batch["labels"] = batch["labels"].clamp(min=0)
    del batch["ids"], batch["mask"]
    batch["ids"] = torch.randint(0, WORDS, (ROWS, WIDTH))
    return in_rows(model, batch, token_loss(model, ignore_index=0))


@fault("weight", "mask_weight('mask')")
def rows_for_a_mask() -> Given:
    model, batch = Tagger(), text()
    batch["mask"] = batch["mask"] * torch.rand(ROWS, WIDTH)

    def loss(data: Any) -> Tensor:
        return (model(data["ids"]).logsumexp(-1) * data["mask"]).sum() / data["mask"].sum()

    return in_rows(model, batch, loss)


@fault("weight", "[:, 1:]")
def rows_for_a_shifted_mask() -> Given:
    model, batch = Tagger(), text()
    batch["mask"] = batch["mask"] * torch.rand(ROWS, WIDTH)

    def loss(data: Any) -> Tensor:
        mask = data["mask"][:, 1:]
        return (model(data["ids"])[:, 1:].logsumexp(-1) * mask).sum() / mask.sum()

    return in_rows(model, batch, loss)


@fault("weight", "weight=None")
def rows_for_a_sum() -> Given:
    model = mlp()
    return in_rows(model, numbers(), mse(model, reduction="sum"))


@fault("weight", "weight=row_weight")
def a_mean_over_rows_taken_for_a_sum() -> Given:
    model = mlp()
    return in_rows(model, numbers(), mse(model), None)


@fault("weight", "class weights")
def class_weights() -> Given:
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(ROWS, 3), "labels": torch.tensor([0, 0, 0, 1, 0, 1, 1])}
    weights = torch.tensor([1.0, 9.0])
    return in_rows(model, batch, lambda data: F.cross_entropy(model(data["x"]), data["labels"], weight=weights))


@fault("weight", "instead of")
def a_denominator_that_nobody_can_guess() -> Given:
    model, batch = mlp(), numbers()

    def loss(data: Any) -> Tensor:
        importance = data["x"][:, :1].exp()
        return ((model(data["x"]) - data["y"]) ** 2 * importance).sum() / importance.sum()

    return in_rows(model, batch, loss)


@fault("weight", 'the term "ce"')
def one_term_of_two() -> Given:
    model = Tagger()
    ce = token_loss(model)

    def loss(data: Any) -> dict[str, Tensor]:
        return {"ce": ce(data), "size": model(data["ids"]).square().mean()}

    return in_rows(model, text(), loss, {"ce": row_weight, "size": row_weight})


@fault("weight", "entries of `x`")
def rows_for_ragged_entries() -> Given:
    model = mlp()
    batch = {"x": [torch.randn(n, 3) for n in (2, 5, 1, 4, 3, 2, 6)]}
    return in_rows(model, batch, lambda data: model(torch.cat(data["x"])).square().mean(), layout={"x": PER_ROW})


@fault("module", "BatchNorm1d")
def batch_norm_1d() -> Given:
    model = mlp(nn.BatchNorm1d(8))
    return in_rows(model, numbers(), mse(model))


@fault("module", "BatchNorm2d")
def batch_norm_2d() -> Given:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1))
    batch = {"x": torch.randn(ROWS, 2, 5, 5), "y": torch.randn(ROWS, 1)}
    return in_rows(model, batch, mse(model))


class SyncBatchNorm(nn.Module):
    """As torch's own, which runs on several ranks only: statistics of the whole batch, and none that are kept."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


@fault("module", "(SyncBatchNorm)")
def sync_batch_norm() -> Given:
    model = mlp(SyncBatchNorm())
    return in_rows(model, numbers(), mse(model))


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))  # mixes rows itself, before the module that it calls


@fault("module", "`1` (Centered)")
def rows_centered_by_their_mean() -> Given:
    model = mlp(Centered())
    return in_rows(model, numbers(), mse(model))


@fault("module", "`middle.self_attn` (MultiheadAttention)")
def attention_across_the_batch() -> Given:
    model = Tagger(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=False))
    return in_rows(model, text(), token_loss(model), label_weight("labels"))


class Router(nn.Module):
    """Each expert takes the first tokens that want it, as far as its capacity goes: that of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, expert = self.choose(flat).softmax(-1).max(-1)
        out = flat.clone()
        for i, module in enumerate(self.experts):
            chosen = (expert == i).nonzero().squeeze(1)[: len(flat) // 4]
            out = out.index_add(0, chosen, module(flat[chosen]) * weight[chosen, None])
        return out.view_as(x)


@fault("module", "`middle` (Router)")
def router_with_a_capacity() -> Given:
    model = Tagger(Router())
    return in_rows(model, text(), token_loss(model), label_weight("labels"))


class Balanced(nn.Module):
    """Adds a load-balancing loss: mean × mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        self.loss = 4 * (p.mean((0, 1)) * F.one_hot(p.argmax(-1), 4).to(p).mean((0, 1))).sum()
        return x * p.amax(-1, keepdim=True)


@fault("module", "`middle` (Balanced)")
def router_with_load_balancing() -> Given:
    balanced = Balanced()
    model = Tagger(balanced)
    ce = token_loss(model)
    return in_rows(model, text(), lambda data: ce(data) + 0.1 * balanced.loss, label_weight("labels"))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=1), F.normalize(self.right(x), dim=1)


@fault("loss", "CutForward around the model it is exact")
def contrastive_loss() -> Given:
    model = TwoTowers()

    def loss(data: Any) -> Tensor:
        a, b = model(data["x"])
        scores, here = 5 * a @ b.T, torch.arange(len(a))
        return (F.cross_entropy(scores, here) + F.cross_entropy(scores.T, here)) / 2

    return in_rows(model, {"x": torch.randn(ROWS, 3)}, loss)


@fault("loss", "CutForward around the model it is exact")
def contrastive_loss_of_towers_called_one_by_one() -> Given:
    model = TwoTowers()

    def loss(data: Any) -> Tensor:
        a, b = model.left(data["x"]), model.right(data["y"])
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return in_rows(model, {"x": torch.randn(ROWS, 3), "y": torch.randn(ROWS, 3)}, loss)


@fault("loss", "coupled")
def concordance() -> Given:
    model = mlp()

    def loss(data: Any) -> Tensor:
        p, y = model(data["x"]), data["y"]
        covariance = ((p - p.mean()) * (y - y.mean())).mean()
        return 1 - 2 * covariance / (p.var(correction=0) + y.var(correction=0) + (p.mean() - y.mean()) ** 2)

    return in_rows(model, numbers(), loss)


@fault("loss", "CutForward")
def a_quantile_of_the_errors() -> Given:
    model = mlp()
    return in_rows(model, numbers(), lambda data: (model(data["x"]) - data["y"]).abs().flatten().quantile(0.7))


@fault("loss", "CutForward")
def the_root_of_a_mean() -> Given:
    model = mlp()
    return in_rows(model, numbers(), lambda data: (model(data["x"]) - data["y"]).square().mean().sqrt())


@fault("randomness", 'randomness="whole"')
def dropout() -> Given:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 1))
    return in_rows(model, numbers(), mse(model))


@fault("randomness", "somewhere in the forward")
def noise_from_numpy() -> Given:
    model = mlp()

    def loss(data: Any) -> Tensor:
        noise = torch.as_tensor(np.random.standard_normal(data["x"].shape[::-1]).T).to(data["x"])
        return F.mse_loss(model(data["x"] + noise), data["y"])

    return in_rows(model, numbers(), loss)


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x.tanh()


@fault("state", "`1.mean`")
def a_moving_average() -> Given:
    model = mlp(Averaging())
    return in_rows(model, numbers(), mse(model))


class Cooling(nn.Module):
    """Counts its forwards and gets colder with each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x / (1 + 0.1 * self.calls)).tanh()


@fault("state", "`1.calls`")
def a_counter_of_forwards() -> Given:
    model = mlp(Cooling())
    return in_rows(model, numbers(), mse(model))


@fault("state", "`1.running_mean`")
def instance_norm_that_tracks() -> Given:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(24, 1)
    )
    batch = {"x": torch.randn(ROWS, 2, 8), "y": torch.randn(ROWS, 1)}
    return in_rows(model, batch, mse(model))


class Momentum(nn.Module):
    """Scores rows against a queue of what a slowly following copy made of earlier rows."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", torch.randn(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.online(x) @ self.queue.T.clone()
        with torch.no_grad():
            for slow, online in zip(self.slow.parameters(), self.online.parameters()):
                slow.data = slow.data * 0.9 + online.data * 0.1
            self.queue = torch.cat([self.slow(x), self.queue])[:12]
        return scores


@fault("state", "`queue`, `slow.weight`, `slow.bias`")
def a_momentum_encoder_with_a_queue() -> Given:
    model = Momentum()
    return in_rows(model, {"x": torch.randn(ROWS, 3)}, lambda data: model(data["x"]).logsumexp(1).mean())


@fault("state", "`1.seen`")
def a_list_that_grows() -> Given:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: deque[float] = deque(maxlen=100)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(float(x.detach().mean()))
            return x.tanh()

    model = mlp(Remembering())
    return in_rows(model, numbers(), mse(model))


@fault("state", "outside of modules")
def a_counter_in_a_closure() -> Given:
    model, calls = mlp(), [0]

    def loss(data: Any) -> Tensor:
        calls[0] += 1
        return F.mse_loss(model(data["x"]), data["y"]) * calls[0]

    return in_rows(model, numbers(), loss)


@fault("layout", '"h": axis(1)')
def states_cut_along_their_layers() -> Given:  # B14
    layers, rows = 4, 4
    model = nn.LSTM(3, 5, num_layers=layers, batch_first=True)
    batch = {"x": torch.randn(rows, 6, 3), "h": torch.randn(layers, rows, 5)}
    loss_fn = lambda data: model(data["x"], (data["h"], data["h"]))[0].square().mean()  # noqa: E731
    return model, batch, loss_fn, BatchCutter(rows=2)


@fault("layout", '"table": SHARED')
def a_table_as_long_as_the_batch() -> Given:
    model = nn.Linear(3, 1)
    batch = {**numbers(), "table": torch.rand(ROWS)}

    def loss(data: Any) -> Tensor:
        return (F.mse_loss(model(data["x"]), data["y"], reduction="none")).mean() * data["table"].sum()

    return in_rows(model, batch, loss)


@fault("layout", '"bias": SHARED')
def a_square_bias() -> Given:
    model = Tagger()
    batch = text(rows=WIDTH)
    batch["bias"] = torch.randn(WIDTH, WIDTH)

    def loss(data: Any) -> Tensor:
        hidden = data["bias"].softmax(-1) @ model(data["ids"])
        return hidden.logsumexp(-1).mean()

    return in_rows(model, batch, loss)


@fault("padding", "total_length")
def packed_and_padded_inside() -> Given:  # B20
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
            return self.out(states.mean(1))  # over the padding too

    model = Packs()
    batch = {"x": torch.randn(5, 6, 3), "lengths": torch.tensor([2, 6, 4, 3, 1])}
    return model, batch, lambda data: model(data["x"], data["lengths"]).square().mean(), BatchCutter(rows=2)


@fault("padding", "pads sequences itself")
def ragged_rows_padded_inside() -> Given:
    model = nn.Linear(1, 3)
    batch = {"x": [torch.randn(n) for n in (2, 5, 1, 4)]}

    def loss(data: Any) -> Tensor:
        x = pad_sequence(data["x"], batch_first=True)
        return model(x.mean(1, keepdim=True)).square().mean()

    return model, batch, loss, BatchCutter(rows=2, layout={"x": PER_ROW})


class Trimming(BatchCutter):
    """Cuts off the padding that a sub-batch does not need."""

    padding = "trim"

    def cut(self, batch: Any, whole_weight: Any = None) -> Any:
        cut = super().cut(batch, whole_weight)
        if self.padding == "trim":
            whole = cut._data

            def trimmed(index: int) -> Any:
                data = whole(index)
                width = int(data["mask"].sum(1).max())
                return {key: value[:, -width:] for key, value in data.items()}  # the padding is on the left

            cut._data = trimmed
            cut.__class__ = type(
                "Trimmed", (type(cut),), {"__iter__": lambda self: (self[i] for i in range(len(self)))}
            )
        return cut


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, 8), nn.Embedding(WIDTH, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids) + self.position(torch.arange(ids.shape[1])))


def left_padded() -> dict[str, Tensor]:
    batch = text()
    return {"ids": batch["ids"].flip(1), "mask": batch["mask"].flip(1)}


def masked_square(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda data: ((model(data["ids"])[..., 0] * data["mask"]).sum(1) / data["mask"].sum(1)).square().mean()


@fault("padding", 'padding="keep"')
def padding_that_was_trimmed() -> Given:  # B25
    model = Positions()
    return model, left_padded(), masked_square(model), Trimming(rows=2)


@fault("precision", "accumulate")
def small_gradients_lost_in_bfloat16() -> Given:  # B38
    model = nn.Linear(1, 1, bias=False).bfloat16()
    x = torch.full((257, 1), 2.0**-9)
    x[0] = 1.0
    return model, {"x": x.bfloat16()}, lambda data: model(data["x"]).sum(), BatchCutter(rows=1, weight=None)


@fault("error", "could not be run")
def a_forward_that_wants_all_rows() -> Given:
    model = mlp()

    def loss(data: Any) -> Tensor:
        return (model(data["x"]).view(ROWS) - data["y"].view(ROWS)).square().mean()

    return in_rows(model, numbers(), loss)


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 20
    assert {kind for kind, _, _ in FAULTS.values()} == {
        "weight", "module", "loss", "randomness", "padding", "state", "precision", "layout", "error",
    }  # fmt: skip


ROWS_TAKEN = {"small_gradients_lost_in_bfloat16": 257}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named(name: str) -> None:
    kind, words, build = FAULTS[name]
    report = check(*build(), rows=ROWS_TAKEN.get(name, 32))
    assert not report.exact
    first = report.causes[0]
    assert first.kind == kind, report
    assert words in first or words in first.advice, report
    assert first.advice in report.advice
    assert kind in str(report)


def clean_mlp() -> Given:
    model = mlp()
    return in_rows(model, numbers(), mse(model))


def clean_lstm() -> Given:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(WORDS, 5), nn.Linear(8, WORDS)
            self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.lstm(self.embed(ids))[0])

    model = Reader()
    return in_rows(model, text(), token_loss(model), label_weight("labels"))


def clean_transformer() -> Given:
    model = Tagger(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)).eval()
    return in_rows(model, text(), token_loss(model), label_weight("labels"))


def clean_group_norm() -> Given:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1))
    return in_rows(model, {"x": torch.randn(ROWS, 2, 5, 5), "y": torch.randn(ROWS, 1)}, mse(model))


def clean_layer_norm() -> Given:
    model = mlp(nn.LayerNorm(8))
    return in_rows(model, numbers(), mse(model))


def clean_causal_model() -> Given:
    model = Tagger()
    return in_rows(model, text(), token_loss(model, shifted=True), label_weight("labels", shifted=True))


def clean_named_terms() -> Given:
    model = Tagger()
    ce = token_loss(model)

    def loss(data: Any) -> tuple[dict[str, Tensor], Tensor]:
        penalty = sum(p.square().sum() for p in model.parameters())
        terms = {"ce": ce(data), "size": model(data["ids"]).square().mean(), "l2": torch.as_tensor(penalty)}
        return terms, model(data["ids"]).argmax(-1)

    return in_rows(model, text(), loss, {"ce": label_weight("labels"), "size": row_weight, "l2": "once"})


def clean_sum() -> Given:
    model = mlp()
    return in_rows(model, numbers(), mse(model, reduction="sum"), None)


def clean_tied_weights() -> Given:
    model = Tagger()
    model.words.weight = model.embed.weight
    return in_rows(model, text(), token_loss(model), label_weight("labels"))


def clean_frozen_batch_norm() -> Given:
    model = mlp(nn.BatchNorm1d(8))
    model[1].eval()
    return in_rows(model, numbers(), mse(model))


def clean_mask() -> Given:
    model = Positions()
    return in_rows(
        model,
        text(),
        lambda data: (model(data["ids"])[..., 0] * data["mask"]).sum() / data["mask"].sum(),
        mask_weight("mask"),
    )


def clean_float32_inside() -> Given:
    """Casts to float32 in the middle, as many language models do, and a teacher that nobody trains."""

    class Casting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().softmax(-1, dtype=torch.float32).to(torch.float32) + torch.zeros(8, dtype=torch.float32)

    model, teacher, scale = mlp(Casting()), mlp(), nn.Parameter(torch.ones(1))
    loss = lambda data: F.mse_loss(model(data["x"]) * scale, teacher(data["x"]).detach())  # noqa: E731
    return in_rows(model, numbers(), loss)


def clean_remembered_activation() -> Given:
    """Keeps what it saw last, for people to look at: not a state that anything depends on."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None
            self.height = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.last, self.height = x.detach(), float(x.detach().max())
            return x.tanh()

    model = mlp(Watched())
    return in_rows(model, numbers(), mse(model))


def clean_time_first() -> Given:
    model = nn.LSTM(3, 4, num_layers=2)
    batch = {"x": torch.randn(6, ROWS, 3), "h": torch.randn(2, ROWS, 4)}
    loss = lambda data: model(data["x"], (data["h"], data["h"]))[0].square().mean()  # noqa: E731
    return in_rows(model, batch, loss, layout={"x": axis(1), "h": axis(1)})


def clean_sub_batch_without_targets() -> Given:
    model, batch = Tagger(), text()
    batch["labels"][:3] = -100
    return in_rows(model, batch, token_loss(model), label_weight("labels"))


def clean_numpy() -> Given:
    model = mlp()
    batch = {key: value.numpy() for key, value in numbers().items()}
    loss = lambda data: F.mse_loss(model(torch.as_tensor(data["x"])), torch.as_tensor(data["y"]))  # noqa: E731
    return in_rows(model, batch, loss)


CLEAN = [value for name, value in list(globals().items()) if name.startswith("clean_")]


@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_clean_model_is_exact(build: Callable[[], Given]) -> None:
    report = check(*build())
    assert report.exact, report
    assert report.error < 1e-12
    assert report.causes == []
    assert report.advice == []
    assert str(report).startswith("batchsplit check: EXACT")
    assert "float64" in report.precision


# ---- What the cases say


@pytest.mark.parametrize("parts", [2, 4])
def test_b28_a_model_that_scales_by_itself_or_does_not(parts: int) -> None:
    model = Tagger()
    ids = torch.randint(1, WORDS, (8, WIDTH))
    batch, total = {"ids": ids, "labels": ids.flip(1)}, ids.numel()
    mean = token_loss(model)

    def by_count(data: Any) -> Tensor:
        return token_loss(model, reduction="sum")(data) / total

    tokens = label_weight("labels")
    assert check(model, batch, mean, BatchCutter(parts=parts, weight=tokens)).exact
    assert check(model, batch, by_count, BatchCutter(parts=parts, weight=None)).exact

    neither = check(model, batch, mean, BatchCutter(parts=parts, weight=None))
    assert neither.error == pytest.approx(parts - 1)  # parts times the gradient
    assert "without a weight every sub-batch counts in full" in neither.causes[0]
    assert neither.advice == ["Write weight=row_weight."]  # as good as tokens, where every row has as many

    both = check(model, batch, by_count, BatchCutter(parts=parts, weight=tokens))
    assert both.error == pytest.approx(1 - 1 / parts)
    assert "divided by a count of its own" in both.causes[0]
    assert both.advice == ["Write weight=None."]


def test_b26_the_cause_is_called_the_denominator() -> None:
    model, batch = Tagger(), {"ids": torch.randint(1, WORDS, (2, 4))}
    batch["labels"] = torch.tensor([[-100, 7, -100, -100], [1, 2, 3, 4]])
    report = check(model, batch, token_loss(model, shifted=True), BatchCutter(rows=1))
    assert not report.exact
    assert "denominator" in report.causes[0]
    assert "weight=label_weight('labels', shifted=True)" in report.advice[0]


def test_b32_class_weights_of_the_report() -> None:
    model = nn.Linear(2, 2)
    batch = {"x": torch.tensor([[2.0, 0], [0, 1], [1, 0], [0, 3]]), "labels": torch.tensor([0, 0, 1, 1])}
    weights = torch.tensor([1.0, 9.0])

    def loss(data: Any) -> Tensor:
        return F.cross_entropy(model(data["x"]), data["labels"], weight=weights)

    def denominator(data: Any) -> Tensor:
        return weights[data["labels"]].sum()

    assert not check(model, batch, loss, BatchCutter(rows=2)).exact
    assert check(model, batch, loss, BatchCutter(rows=2, weight=denominator)).exact


def test_b14_layers_cut_as_rows() -> None:
    model = nn.LSTM(3, 4, num_layers=5, batch_first=True)
    batch = {"x": torch.randn(5, 7, 3), "h": torch.randn(5, 5, 4)}

    def loss(data: Any) -> Tensor:
        return model(data["x"], (data["h"], data["h"]))[0].square().mean()

    report = check(model, batch, loss, BatchCutter(rows=2))
    assert not report.exact
    assert report.causes[0].where == "h"
    assert check(model, batch, loss, BatchCutter(rows=2, layout={"h": axis(1)})).exact


def test_b35_one_pass_is_not_exact_and_cut_forward_is() -> None:
    report = check(*FAULTS["contrastive_loss"][2]())
    assert "coupled" in report.causes[0]
    assert any("CutForward" in advice for advice in report.advice)


def test_b38_plain_sums_in_bfloat16() -> None:
    report = check(*FAULTS["small_gradients_lost_in_bfloat16"][2](), rows=257)
    assert report.error == pytest.approx(1 / 3, rel=0.02)  # 1.0 for 1.5
    assert 'accumulate="float32"' in report.advice[0]


# ---- Padding


def test_b25_padding_is_seen_and_its_first_module_named() -> None:
    model = Positions()
    batch = {"ids": torch.tensor([[3, 4, 5, 6, 7], [0, 0, 0, 8, 9]])}
    batch["mask"] = (batch["ids"] != 0).float()
    report = check(model, batch, masked_square(model), BatchCutter(rows=1))
    assert report.exact  # padding is kept
    (note,) = report.notes
    assert "sensitive" in note
    assert "not sensitive" not in note
    assert "`position` (Embedding)" in note or "the model itself (Positions)" in note


def test_padding_seen_by_a_convolution() -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv = nn.Embedding(WORDS, 4), nn.Conv1d(4, 3, 3, padding=1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.conv(self.embed(ids).transpose(1, 2)).amax(2)

    model = Convolves()
    report = check(model, text(), lambda data: model(data["ids"]).square().mean(), BatchCutter(rows=3))
    assert report.exact
    assert "`conv` (Conv1d) is the first module whose real positions move" in report.notes[0]


@pytest.mark.parametrize("left", [False, True])
def test_padding_that_does_not_matter(left: bool) -> None:
    model, batch = Tagger(), text()
    if left:
        batch = {key: value.flip(1) for key, value in batch.items()}
    report = check(model, batch, token_loss(model), BatchCutter(rows=3, weight=label_weight("labels")))
    assert "not sensitive" in report.notes[0]
    assert "its own width of 2" in report.notes[0]


# ---- Everything is put back


class Everything(nn.Module):
    """Has of all that can be lent: tied and frozen parameters, buffers, lists, tensors, generators, RNN weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.out.weight = self.embed.weight
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.extra = nn.ParameterList([nn.Parameter(torch.randn(8))])
        self.register_buffer("mean", torch.zeros(8))
        self.lasting: Any = {"seen": [], "tensor": torch.zeros(2)}
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.lasting["seen"].append(self.calls)
        self.lasting["tensor"] += 1
        self.new = self.calls  # an attribute that was not there before
        hidden = self.norm(self.lstm(self.embed(ids))[0].transpose(1, 2)).transpose(1, 2)
        self.mean += hidden.detach().mean((0, 1))
        noise = torch.rand(8, generator=self.generator)
        return self.out(self.drop(hidden) + self.frozen + self.extra[0] + noise)


def remembered(model: Everything, optimizer: torch.optim.Optimizer, batch: Any) -> list[Any]:
    """All that a check may not change: the objects, where their numbers lie, and the numbers."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    tensors += [*batch.values(), model.lasting["tensor"]]
    attributes = [(name, key, id(v)) for name, m in model.named_modules() for key, v in vars(m).items()]
    inner = [
        (key, id(v)) for m in model.modules() for d in (m._parameters, m._buffers, m._modules) for key, v in d.items()
    ]
    states = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.get_default_dtype()]
    lasting = [copy.copy(model.lasting["seen"]), list(batch), model.generator.get_state().tolist()]
    kept = [(id(t), t.data_ptr(), t._version, t.dtype, t.requires_grad, t.tolist()) for t in tensors]
    return [kept, attributes, inner, states, lasting]


def everything() -> tuple[Everything, torch.optim.Optimizer, dict[str, Tensor]]:
    model, batch = Everything(), text()
    optimizer = torch.optim.Adam(model.parameters())
    token_loss(model)(batch).backward()
    optimizer.step()
    model.norm.eval()
    model.drop.train()
    return model, optimizer, batch


class Stop(BaseException):
    """Comes out of the middle of things, as Ctrl-C does."""


@pytest.mark.parametrize(
    ("stop_at", "after"),
    [(None, ""), (1, "forward"), (2, "forward"), (9, "forward"), (1, "backward"), (3, "backward"), (7, "backward")],
)
def test_everything_is_put_back(stop_at: int | None, after: str) -> None:
    model, optimizer, batch = everything()
    calls = 0

    def loss(data: Any) -> Tensor:
        nonlocal calls
        calls += 1
        random.random()
        np.random.rand()
        data["ids"] += 0 * data.pop("mask").long()  # writes into its data, and takes from it
        result = token_loss(model)(data)
        if stop_at is not None and calls >= stop_at:
            if after == "forward":
                raise Stop
            result.register_hook(_stop)
        return result

    before = remembered(model, optimizer, batch)
    if stop_at is None:
        report = check(model, batch, loss, BatchCutter(rows=3))
        assert not report.exact
    else:
        with pytest.raises(Stop):
            check(model, batch, loss, BatchCutter(rows=3))
    assert remembered(model, optimizer, batch) == before


def _stop(gradient: Tensor) -> None:
    raise Stop


def test_hooks_that_a_first_forward_installs_are_taken_off_again() -> None:
    class Installing(nn.Module):
        """As models do that collect the outputs of their layers."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.installed = nn.Linear(3, 1), False
            self.collected: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.installed:
                self.inner.register_forward_hook(lambda module, args, result: self.collected.append(result))
                self.installed = True
            return self.inner(x)

    model = Installing()
    check(model, numbers(), mse(model), BatchCutter(rows=3))
    assert not model.installed
    assert not model.inner._forward_hooks
    model(torch.rand(2, 3))
    assert len(model.collected) == 1


def test_what_was_not_put_back_would_be_seen() -> None:
    model, optimizer, batch = everything()
    for change in (
        lambda: model(batch["ids"]),
        lambda: model.frozen.data.add_(1),
        lambda: setattr(model.out, "bias", nn.Parameter(model.out.bias.data)),
        lambda: torch.rand(1),
        lambda: model.train(),
    ):
        before = remembered(model, optimizer, batch)
        change()
        assert remembered(model, optimizer, batch) != before


def test_an_error_in_a_sub_batch_is_a_finding_and_one_in_the_unsplit_batch_is_the_users() -> None:
    model, optimizer, batch = everything()

    def only(rows: int) -> Callable[[Any], Tensor]:
        def loss(data: Any) -> Tensor:
            result = token_loss(model)(data)
            if len(data["ids"]) != rows:
                raise RuntimeError("these are not all rows")
            return result

        return loss

    before = remembered(model, optimizer, batch)
    report = check(model, batch, only(ROWS), BatchCutter(rows=3))
    assert not report.exact
    assert report.error == float("inf")
    assert "these are not all rows" in str(report)
    with pytest.raises(RuntimeError, match="these are not all rows"):
        check(model, batch, only(ROWS - 1), BatchCutter(rows=3))
    assert remembered(model, optimizer, batch) == before


def test_optimizers_made_before_go_on_as_if_nothing_had_been() -> None:
    model, optimizer, batch = everything()
    twin = copy.deepcopy(model)
    other = torch.optim.Adam(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check(model, batch, token_loss(model), BatchCutter(rows=3))
    for one, its in ((model, optimizer), (twin, other)):
        torch.manual_seed(5)
        its.zero_grad()
        token_loss(one)(batch).backward()
        its.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_parameter_beside_the_model_is_compared_and_put_back() -> None:
    model, scale = mlp(), nn.Parameter(torch.ones(()))
    scale.grad = torch.tensor(7.0)
    loss = lambda data: (model(data["x"]) * scale - data["y"]).square().sum()  # noqa: E731
    report = check(model, numbers(), loss, BatchCutter(rows=3))
    assert any(name.startswith("(beside the model)") for name in report.gradients)
    assert scale.grad.item() == 7.0
    assert scale.dtype is torch.float32
    assert check(model, numbers(), loss, BatchCutter(rows=3, weight=None)).exact


def test_inside_of_distributed_data_parallel_nothing_is_reduced(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner, batch = mlp(), numbers()
        model = nn.parallel.DistributedDataParallel(inner)
        for _ in range(2):
            assert check(model, batch, mse(model), BatchCutter(rows=3)).exact
            mse(model)(batch).backward()  # raises where the reducer waits for gradients that never came
        assert all(p.grad is not None for p in inner.parameters())
    finally:
        torch.distributed.destroy_process_group()


# ---- The report


def test_the_report_is_a_page_for_people() -> None:
    page = str(check(*FAULTS["rows_for_shifted_tokens"][2]()))
    assert page.startswith("batchsplit check: NOT EXACT")
    for words in ("7 rows", "3 + 2 + 2", "float64", "gradients off", "Why", "What to do", "Also seen"):
        assert words in page
    assert max(map(len, page.splitlines())) <= 120


def test_a_report_can_be_copied() -> None:
    report = check(*FAULTS["batch_norm_1d"][2]())
    twin = copy.deepcopy(report)
    assert isinstance(twin, CheckReport)
    assert [(c, c.kind, c.where) for c in twin.causes] == [(c, c.kind, c.where) for c in report.causes]
    assert (report.causes[0].kind, report.causes[0].where) == ("module", "1")
    assert "GroupNorm" in report.advice[0]


def test_a_large_batch_is_checked_on_its_first_rows() -> None:
    model = mlp()
    assert check(model, numbers(100), mse(model), BatchCutter(rows=8)).rows == 32
    assert check(model, numbers(100), mse(model), BatchCutter(rows=8), rows=20).rows == 20


@pytest.mark.parametrize("cutter", [None, BatchCutter(), BatchCutter(rows=50), BatchCutter(rows="auto")])
def test_a_batch_that_stays_whole_is_cut_all_the_same(cutter: BatchCutter | None) -> None:
    model = mlp()
    report = check(model, numbers(), mse(model), cutter)
    assert report.exact
    assert len(report.sizes) > 1
    assert cutter is None or "leaves these 7 rows whole" in report.notes[0]


def test_fewer_rows_where_memory_is_short() -> None:
    model = mlp()

    def loss(data: Any) -> Tensor:
        if len(data["x"]) > 8:
            raise torch.OutOfMemoryError("no room for so many rows")
        return F.mse_loss(model(data["x"]), data["y"])

    report = check(model, numbers(32), loss, BatchCutter(rows=3))
    assert report.exact
    assert report.rows == 8
    assert "Memory was short" in report.notes[0]


class OnlyFloat32(torch.autograd.Function):
    """As a kernel that was written for one precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("no kernel for Double")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_what_has_no_float64_is_compared_as_it_is() -> None:
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return OnlyFloat32.apply(x)

    model = mlp(Custom())
    report = check(model, numbers(), mse(model), BatchCutter(rows=3))
    assert report.exact
    assert report.precision == "float32, tolerance 1e-05: float64 could not be run (no kernel for Double)"
    wrong = check(model, numbers(), mse(model, reduction="sum"), BatchCutter(rows=3))
    assert wrong.causes[0].kind == "weight"


def test_a_loss_of_several_terms_names_the_wrong_one_only() -> None:
    report = check(*FAULTS["one_term_of_two"][2]())
    assert [cause.where for cause in report.causes] == ["ce"]
    assert "weight={'ce': label_weight('labels'), ...}" in report.advice[0]


def test_two_faults_are_both_named() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, 1))
    report = check(model, numbers(), mse(model, reduction="sum"), BatchCutter(rows=3))
    assert {cause.kind for cause in report.causes} == {"weight", "randomness"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, b, f: (f, b, f), "torch.nn.Module first, not a function"),
        (lambda m, b, f: (m, {key: value[:1] for key, value in b.items()}, f), "a batch of one row can't be cut"),
        (lambda m, b, f: (m, b, lambda data: m(data["x"])), r"the loss is of shape \(7, 1\)"),
        (lambda m, b, f: (m, b, lambda data: 3.0), "the loss is a float"),
        (lambda m, b, f: (m, {**b, "odd": torch.rand(5)}, f), "odd"),
    ],
)
def test_what_can_not_be_checked_is_said(change: Callable[..., Any], words: str) -> None:
    model, batch = mlp(), numbers()
    model, batch, loss_fn = change(model, batch, mse(model))
    with pytest.raises(CutError, match=words):
        check(model, batch, loss_fn, BatchCutter(rows=3))


# ---- The command line


MODULE = """
import torch
from torch import nn
from batchsplit import BatchCutter

def given(reduction="mean"):
    model = nn.Linear(3, 1)
    batch = {"x": torch.rand(6, 3), "y": torch.rand(6, 1)}
    return model, batch, lambda data: nn.functional.mse_loss(model(data["x"]), data["y"], reduction=reduction)

def exact():
    return given()

def not_exact():
    return *given("sum"), BatchCutter(rows=2)

def broken():
    raise RuntimeError("no data today")

def nothing():
    return 3
"""


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("exact", 0, "batchsplit check: EXACT"),
        ("not_exact", 1, "Write weight=None."),
        ("broken", 2, "RuntimeError: no data today"),
        ("nothing", 2, "has to return (model, batch, loss_fn)"),
        ("missing", 2, "has no function 'missing'"),
    ],
)
def test_command(
    function: str,
    code: int,
    words: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"checked_{function}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", f"{name}:{function}"]) == code
    captured = capsys.readouterr()
    assert words in (captured.err if code == 2 else captured.out)


@pytest.mark.parametrize("written", ["no_colon", "no.such.module:f", ":f"])
def test_command_with_a_name_of_nothing(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", written]) == 2
    error = capsys.readouterr().err
    assert error.startswith("batchsplit check: error:")
    assert error.count("\n") == 1
