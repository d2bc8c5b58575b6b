from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchsplit import BatchCutter, CutError, label_weight, mask_weight, packed, row_weight

LABELS = torch.tensor([[-100, 7, -100, -100], [1, 2, 3, 4]])


def found(batch: Any, rows: int = 1, **cutter: Any) -> list[tuple[float, float]]:
    return [(sub.weight, sub.share) for sub in BatchCutter(rows=rows, **cutter).cut(batch)]


def test_b26_target_tokens() -> None:
    batch = {"labels": LABELS}
    assert found(batch, weight=label_weight("labels", shifted=True)) == [(1, 0.25), (3, 0.75)]
    assert found(batch, weight=label_weight("labels")) == [(1, 0.2), (4, 0.8)]
    assert found(batch) == [(1, 0.5), (1, 0.5)]
    assert found({"labels": LABELS.numpy()}, weight=label_weight("labels")) == [(1, 0.2), (4, 0.8)]
    assert found((LABELS, LABELS), weight=label_weight("[1]")) == found((LABELS, LABELS), weight=label_weight(1))
    assert found({"a": {"labels": LABELS}}, weight=label_weight("a.labels", ignore_index=7)) == [(3, 3 / 7), (4, 4 / 7)]


def test_ragged_and_packed_labels() -> None:
    ragged = [torch.tensor([1, -100]), torch.tensor([1, 2, 3])]
    assert found({"x": torch.rand(2, 3), "y": ragged}, weight=label_weight("y")) == [(1, 0.25), (3, 0.75)]
    flat = {"labels": torch.tensor([1, -100, 3, 4, 5]), "tokens": torch.tensor([2, 3])}
    cutter = {"weight": label_weight("labels"), "layout": {"labels": packed("tokens")}}
    assert found(flat, **cutter) == [(1, 0.25), (3, 0.75)]


def test_masks_of_every_type() -> None:
    for mask in (torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[True] * 3, [True, False, False]])):
        assert found({"m": mask}, weight=mask_weight("m")) == [(3, 0.75), (1, 0.25)]
    half = torch.full((2, 5000), 1.0, dtype=torch.float16)  # 5,000 ones add up to 5,000 in float64, to inf or 2,048 in halves
    assert found({"m": half}, weight=mask_weight("m")) == [(5000, 0.5), (5000, 0.5)]
    assert found({"m": torch.full((2, 300), 1, dtype=torch.uint8)}, weight=mask_weight("m")) == [(300, 0.5), (300, 0.5)]
    assert found({"m": np.full((2, 300), 0.5, dtype=np.float16)}, weight=mask_weight("m")) == [(150, 0.5), (150, 0.5)]


def test_sum_once_and_functions() -> None:
    x = {"x": torch.tensor([[1.0], [3.0], [4.0]])}
    assert found(x, weight=None) == [(None, 1.0)] * 3
    assert found(x, weight="once") == [(1 / 3, 1 / 3)] * 3
    assert found(x, weight=lambda data: data["x"].sum()) == [(1, 1 / 8), (3, 3 / 8), (4, 4 / 8)]
    assert found(x, weight=lambda data: float(data["x"].sum())) == [(1, 1 / 8), (3, 3 / 8), (4, 4 / 8)]
    assert BatchCutter(rows=1, weight=None).cut(x).weight is None


def test_named_weights() -> None:
    cut = BatchCutter(rows=1, weight={"ce": label_weight("labels"), "kl": row_weight, "l2": "once", "s": None}).cut({"labels": LABELS})
    assert dict(cut[1].share) == {"ce": 0.8, "kl": 0.5, "l2": 0.5, "s": 1.0}
    assert dict(cut.weight) == {"ce": 5, "kl": 2, "l2": 1, "s": None} and dict(cut[0].weight)["ce"] == 1


def test_weights_are_counted_once_and_only_when_asked_for() -> None:
    calls: list[int] = []

    def weight(data: Any) -> float:
        calls.append(1)
        return 1.0

    cut = BatchCutter(rows=1, weight=weight).cut(torch.rand(3))
    assert not calls
    assert [sub.share for sub in cut] == [sub.share for sub in cut] and len(calls) == 3


