"""Named loss terms, each with a denominator of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchsplit import BatchCutter, CutError, StepDriver, label_weight, mask_weight, row_weight, run_step

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, WORDS = 6, 11
WEIGHTS = {"ce": label_weight("labels"), "aux": row_weight, "kl": mask_weight("mask"), "count": None, "l2": "once"}
Terms = dict[str, Tensor]


class Model(nn.Module):
    """Words in; a word and a number for each row out, and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.head, self.side = nn.Linear(5, WORDS), nn.Linear(5, 1)

    def terms(self, data: dict[str, Tensor]) -> Terms:
        x = self.words(data["ids"])
        side = self.side(x.mean(1))[:, 0]
        spread = (x**2).mean(-1)
        return {
            "ce": F.cross_entropy(self.head(x).flatten(0, 1), data["labels"].flatten()),
            "aux": F.mse_loss(side, data["score"]),
            "kl": (spread * data["mask"]).sum() / data["mask"].sum(),
            "count": 0.01 * side.exp().sum(),
            "l2": 0.1 * torch.stack([(p**2).sum() for p in self.parameters()]).sum(),
        }


def batch_of(rows: int = 10) -> dict[str, Tensor]:
    """Rows of very different weights: three have no target, three others an empty mask."""
    labels = torch.randint(WORDS, (rows, WIDTH))
    labels[torch.rand(rows, WIDTH) < 0.5] = -100
    labels[0, 0], labels[2:5] = 1, -100
    mask = torch.rand(rows, WIDTH)
    mask[1], mask[4], mask[rows - 1] = 0, 0, 0
    return {"ids": torch.randint(WORDS, (rows, WIDTH)), "labels": labels, "score": torch.randn(rows), "mask": mask}


def unsplit(model: Model, batch: dict[str, Tensor]) -> tuple[Terms, Tensor]:
    model = copy.deepcopy(model)
    terms = model.terms(batch)
    sum(terms.values(), torch.zeros(())).backward()
    return {name: term.detach() for name, term in terms.items()}, grads(model)


def grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def difference(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def driver_of(model: nn.Module, loss_fn: Callable[[Any], Any], cutter: BatchCutter) -> StepDriver:
    return StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, cutter, progress=False)


@pytest.mark.parametrize("sizes", ["even", "full"])
@pytest.mark.parametrize("rows", range(1, 12))
def test_every_term_has_its_own_denominator(rows: int, sizes: Any) -> None:
    model, batch = Model(), batch_of()
    terms, right = unsplit(model, batch)
    report = driver_of(model, model.terms, BatchCutter(rows, weight=WEIGHTS, sizes=sizes)).step(batch)
    assert difference(grads(model), right) < 1e-12
    assert list(report.terms) == list(terms)
    for name, term in terms.items():
        assert report.terms[name].item() == pytest.approx(term.item(), rel=1e-12), name
        assert not report.terms[name].requires_grad
    assert report.loss.item() == pytest.approx(sum(term.item() for term in terms.values()), rel=1e-12)

    model.zero_grad()
    loss = run_step(BatchCutter(rows, weight=WEIGHTS, sizes=sizes).cut(batch), model.terms, model=model)
    assert difference(grads(model), right) < 1e-12 and torch.equal(loss, report.loss)


@pytest.mark.parametrize(
    "wrong",
    [{"ce": row_weight}, {"aux": label_weight("labels")}, {"kl": row_weight}, {"count": row_weight}, {"l2": None}],
    ids=str,
)
def test_a_wrong_weight_of_one_term_shows(wrong: dict[str, Any]) -> None:
    model, batch = Model(), batch_of()
    batch["labels"][2:5, 0], batch["mask"][:, 0] = 1, 1.0  # no means over nothing, which would be another error
    _, right = unsplit(model, batch)
    run_step(BatchCutter(3, weight={**WEIGHTS, **wrong}).cut(batch), model.terms, model=model)
    assert difference(grads(model), right) > 1e-3


def test_one_weight_for_all_terms() -> None:
    model, batch = Model(), batch_of()

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        return {"aux": model.terms(data)["aux"], "size": model.words(data["ids"]).mean()}

    sum(loss_fn(batch).values(), torch.zeros(())).backward()
    right, terms = grads(model), loss_fn(batch)
    report = driver_of(model, loss_fn, BatchCutter(3)).step(batch)
    assert difference(grads(model), right) < 1e-12
    assert {n: t.item() for n, t in report.terms.items()} == pytest.approx({n: t.item() for n, t in terms.items()})


