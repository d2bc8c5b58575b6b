"""The matrix: gradients, loss and stepped parameters of a cut batch equal the unsplit batch's, in float64 to 1e-12.

Losses × cut sizes × containers × optimizers. A wrong way (the mean of the sub-batches' means) is pinned below, so that
the comparison is known to be able to fail.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchsplit import BatchCutter, CutError, StepDriver, label_weight, mask_weight, row_weight, run_step

pytestmark = pytest.mark.usefixtures("float64")

ROWS, WIDTH, WORDS = 7, 6, 11
TOLERANCE = 1e-12


class Encoding(UserDict):
    """As transformers' BatchEncoding: a UserDict with attributes of its own."""

    def __init__(self, data: dict[str, Any], source: str = "") -> None:
        super().__init__(data)
        self.source = source


@dataclass(frozen=True)
class Example:
    ids: Tensor
    labels: Tensor
    mask: Tensor
    target: Tensor


FIELDS = ("ids", "labels", "mask", "target")

CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any, str], Tensor]]] = {
    "dict": (dict, lambda batch, name: batch[name]),
    "tuple": (lambda **leaves: tuple(leaves.values()), lambda batch, name: batch[FIELDS.index(name)]),
    "UserDict": (lambda **leaves: Encoding(leaves, source="a tokenizer"), lambda batch, name: batch[name]),
    "dataclass": (Example, getattr),
}