def test_a_whole_weight_from_elsewhere() -> None:
    cutter = BatchCutter(rows=1, weight=label_weight("labels"))
    for whole in (10, 10.0, torch.tensor(10), np.int64(10)):
        cut = cutter.cut({"labels": LABELS}, whole_weight=whole)
        assert cut.weight == 10 and [sub.share for sub in cut] == [0.1, 0.4]
    cut = cutter.cut({"labels": torch.full((2, 3), -100)}, whole_weight=10)  # another rank has the targets
    assert [sub.share for sub in cut] == [0, 0]
    named = BatchCutter(rows=1, weight={"a": row_weight, "b": row_weight}).cut(LABELS, whole_weight={"a": 4})
    assert dict(named.weight) == {"a": 4, "b": 2}


@pytest.mark.parametrize("whole", [0, -1, float("nan"), float("inf")])
def test_wrong_whole_weights(whole: float) -> None:
    with pytest.raises(CutError, match="whole"):
        _ = BatchCutter(rows=1).cut(LABELS, whole_weight=whole)[0].share


def test_wrong_uses_of_whole_weight() -> None:
    for weight in (None, "once"):
        with pytest.raises(CutError, match="such a loss has no denominator to replace"):
            BatchCutter(rows=1, weight=weight).cut(LABELS, whole_weight=3)
    with pytest.raises(CutError, match="mapping by term exactly when weight is one"):
        BatchCutter(rows=1).cut(LABELS, whole_weight={"a": 3})
    with pytest.raises(CutError, match=r"names \['b'\], which have no weight"):
        BatchCutter(rows=1, weight={"a": row_weight}).cut(LABELS, whole_weight={"b": 3})


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (label_weight("label"), r"label_weight\('label'\) finds no such leaf; did you mean \"labels\""),
        (label_weight("floats"), "not whole numbers; for a mask use mask_weight"),
        (label_weight("row", shifted=True), r"shape \(2,\) have no width to shift along"),
        (label_weight("names"), "counts in tensors and arrays, not in a list"),
        (lambda data: -1, "of sub-batch 0 is -1.0: a weight is a part of a denominator"),
        (lambda data: float("nan"), "of sub-batch 0 is nan"),
        (lambda data: data["labels"], "has to be a number or a 0-dim tensor"),
        (lambda data: "3", "has to be a number or a 0-dim tensor"),
        (mask_weight("minus"), r"mask_weight\('minus'\) of sub-batch 0 is -"),
    ],
)
def test_weights_in_doubt(weight: Any, says: str) -> None:
    batch = {"labels": LABELS, "floats": torch.rand(2, 3), "row": torch.tensor([1, 2]), "names": ["a", "b"], "minus": -torch.rand(2, 3)}
    with pytest.raises(CutError, match=says):
        _ = BatchCutter(rows=1, weight=weight).cut(batch)[0].share


def test_a_whole_batch_of_weight_0() -> None:
    cut = BatchCutter(rows=1, weight=label_weight("labels")).cut({"labels": torch.full((2, 3), -100)})
    with pytest.raises(CutError, match=r"label_weight\('labels'\) of the whole batch is 0.*Leave this batch out"):
        _ = cut[0].share


def test_wrong_weights_of_a_cutter() -> None:
    with pytest.raises(CutError, match="name the terms"):
        BatchCutter(weight={})
    with pytest.raises(CutError, match="itself a mapping"):
        BatchCutter(weight={"a": {"b": row_weight}})  # type: ignore[dict-item]
    with pytest.raises(CutError, match="weight=3: write row_weight"):
        BatchCutter(weight=3)  # type: ignore[arg-type]


def test_row_weight_as_a_function() -> None:
    assert row_weight({"x": torch.rand(4, 2)}) == 4 and row_weight(["a", "b"]) == 2


def test_reprs_say_what_was_asked_for() -> None:
    assert repr(label_weight("y", ignore_index=0, shifted=True)) == "label_weight('y', ignore_index=0, shifted=True)"
    assert repr(mask_weight("m")) == "mask_weight('m')"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.integers(1, 13))
def test_shares_sum_to_1(targets: list[int], rows: int) -> None:
    labels = torch.tensor([[0] * n + [-100] * (4 - n) for n in targets])
    cut = BatchCutter(rows=rows, weight=label_weight("labels")).cut({"labels": labels})
    assert sum(sub.share for sub in cut) == pytest.approx(1, abs=1e-15)
    assert sum(sub.weight for sub in cut) == cut.weight == sum(targets)