def test_shares_are_a_mapping() -> None:
    cut = BatchCutter(rows=4, weight=WEIGHTS).cut(batch := batch_of())
    tokens = [(sub.data["labels"] != -100).sum().item() for sub in cut]
    assert [sub.share["ce"] for sub in cut] == [n / sum(tokens) for n in tokens]
    assert [sub.weight["ce"] for sub in cut] == tokens and cut.weight["ce"] == sum(tokens)
    assert [sub.share["aux"] for sub in cut] == [0.4, 0.3, 0.3]
    assert [sub.share["count"] for sub in cut] == [1.0, 1.0, 1.0] and cut.weight["count"] is None
    assert math.fsum(sub.share["l2"] for sub in cut) == 1.0
    assert cut.weight["kl"] == pytest.approx(batch["mask"].sum().item())


def test_a_term_without_weight_is_an_error() -> None:
    model = Model()
    weights = {name: weight for name, weight in WEIGHTS.items() if name != "kl"}
    with pytest.raises(CutError, match=r'the loss term "kl" has no weight: add it to weight=\{\.\.\.\}'):
        run_step(BatchCutter(3, weight=weights).cut(batch_of()), model.terms, model=model)
    assert all(p.grad is None for p in model.parameters())


def test_a_weight_without_a_term_is_an_error() -> None:
    model = Model()
    cut = BatchCutter(3, weight={**WEIGHTS, "klx": None}).cut(batch_of())
    with pytest.raises(CutError, match=r"\"klx\" that loss_fn did not return; it returned \['aux', 'ce'"):
        run_step(cut, model.terms, model=model)
    assert all(p.grad is None for p in model.parameters())


def test_one_loss_for_several_weights_is_an_error() -> None:
    model = Model()
    cut = BatchCutter(3, weight=WEIGHTS).cut(batch_of())
    with pytest.raises(CutError, match=r"names the terms \['aux', .*but loss_fn returned one loss: return a mapping"):
        run_step(cut, lambda data: model.terms(data)["aux"], model=model)


def test_terms_that_vary_between_sub_batches_are_an_error() -> None:
    model = Model()

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        terms = model.terms(data)
        kept = ["aux", "count"] if len(data["ids"]) == 4 else ["aux"]
        return {name: terms[name] for name in kept}

    cut = BatchCutter(rows=4, weight=None).cut(batch_of())
    with pytest.raises(CutError, match=r"returned the terms \['aux'\] for SubBatch\(2 of 3.*\['aux', 'count'\] before"):
        run_step(cut, loss_fn, model=model)
    assert all(p.grad is None for p in model.parameters())