class Reader(nn.Module):
    """Sees its padding: an unmasked convolution and max-pool, a bidirectional LSTM that reads through it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.conv = nn.Conv1d(5, 6, 3, padding=1)
        self.lstm = nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.words = nn.Linear(8, WORDS)
        self.value = nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.conv(self.embed(ids).transpose(1, 2)))
        states, _ = self.lstm(hidden.transpose(1, 2))
        return self.words(states), self.value(hidden.amax(2)).squeeze(1)


def example(rows: int = ROWS) -> dict[str, Tensor]:
    lengths = torch.randint(1, WIDTH + 1, (rows,))
    lengths[0] = WIDTH
    mask = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(1, WORDS, (rows, WIDTH)) * mask
    labels = torch.where(mask & (torch.rand(rows, WIDTH) < 0.7), ids, -100)
    labels[0, 0] = ids[0, 0]
    labels[-1] = -100  # a row without a target, as it happens
    return {"ids": ids, "labels": labels, "mask": mask.double() * torch.rand(rows, WIDTH), "target": torch.randn(rows)}


Get = Callable[[Any, str], Tensor]


def mean_over_rows(model: Reader, get: Get) -> Callable[[Any], Tensor]:
    return lambda batch: ((model(get(batch, "ids"))[1] - get(batch, "target")) ** 2).mean()


def mean_over_tokens(model: Reader, get: Get) -> Callable[[Any], Tensor]:
    def loss(batch: Any) -> Tensor:
        labels = get(batch, "labels")
        chosen = labels != -100
        logp = model(get(batch, "ids"))[0].log_softmax(-1)
        picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(picked * chosen).sum() / chosen.sum()  # 0/0 where no label counts: NaN, in its gradient too

    return loss


def mean_over_mask(model: Reader, get: Get) -> Callable[[Any], Tensor]:
    def loss(batch: Any) -> Tensor:
        mask = get(batch, "mask")
        energy = model(get(batch, "ids"))[0].logsumexp(-1)
        return (energy * mask).sum() / mask.sum()

    return loss


def sum_over_all(model: Reader, get: Get) -> Callable[[Any], Tensor]:
    return lambda batch: ((model(get(batch, "ids"))[1] - get(batch, "target")) ** 2).sum()


LOSSES: dict[str, tuple[Callable[[Reader, Get], Callable[[Any], Tensor]], Callable[[str], Any]]] = {
    "mean over rows": (mean_over_rows, lambda container: row_weight),
    "target tokens": (mean_over_tokens, lambda container: label_weight(path("labels", container))),
    "mask": (mean_over_mask, lambda container: mask_weight(path("mask", container))),
    "sum": (sum_over_all, lambda container: None),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def path(name: str, container: str) -> str:
    return str(FIELDS.index(name)) if container == "tuple" else name


def relative(found: Any, right: Any) -> float:
    """The largest difference, relative to the largest value that is right."""
    differences = [(a - b).detach().abs().max() for a, b in zip(found, right, strict=True)]
    size = max(b.detach().abs().max() for b in right)
    return float(max(differences) / size)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("size", [1, 2, 3, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("loss", LOSSES)
def test_split_equals_unsplit(loss: str, size: int, container: str, optimizer: str) -> None:
    build, get = CONTAINERS[container]
    make_loss, weight = LOSSES[loss]
    batches = [build(**example()) for _ in range(2)]
    whole = Reader()
    cut_model = copy.deepcopy(whole)
    cutter = BatchCutter(rows=size, weight=weight(container))

    whole_loss = make_loss(whole, get)(batches[0])
    whole_loss.backward()
    found = run_step(cutter.cut(batches[0]), make_loss(cut_model, get), model=cut_model)
    assert abs(found - whole_loss) <= TOLERANCE * abs(whole_loss)
    assert relative(gradients(cut_model), gradients(whole)) <= TOLERANCE

    # two optimizer steps, so that momentum and second moments take part
    whole_optimizer = OPTIMIZERS[optimizer](whole.parameters())
    driver = StepDriver(cut_model, OPTIMIZERS[optimizer](cut_model.parameters()), make_loss(cut_model, get), cutter)
    for batch in batches:
        whole_optimizer.zero_grad()
        whole_loss = make_loss(whole, get)(batch)
        whole_loss.backward()
        whole_optimizer.step()
        report = driver.step(batch)
        assert abs(report.loss - whole_loss) <= TOLERANCE * abs(whole_loss)
    assert relative(list(cut_model.parameters()), list(whole.parameters())) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 3, ROWS - 1])
@pytest.mark.parametrize("loss", ["target tokens", "mask"])
def test_mean_of_means_is_another_gradient(loss: str, size: int) -> None:
    """What `loss / accumulation_steps` does: the matrix above would notice."""
    make_loss, _ = LOSSES[loss]
    batch = example()
    batch["labels"][:, 0] = batch["ids"][:, 0]  # a target in every row, so that no mean is 0/0
    batch["mask"][:, 0] += 0.5
    batch["mask"][-1] *= 0.01  # the last row hardly counts, but has a mean of its own
    whole, wrong = Reader(), Reader()
    wrong.load_state_dict(whole.state_dict())
    make_loss(whole, CONTAINERS["dict"][1])(batch).backward()
    cut = BatchCutter(rows=size).cut(batch)
    for sub in cut:
        (make_loss(wrong, CONTAINERS["dict"][1])(sub.data) / len(cut)).backward()
    assert relative(gradients(wrong), gradients(whole)) > 1e6 * TOLERANCE


def test_separately_padded_accumulation_is_another_gradient() -> None:
    """What trainers do: each half trimmed to its own longest row."""
    batch = example()
    batch["ids"][1:, 4:] = 0  # the last rows are short
    whole, wrong = Reader(), Reader()
    wrong.load_state_dict(whole.state_dict())
    make_loss, get = mean_over_rows, CONTAINERS["dict"][1]
    make_loss(whole, get)(batch).backward()
    for rows, width in ((slice(0, 3), WIDTH), (slice(3, 7), 4)):
        part = {"ids": batch["ids"][rows, :width], "target": batch["target"][rows]}
        (make_loss(wrong, get)(part) * (len(part["target"]) / ROWS)).backward()
    assert relative(gradients(wrong), gradients(whole)) > 1e-3


def test_b25_left_padding_and_learned_positions() -> None:
    """Rows keep the batch's padding, so a model that is wrong about padding is wrong in the same way."""
    ids = torch.randint(1, WORDS, (2, 5))
    ids[1, :3] = 0
    model = nn.ModuleDict({"word": nn.Embedding(WORDS, 4), "place": nn.Embedding(5, 4), "out": nn.Linear(4, 1)})

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        hidden = model["word"](data["ids"]) + model["place"](torch.arange(data["ids"].shape[1]))
        return model["out"](torch.tanh(hidden)).mean()

    loss_fn({"ids": ids}).backward()
    right = gradients(model)
    model.zero_grad()
    cut = BatchCutter(rows=1).cut({"ids": ids})
    assert [sub.data["ids"].shape[1] for sub in cut] == [5, 5]
    run_step(cut, loss_fn, model=model)
    assert relative(gradients(model), right) <= TOLERANCE
    model.zero_grad()
    (loss_fn({"ids": ids[:1]}) / 2).backward()
    (loss_fn({"ids": ids[1:, 3:]}) / 2).backward()  # trimmed to its own length
    assert relative(gradients(model), right) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_b26_causal_language_model(size: int) -> None:
    """A mean over shifted targets."""
    ids = torch.randint(1, WORDS, (4, 5))
    labels = torch.where(torch.rand(4, 5) < 0.5, ids, -100)
    labels[:, 1] = ids[:, 1]
    labels[2] = -100
    labels[2, 0] = ids[2, 0]  # counts only where nothing is shifted
    embed = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        logits = embed(data["ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), data["labels"][:, 1:].flatten())

    batch = {"ids": ids, "labels": labels}
    whole_loss = loss_fn(batch)
    whole_loss.backward()
    right = gradients(embed)
    embed.zero_grad()
    cutter = BatchCutter(rows=size, weight=label_weight("labels", shifted=True))
    found = run_step(cutter.cut(batch), loss_fn, model=embed)
    assert relative(gradients(embed), right) <= TOLERANCE and abs(found - whole_loss) <= TOLERANCE
    embed.zero_grad()
    if size < 4:
        wrong = BatchCutter(rows=size, weight=label_weight("labels")).cut(batch)
        if size == 1:  # row 2 has a label, but no target: 0/0, where the weight says 1
            with pytest.raises(CutError, match=r"the loss is nan in SubBatch\(3 of 4, 1 row, 2:3\)"):
                run_step(wrong, loss_fn, model=embed)
        else:
            run_step(wrong, loss_fn, model=embed)
            assert relative(gradients(embed), right) > 1e-3


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 3]])
def test_b32_class_weighted_cross_entropy(sizes: list[int]) -> None:
    """The denominator is the sum of the class weights of the labels seen; the mean of means even has the other sign."""
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
    labels = torch.tensor([0, 0, 1, 1])
    weights = torch.tensor([1.0, 9.0])
    bias = nn.Parameter(torch.zeros(2))

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(data["logits"] + bias, data["labels"], weight=weights)

    cutter = BatchCutter(rows=max(sizes), sizes="full", weight=lambda data: weights[data["labels"]].sum())
    batch = {"logits": logits, "labels": labels}
    if sizes == [1, 3]:
        batch = {name: leaf.flip(0) for name, leaf in batch.items()}  # cut 3|1, from the other end
    cut = cutter.cut(batch)
    loss = run_step(cut, loss_fn)
    assert loss == pytest.approx(0.68484, abs=1e-5)
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.tensor([0.30781, -0.30781]), atol=1e-5, rtol=0)
    if sizes == [2, 2]:
        assert [sub.share for sub in cut] == [0.1, 0.9]
        bias.grad = None
        mean_of_means = run_step(BatchCutter(rows=2).cut(batch), loss_fn)
        assert mean_of_means == pytest.approx(0.70051, abs=1e-5)
        torch.testing.assert_close(bias.grad, torch.tensor([-0.01794, 0.01794]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize(("classes", "smoothing"), [([1.0, 3.0, 0.5], 0.1), ([1.0, 3.0, 0.0], 0.0)])
def test_b32_smoothing_ignored_labels_and_a_class_of_weight_zero(rows: int, classes: list[float], smoothing: float) -> None:
    labels = torch.tensor([0, 2, -100, 1, 2, 2])  # cut in twos or ones, the last part holds class 2 alone
    weights = torch.tensor(classes)
    linear = nn.Linear(4, 3)

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(linear(data["x"]), data["labels"], weight=weights, label_smoothing=smoothing)

    def weight(data: dict[str, Tensor]) -> Tensor:
        return weights[data["labels"][data["labels"] != -100]].sum()

    batch = {"x": torch.randn(6, 4), "labels": labels}
    whole_loss = loss_fn(batch)
    whole_loss.backward()
    right = gradients(linear)
    linear.zero_grad()
    found = run_step(BatchCutter(rows=rows, weight=weight).cut(batch), loss_fn, model=linear)
    assert relative(gradients(linear), right) <= TOLERANCE and abs(found - whole_loss) <= TOLERANCE
