"""Sub-batches of one size: filler rows leave no trace, and where they would, the cut is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

from batchsplit import (
    BatchCutter,
    Cut,
    CutError,
    StepDriver,
    axis,
    group,
    join,
    label_weight,
    mask_weight,
    packed,
    run_step,
)

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, WORDS = 5, 11


def texts(rows: int, width: int = WIDTH) -> dict[str, Tensor]:
    labels = torch.randint(WORDS, (rows, width))
    labels[torch.rand(rows, width) < 0.3] = -100
    labels[:, 1] = 3  # some target in each row
    return {"ids": torch.randint(WORDS, (rows, width)), "labels": labels, "mask": torch.rand(rows, width) + 0.1}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.mix = nn.GRU(6, 7, batch_first=True)
        self.out = nn.Linear(7, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.words(ids))[0])


def by_labels(model: nn.Module) -> Any:
    return lambda data: cross_entropy(model(data["ids"]).flatten(0, 1), data["labels"].flatten())


def by_shifted_labels(model: nn.Module) -> Any:
    def loss(data: Any) -> Tensor:
        return cross_entropy(model(data["ids"])[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten())

    return loss


def by_mask(model: nn.Module) -> Any:
    def loss(data: Any) -> Tensor:
        return (model(data["ids"]).square().mean(-1) * data["mask"]).sum() / data["mask"].sum()

    return loss


def both(model: Any) -> Any:
    return lambda data: {
        "ce": by_labels(model)(data),
        "size": by_mask(model)(data),
        "l2": model.out.weight.square().sum(),
    }


def over_rows(model: nn.Module) -> Any:
    return lambda data: model(data["ids"]).square().mean()


LOSSES = [
    pytest.param(by_labels, label_weight("labels"), id="labels"),
    pytest.param(by_shifted_labels, label_weight("labels", shifted=True), id="shifted"),
    pytest.param(by_mask, mask_weight("mask"), id="mask"),
    pytest.param(both, {"ce": label_weight("labels"), "size": mask_weight("mask"), "l2": "once"}, id="terms"),
]


def difference(loss_of: Any, cut: Cut) -> float:
    """Largest relative difference of loss and gradients from the unsplit batch."""
    model = Tagger()
    whole = copy.deepcopy(model)
    found: Any = loss_of(whole)(cut.batch)
    loss: Any = sum(found.values()) if isinstance(found, dict) else found
    loss.backward()
    found = run_step(cut, loss_of(model), model=model)
    pairs = [(found, loss.detach()), *((p.grad, q.grad) for p, q in zip(model.parameters(), whole.parameters()))]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("limit", [{"rows": 4}, {"rows": 16}, {"area": 4 * WIDTH}, {"parts": 3}, {"parts": 7}], ids=str)
@pytest.mark.parametrize(("loss_of", "weight"), LOSSES)
def test_filler_rows_leave_no_trace(loss_of: Any, weight: Any, limit: Any) -> None:
    cut = BatchCutter(**limit, weight=weight, sizes="equal").cut(texts(10))
    assert len({len(sub.data["ids"]) for sub in cut}) == 1
    assert sum(sub.rows for sub in cut) == 10 and cut[-1].filler > 0
    assert difference(loss_of, cut) < 1e-12


def test_filler_rows_that_count_are_seen() -> None:
    cut = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal").cut(texts(10))
    assert difference(over_rows, cut) > 1e-3, "this loss counts all rows, filler too"


@pytest.mark.parametrize("weight", [label_weight("labels"), mask_weight("mask")])
def test_gradient_of_filler_is_exactly_nothing(weight: Any) -> None:
    model = Tagger()
    cut = BatchCutter(rows=8, weight=weight, sizes="equal").cut(texts(3))
    reached: list[Tensor] = []

    def note(module: nn.Module, args: Any, words: Tensor) -> None:
        words.register_hook(reached.append)

    model.words.register_forward_hook(note)
    run_step(cut, (by_labels if weight.path == "labels" else by_mask)(model), model=model)
    assert (reached[0][3:] == 0).all() and (reached[0][:3] != 0).any()


def test_nothing_of_the_batch_is_written_to() -> None:
    batch = texts(6)
    before = copy.deepcopy(batch)
    cut = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal").cut(batch)
    assert [len(sub.data["labels"]) for sub in cut] == [4, 4]
    assert (cut[1].data["labels"][2:] == -100).all() and torch.equal(cut[1].data["ids"][2:], batch["ids"][[5, 5]])
    assert all(torch.equal(a, b) for a, b in zip(join(cut).values(), before.values()))
    assert cut[0].data["ids"].data_ptr() == batch["ids"].data_ptr(), "full sub-batches are views as ever"


def test_join_drops_filler() -> None:
    batch = texts(7)
    cut = BatchCutter(rows=3, weight=label_weight("labels"), sizes="equal").cut(batch)
    joined = cut.join([{"twice": sub.data["ids"] * 2, "names": [f"{i}" for i in range(3)], "n": 1} for sub in cut])
    assert torch.equal(joined["twice"], batch["ids"] * 2)
    assert joined["names"] == ["0", "1", "2", "0", "1", "2", "0"] and joined["n"] == 1


def test_driver_reports_outputs_of_real_rows() -> None:
    model, batch = Tagger(), texts(10)
    expected = model(batch["ids"]).detach()

    def loss_fn(data: Any) -> Any:
        logits = model(data["ids"])
        return cross_entropy(logits.flatten(0, 1), data["labels"].flatten()), logits

    cutter = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal")
    report = StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, cutter).step(batch)
    assert report.rows == 10 and report.sub_batches == 3
    torch.testing.assert_close(report.outputs, expected, rtol=1e-12, atol=1e-12)


def test_a_group_is_filled_up_batch_by_batch() -> None:
    (both_batches,) = group([texts(5), texts(6, width=7)], batches=2)
    cut = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal").cut(both_batches)
    assert [tuple(sub.data["ids"].shape) for sub in cut] == [(4, 5), (4, 5), (4, 7), (4, 7)]
    assert [sub.filler for sub in cut] == [0, 3, 0, 2] and math.fsum(sub.share for sub in cut) == pytest.approx(1)


def test_kinds_of_leaves_are_filled_up() -> None:
    batch = texts(5) | {
        "times": torch.rand(3, 5, 2),
        "names": list("abcde"),
        "array": np.arange(10.0).reshape(5, 2),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.rand(n, 2) for n in (4, 2, 3, 1, 2)], enforce_sorted=False),
        "images": torch.tensor([1, 0, 2, 1, 2]),
        "pixels": torch.arange(1, 7),
        "causal": torch.rand(1, 5),
    }
    layout = {"times": axis(1), "pixels": packed("images")}
    data = BatchCutter(rows=3, weight=label_weight("labels"), sizes="equal", layout=layout).cut(batch)[1].data
    assert data["times"].shape == (3, 3, 2) and torch.equal(data["times"][:, 2], batch["times"][:, 4])
    assert data["names"] == ["d", "e", "e"]
    assert data["array"].tolist() == [[6, 7], [8, 9], [8, 9]]
    assert data["images"].tolist() == [1, 2, 2] and data["pixels"].tolist() == [4, 5, 6, 5, 6]
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(data["packed"], batch_first=True)
    assert lengths.tolist() == [1, 2, 2] and torch.equal(padded[1], padded[2])
    assert data["causal"] is batch["causal"]


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (None, 'sizes="equal" with weight=None: .* would count the filler too'),
        ("row", 'sizes="equal" with weight=row_weight: .* weight=mask_weight\\("ones"\\); or write sizes="even"'),
        ("once", "weight=once"),
        (lambda data: 1, "weight=<lambda>"),
        (mask_weight("attention_mask"), "attends to nothing .* a mask of its own"),
        ({"ce": label_weight("labels"), "l2": None}, "weight=None"),
        (label_weight("labels.x"), 'marked in "labels.x", which is no tensor with rows'),
        ({"a": label_weight("labels"), "b": label_weight("labels", ignore_index=0)}, "counted in two ways"),
    ],
)
def test_what_can_not_be_exact_is_refused(weight: Any, words: str) -> None:
    chosen = {} if weight == "row" else {"weight": weight}
    cutter = BatchCutter(rows=4, sizes="equal", **chosen)
    with pytest.raises(CutError, match=words):
        cutter.cut(texts(10))
    if weight != "once":
        assert [sub.filler for sub in cutter.cut(texts(8))] == [0, 0], "where nothing is to be filled up, all is well"


def test_ones_for_a_mean_over_rows() -> None:
    """The way out that the error names."""

    def rows_by_ones(model: nn.Module) -> Any:
        def loss(data: Any) -> Tensor:
            return (model(data["ids"]).square().mean((1, 2)) * data["ones"]).sum() / data["ones"].sum()

        return loss

    batch = texts(10) | {"ones": torch.ones(10)}
    assert difference(rows_by_ones, BatchCutter(rows=4, sizes="equal", weight=mask_weight("ones")).cut(batch)) < 1e-12


def test_leaves_that_can_not_be_filled_up() -> None:
    def cut(layout: Any, **more: Any) -> Cut:
        return BatchCutter(rows=3, weight=label_weight("labels"), sizes="equal", layout=layout).cut(texts(5) | more)

    with pytest.raises(CutError, match=r"batch\['table'\] \(cut by your function, as declared\) can't be filled up"):
        _ = cut({"table": lambda leaf, rows: leaf[rows]}, table=torch.rand(5))[1].data
    offsets = torch.tensor([0, 1, 3, 4, 6, 7])
    with pytest.raises(CutError, match=r"batch\['offsets'\].* can't be filled up"):
        _ = cut({"offsets": packed("lengths")}, lengths=torch.tensor([1, 2, 1, 2, 1]), offsets=offsets)[1].data


def test_arguments() -> None:
    settings: list[dict[str, Any]] = [{}, {"rows": "auto"}, {"area": "auto"}]
    for more in settings:
        with pytest.raises(CutError, match='sizes="equal" wants to know the size: give rows='):
            BatchCutter(sizes="equal", **more)
    with pytest.raises(CutError, match='write sizes="even" or sizes="full", or sizes="equal"'):
        BatchCutter(rows=2, sizes="same")  # type: ignore[arg-type]
    cut = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal").cut(texts(10))
    with pytest.raises(CutError, match="filler rows have no random numbers"):
        run_step(cut, by_labels(Tagger()), randomness="whole")
    assert "8:10 + 2 filler" in cut.explain()


def test_out_of_memory_with_filler() -> None:
    """Even one real row has not failed by itself, while filler was beside it."""
    model, batch = Tagger(), texts(9)
    whole = copy.deepcopy(model)
    by_labels(whole)(batch).backward()
    seen: list[int] = []

    def loss_fn(data: Any) -> Tensor:
        seen.append(len(data["ids"]))
        if len(data["ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return by_labels(model)(data)

    cutter = BatchCutter(rows=8, weight=label_weight("labels"), sizes="equal")
    driver = StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, cutter, on_oom="split")
    report = driver.step({name: value[:9] for name, value in batch.items()})
    assert max(seen[-report.sub_batches :]) <= 3
    one = driver.step({name: value[:1] for name, value in batch.items()})
    assert one.rows == one.sub_batches == 1
    driver.step(batch)
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_shapes() -> None:
    cutter = BatchCutter(rows=4)
    assert cutter.shapes == []
    for rows in (10, 9, 8, 10):
        cutter.cut(texts(rows))
    assert cutter.shapes == [(4, WIDTH), (3, WIDTH)]
    cutter.cut(texts(4, width=9))
    assert cutter.shapes == [(4, WIDTH), (3, WIDTH), (4, 9)]
    images = BatchCutter(rows=2)
    images.cut((torch.rand(4, 3, 8, 8), torch.arange(4)))
    assert images.shapes == [(2, 3, 8)]
    times = BatchCutter(rows=2, layout={"x": axis(1)})
    times.cut({"x": torch.rand(7, 4, 3)})
    assert times.shapes == [(2, 7, 3)]


@pytest.mark.parametrize("rows", [10, 11, 12, 13, 100])
def test_even_sizes_are_of_two_shapes_at_most(rows: int) -> None:
    cutter = BatchCutter(rows=4)
    cutter.cut(texts(rows))
    assert len(cutter.shapes) <= 2


def compiled_graphs(sizes: Any) -> tuple[int, int]:
    """How many graphs are compiled for batches of several lengths, and how many shapes the cutter reports."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))
    compiled: Any = torch.compile(model, backend=counter, dynamic=False)
    cutter = BatchCutter(rows=4, weight=label_weight("labels"), sizes=sizes)
    driver = StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.1), by_labels(compiled), cutter)
    for rows in (12, 10, 5, 3):
        driver.step(texts(rows))
    return counter.frame_count, len(cutter.shapes)


def test_equal_sizes_are_one_graph() -> None:
    assert compiled_graphs("equal") == (1, 1)


def test_other_sizes_are_several_graphs() -> None:
    """12, 10, 5 and 3 rows, at most 4 at a time."""
    assert compiled_graphs("full") == (4, 4)  # of 4, 2, 1 and 3 rows
    assert compiled_graphs("even") == (3, 3)  # of 4, 3 and 2