def test_terms_in_another_order_are_the_same_terms() -> None:
    model, batch = Model(), batch_of()
    terms, right = unsplit(model, batch)

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        items = list(model.terms(data).items())
        return dict(items if len(data["ids"]) == 4 else items[::-1])

    report = driver_of(model, loss_fn, BatchCutter(rows=4, weight=WEIGHTS)).step(batch)
    assert difference(grads(model), right) < 1e-12
    for name, term in terms.items():
        assert report.terms[name].item() == pytest.approx(term.item(), rel=1e-12), name


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_a_term_over_nothing_in_the_whole_batch_is_an_error(name: str) -> None:
    model, batch = Model(), batch_of()
    if name == "ce":
        batch["labels"].fill_(-100)
    else:
        batch["mask"].zero_()
    before = copy.deepcopy(model.state_dict())
    driver = StepDriver(model, torch.optim.SGD(model.parameters(), lr=1.0), model.terms, BatchCutter(3, weight=WEIGHTS))
    with pytest.raises(CutError, match=rf'term "{name}".*of the whole batch is 0.*0/0'):
        driver.step(batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_weight_names_its_term() -> None:
    cut = BatchCutter(3, weight={**WEIGHTS, "kl": lambda data: -1.0}).cut(batch_of())
    with pytest.raises(CutError, match=r'term "kl".*of sub-batch 0 is -1\.0'):
        _ = cut[0].share
    cut = BatchCutter(3, weight={**WEIGHTS, "ce": label_weight("label")}).cut(batch_of())
    with pytest.raises(CutError, match=r'term "ce".*finds no such leaf'):
        _ = cut[0].share


def test_a_term_that_is_nan_is_named() -> None:
    model, batch = Model(), batch_of()
    batch["score"][9] = torch.nan
    with pytest.raises(CutError, match=r'the term "aux" is nan in SubBatch\(3 of 3'):
        run_step(BatchCutter(rows=4, weight=WEIGHTS).cut(batch), model.terms, model=model)
    assert all(p.grad is None for p in model.parameters())


def test_a_term_that_is_no_scalar_is_named() -> None:
    model = Model()
    cut = BatchCutter(rows=4).cut(batch_of())
    with pytest.raises(CutError, match=r'the term "aux" of sub-batch 0 has shape \(4,\)'):
        run_step(cut, lambda data: {"aux": model.side(model.words(data["ids"]).mean(1))[:, 0]}, model=model)
    with pytest.raises(CutError, match='the term "aux" of sub-batch 0 is a float'):
        run_step(cut, lambda data: {"aux": 1.0}, model=model)


def test_a_term_without_gradient_is_reported_and_no_more() -> None:
    model, batch = Model(), batch_of()
    weights = {"aux": row_weight, "seen": row_weight}

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        aux = model.terms(data)["aux"]
        return {"aux": aux, "seen": aux.detach()}

    loss_fn(batch)["aux"].backward()
    right, whole = grads(model), loss_fn(batch)["aux"].item()
    report = driver_of(model, loss_fn, BatchCutter(3, weight=weights)).step(batch)
    assert difference(grads(model), right) < 1e-12
    assert report.terms["seen"].item() == pytest.approx(whole, rel=1e-12)


def test_outputs_beside_terms() -> None:
    model, batch = Model(), batch_of()
    terms, right = unsplit(model, batch)

    def loss_fn(data: dict[str, Tensor]) -> tuple[Terms, dict[str, Tensor]]:
        return model.terms(data), {"side": model.side(model.words(data["ids"]).mean(1))}

    _, expected = loss_fn(batch)
    report = driver_of(model, loss_fn, BatchCutter(3, weight=WEIGHTS)).step(batch)
    torch.testing.assert_close(report.outputs["side"], expected["side"].detach(), rtol=1e-12, atol=1e-12)
    assert difference(grads(model), right) < 1e-12 and not report.outputs["side"].requires_grad
    assert report.terms["ce"].item() == pytest.approx(terms["ce"].item(), rel=1e-12)


def test_whole_weights_by_term() -> None:
    """As on a rank of two that holds half of all the tokens: the means are over all of them."""
    model, batch = Model(), batch_of()
    tokens = (batch["labels"] != -100).sum().item()
    terms, _ = unsplit(model, batch)
    cutter = BatchCutter(3, weight={"ce": WEIGHTS["ce"], "aux": row_weight})
    cut = cutter.cut(batch, whole_weight={"ce": torch.tensor(2 * tokens)})

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        found = model.terms(data)
        return {"ce": found["ce"], "aux": found["aux"]}

    loss = run_step(cut, loss_fn, model=model)
    assert loss.item() == pytest.approx(terms["ce"].item() / 2 + terms["aux"].item(), rel=1e-12)
    with pytest.raises(CutError, match=r"whole_weight names \['kl'\], which have no weight"):
        cutter.cut(batch, whole_weight={"kl": 3})
    with pytest.raises(CutError, match="mapping by term exactly when weight is one"):
        cutter.cut(batch, whole_weight=3)


def test_what_runs_last_has_every_term() -> None:
    """With ranks, the last sub-batch carries the gradient reduction, which waits for all parameters."""
    model, batch = Model(), batch_of()
    _, right = unsplit(model, batch)
    seen: list[dict[str, Tensor]] = []

    def loss_fn(data: dict[str, Tensor]) -> Terms:
        seen.append(data)
        return model.terms(data)

    held: Any = torch.enable_grad  # any context will do
    run_step(BatchCutter(rows=1, weight=WEIGHTS).cut(batch), loss_fn, model=model, sync=held)
    assert batch["mask"][-1].sum() == 0 and seen[-1]["mask"].sum() > 0 and (seen[-1]["labels"] != -100).any()
    assert difference(grads(model), right) < 1e-12
