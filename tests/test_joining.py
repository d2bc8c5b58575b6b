"""Putting together: batches from their cuts, outputs from those of the sub-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from batchsplit import PER_ROW, SHARED, BatchCutter, CutError, axis, group, join, label_weight, row_weight
from kinds import Pair, Words, difference

BATCH = {"x": torch.rand(5, 3, dtype=torch.float64), "labels": torch.tensor([1, 4, 2, -100, 3])}


def refusal(outputs: Any, layout: Any = None, **settings: Any) -> str:
    cut = BatchCutter(rows=2, **settings).cut(BATCH)
    with pytest.raises(CutError) as caught:
        cut.join(outputs(cut), layout)
    return str(caught.value)


def test_outputs_of_every_kind_come_out_in_the_batchs_order() -> None:
    def model(data: Any, where: slice) -> Any:
        x, rows = data["x"], range(5)[where]
        return {
            "logits": x @ x[0:1].t() * 0 + x.sum(1, keepdim=True),
            "hidden": (x * 2, [x, x[:, :1]]),
            "pair": Pair([f"row {i}" for i in rows], x.numpy()),
            "ragged": [torch.full((i + 7,), i) for i in rows],
            "words": Words([str(i) for i in rows]),
            "packed": pack_sequence([torch.full((i % 3 + 1,), i) for i in rows], enforce_sorted=False),
            "sparse": x.to_sparse(),
            "name": "a model",
            "none": None,
            "pos": torch.arange(3)[None, None].expand(1, 2, 3),
        }

    cut = BatchCutter(rows=2).cut(BATCH)
    joined = cut.join([model(sub.data, sub.where) for sub in cut])
    whole = model(BATCH, slice(0, 5))
    assert not difference(joined, whole)


@pytest.mark.parametrize("weight", [row_weight, label_weight("labels")])
def test_scalars_of_floating_type_are_losses(weight: Any) -> None:
    cut = BatchCutter(rows=2, weight=weight).cut(BATCH)
    losses = [torch.tensor(float(i + 1), dtype=torch.float64) for i in range(3)]
    right = sum(loss * sub.share for loss, sub in zip(losses, cut, strict=True))
    assert cut.join(losses) == right and cut.join([float(loss) for loss in losses]) == pytest.approx(float(right))
    assert right != sum(losses) / 3  # the mean of means is another number
    assert cut.join([{"loss": loss, "n": 7} for loss in losses]) == {"loss": right, "n": 7}


def test_scalars_that_nobody_knows_how_to_join() -> None:
    text = refusal(lambda cut: [{"count": torch.tensor(sub.index)} for sub in cut])
    assert text.startswith("outputs['count'] is a Tensor without rows and differs between sub-batches")
    text = refusal(lambda cut: [{"pos": torch.rand(1, 3)} for sub in cut])
    assert "outputs['pos']" in text and "differs between sub-batches" in text
    cut = BatchCutter(rows=2).cut(BATCH)
    assert cut.join([{"flag": True, "opts": ["a", "b", "c"]} for sub in cut]) == {"flag": True, "opts": ["a", "b", "c"]}


def test_outputs_that_do_not_fit_together() -> None:
    assert "2 outputs for 3 sub-batches" in refusal(lambda cut: [1, 2])
    assert "is Tensor and dict in different sub-batches" in refusal(lambda cut: [torch.rand(2), torch.rand(2), {}])
    assert "other keys in different sub-batches" in refusal(lambda cut: [{"a": 1}, {"a": 1}, {"b": 1}])
    text = refusal(lambda cut: [torch.rand(sub.rows + 1, 2) for sub in cut])
    assert text.startswith("outputs (shape (3, 2)) has 3 rows, neither 1 nor the batch's 2 (known by the sub-batches)")
    text = refusal(lambda cut: [{"y": torch.rand(sub.rows, 2 + sub.index)} for sub in cut])
    assert "outputs['y'] can't be joined: its parts are of shape (2, 2) and shape (2, 3) and shape (1, 4)" in text
    text = refusal(lambda cut: [np.zeros((sub.rows, 2 + sub.index)) for sub in cut])
    assert text.startswith("outputs can't be joined: its parts are of shape (2, 2)")
    assert "outputs is an object, which batchsplit can't cut" in refusal(lambda cut: [object()] * 3)


def test_outputs_are_declared_like_leaves() -> None:
    cut = BatchCutter(rows=2).cut(BATCH)
    states = [{"h": torch.full((2, sub.rows, 3), float(sub.index)), "stats": torch.rand(7)} for sub in cut]
    joined = cut.join(states, {"h": axis(1), "stats": SHARED})
    assert joined["h"][0, :, 0].tolist() == [0, 0, 1, 1, 2] and joined["stats"] is states[0]["stats"]
    items = [[torch.rand(sub.rows) for _ in range(sub.rows)] for sub in cut]
    assert len(cut.join(items, {"": PER_ROW})) == 5
    assert '"hh": ...} matches nothing' in refusal(lambda cut: states, {"hh": axis(1), "stats": SHARED})


def test_parts_without_a_cut() -> None:
    assert join([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [1, 2, 3]
    assert join([["a"], ["b", "c"]]) == ["a", "b", "c"] and join([{"x": np.arange(2)}] * 2)["x"].tolist() == [0, 1, 0, 1]
    assert join([torch.rand(2, 3), torch.rand(2, 1)], layout={"": axis(1)}).shape == (2, 4)
    with pytest.raises(CutError, match="there are no parts to join"):
        join([])


def test_gradients_go_through_a_join() -> None:
    x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    cut = BatchCutter(rows=2).cut(x)
    (cut.join([sub.data**2 for sub in cut]) * torch.arange(5.0)[:, None]).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach() * torch.arange(5.0)[:, None], rtol=1e-12, atol=0)


def test_a_group_comes_back_batch_by_batch() -> None:
    batches = [{"x": torch.rand(3, 2), "n": ["a"] * 3}, {"x": torch.rand(2, 4), "n": ["b"] * 2}]
    (grouped,) = group(batches, batches=2)
    cut = BatchCutter(rows=2).cut(grouped)
    assert not difference(list(join(cut)), batches)
    assert [len(out) for out in cut.join([sub.data["x"].sum(1) for sub in cut])] == [3, 2]
