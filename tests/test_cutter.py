from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from batchsplit import (
    PER_ROW,
    SHARED,
    BatchCutter,
    Cut,
    CutError,
    axis,
    group,
    join,
    label_weight,
    mask_weight,
    packed,
    row_weight,
)


def values(cut: Cut, name: str) -> list[int]:
    return [int(x) for sub in cut for x in sub.data[name]]


@pytest.mark.parametrize(
    "limits",
    [{"rows": 0}, {"rows": -1}, {"rows": 2.5}, {"rows": True}, {"rows": float("nan")}, {"parts": 0}, {"parts": True}, {"area": 0}, {"area": 1.5}],
)
def test_b10_a_wrong_limit_is_an_error_at_once(limits: dict[str, Any]) -> None:
    (name, value), = limits.items()
    with pytest.raises(CutError) as caught:
        BatchCutter(**limits)
    assert isinstance(caught.value, ValueError)
    assert f"{name}={value}" in str(caught.value) and "at least 1" in str(caught.value)


@pytest.mark.parametrize("limits", [{"rows": 2, "parts": 2}, {"rows": 2, "area": 9}, {"area": 9, "parts": 2}])
def test_two_limits_at_once(limits: dict[str, int]) -> None:
    with pytest.raises(CutError, match="two limits at once; give one of them"):
        BatchCutter(**limits)  # type: ignore[arg-type]


def test_other_wrong_arguments() -> None:
    with pytest.raises(CutError, match='write sizes="even" or sizes="full"'):
        BatchCutter(rows=2, sizes="equalish")  # type: ignore[arg-type]
    with pytest.raises(CutError, match="cut evenly"):
        BatchCutter(parts=2, sizes="full")
    with pytest.raises(CutError, match=r"weight='rows'.*row_weight"):
        BatchCutter(rows=2, weight="rows")
    with pytest.raises(CutError, match="layout maps paths to markers"):
        BatchCutter(rows=2, layout=["x"])  # type: ignore[arg-type]
    with pytest.raises(CutError, match="write SHARED, PER_ROW"):
        BatchCutter(rows=2, layout={"x": "shared"})
    already = BatchCutter(rows=2).cut(torch.rand(3, 2))
    with pytest.raises(CutError, match="cut already"):
        BatchCutter(rows=1).cut(already)


def test_b10_a_batch_smaller_than_the_limit_is_whole() -> None:
    batch = {"x": torch.rand(3, 2, requires_grad=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut = BatchCutter(rows=4).cut(batch)
    assert len(cut) == 1 and cut[0].share == 1.0 and cut[0].is_first and cut[0].is_last
    (torch.sin(cut[0].data["x"]).mean() * cut[0].share).backward()
    found, batch["x"].grad = batch["x"].grad, None
    torch.sin(batch["x"]).mean().backward()
    assert found is not None and batch["x"].grad is not None and torch.equal(found, batch["x"].grad)


@pytest.mark.parametrize("cutter", [BatchCutter(rows=2), BatchCutter(parts=3), BatchCutter(area=8), BatchCutter()])
def test_b07_a_batch_without_rows(cutter: BatchCutter) -> None:
    with pytest.raises(CutError, match=r"the batch has no rows \(by batch\['x'\]\)"):
        cutter.cut({"x": torch.zeros(0, 5), "y": torch.zeros(0, dtype=torch.long)})


def test_nothing_carries_rows() -> None:
    with pytest.raises(CutError, match="nothing in batch carries rows"):
        BatchCutter(rows=2).cut({"n": torch.tensor(3), "scale": 0.5, "name": "abc", "none": None})


def test_b09_every_leaf_is_cut_at_the_same_rows() -> None:
    batch = {"id": list(range(10)), "v": torch.arange(10), "n": np.arange(10), "s": [str(i) for i in range(10)]}
    cut = BatchCutter(parts=3).cut(batch)
    assert [sub.rows for sub in cut] == [4, 3, 3]
    for sub in cut:
        assert sub.data["id"] == sub.data["v"].tolist() == sub.data["n"].tolist() == [int(s) for s in sub.data["s"]]


@pytest.mark.parametrize(
    ("cutter", "sizes"),
    [
        (BatchCutter(rows=4), [4, 3, 3]),
        (BatchCutter(rows=4, sizes="full"), [4, 4, 2]),
        (BatchCutter(parts=4), [3, 3, 2, 2]),
        (BatchCutter(parts=20), [1] * 10),
        (BatchCutter(area=24), [4, 3, 3]),
        (BatchCutter(area=24, sizes="full"), [4, 4, 2]),
        (BatchCutter(), [10]),
        (BatchCutter(rows=100), [10]),
    ],
)
def test_limits(cutter: BatchCutter, sizes: list[int]) -> None:
    cut = cutter.cut({"ids": torch.arange(60).view(10, 6), "row": torch.arange(10)})
    assert [sub.rows for sub in cut] == sizes == [len(sub.data["row"]) for sub in cut]
    assert values(cut, "row") == list(range(10))
    assert cut[0].where == slice(0, sizes[0]) and cut.rows == 10


def test_limits_of_numpy_integers_are_taken() -> None:
    assert len(BatchCutter(rows=np.int64(4)).cut(torch.rand(10))) == 3  # type: ignore[arg-type]


def test_a_row_wider_than_the_area() -> None:
    with pytest.raises(CutError, match=r"area=5: one row is 6 wide \(.*ids.*raise area to 6 or more"):
        BatchCutter(area=5).cut({"ids": torch.ones(4, 6, dtype=torch.long)})


def test_area_of_unknown_width() -> None:
    with pytest.raises(CutError, match='no leaf says how wide a row is; write area_of="input_ids"'):
        BatchCutter(area=5).cut({"y": torch.rand(4)})


def test_sub_batches_are_views_and_nothing_is_copied() -> None:
    batch = {"x": torch.rand(8, 3), "n": np.ones((8, 2)), "pos": torch.arange(4)[None], "names": list("abcdefgh")}
    for sub in BatchCutter(rows=3).cut(batch):
        storage = batch["x"].untyped_storage()
        assert sub.data["x"].untyped_storage().data_ptr() == storage.data_ptr()
        assert sub.data["x"].data_ptr() == batch["x"][sub.where].data_ptr()
        assert np.shares_memory(sub.data["n"], batch["n"]) and sub.data["pos"] is batch["pos"]
        assert sub.to("cpu").data["x"].data_ptr() == sub.data["x"].data_ptr()


def test_b48_cut_and_batch_are_freed() -> None:
    batch = {"x": torch.rand(8, 3)}
    seen = weakref.ref(batch["x"])
    gc.disable()  # no circle of references that only the collector would find: a batch may be gigabytes
    try:
        cut = BatchCutter(rows=3, weight=mask_weight("x")).cut(batch)
        subs = list(cut)
        assert subs[0].share > 0
        del batch
        assert seen() is not None  # the batch lives while its cut does
        del cut, subs
        assert seen() is None
    finally:
        gc.enable()


def test_b48_containers_are_new_at_each_iteration() -> None:
    cut = BatchCutter(rows=2).cut({"x": torch.rand(4), "labels": torch.arange(4)})
    for sub in cut:
        assert sub.data.pop("labels") is not None
        assert "labels" not in sub.data  # the same sub-batch keeps its data
    assert all("labels" in sub.data for sub in cut) and "labels" in cut.batch


def test_a_cut_is_sized_indexable_and_iterable_again() -> None:
    cut = BatchCutter(rows=2).cut(torch.arange(5))
    assert len(cut) == 3 and cut[-1].data.tolist() == [4] and cut[1].index == 1
    assert [sub.data.tolist() for sub in cut] == [sub.data.tolist() for sub in cut] == [[0, 1], [2, 3], [4]]
    assert [sub.index for sub in cut[1:]] == [1, 2]
    with pytest.raises(IndexError, match="sub-batch 3 of 3"):
        cut[3]
    assert [(sub.is_first, sub.is_last, sub.count) for sub in cut] == [(True, False, 3), (False, False, 3), (False, True, 3)]
    assert repr(cut) == "Cut(5 rows in 3 sub-batches: 2 × 2 + 1)" and repr(cut[2]) == "SubBatch(3 of 3, 1 row, 4:5)"


def test_a_sub_batch_is_read_only() -> None:
    sub = BatchCutter(rows=2).cut(torch.arange(5))[0]
    for name in ("data", "rows", "where", "index", "share", "other"):
        with pytest.raises(AttributeError, match=name):
            setattr(sub, name, 1)


def test_shared_and_declared_leaves() -> None:
    batch = {"ids": torch.rand(4, 6), "pos": torch.arange(6)[None], "cache_position": torch.arange(6), "h": torch.rand(2, 4, 3)}
    cut = BatchCutter(rows=2, layout={"cache_position": SHARED, "h": axis(1)}).cut(batch)
    for sub in cut:
        assert sub.data["pos"] is batch["pos"] and sub.data["cache_position"] is batch["cache_position"]
        assert torch.equal(sub.data["h"], batch["h"][:, sub.where])
    assert torch.equal(join(cut)["h"], batch["h"])


def test_b33_undeclared_first_axis() -> None:
    with pytest.raises(CutError) as caught:
        BatchCutter(rows=2).cut({"ids": torch.rand(4, 6), "cache_position": torch.arange(6)})
    for part in ("batch['cache_position']", "(6,)", "4", 'layout={"cache_position": SHARED}'):
        assert part in str(caught.value)
    with pytest.raises(CutError, match=r'"cache_positions".*matches nothing.*did you mean "cache_position"'):
        BatchCutter(rows=2, layout={"cache_positions": SHARED}).cut({"ids": torch.rand(4, 6), "cache_position": torch.arange(6)})


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor | None = None


def test_the_plan_is_used_again_and_every_check_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import batchsplit.cutter as module

    reads: list[Any] = []
    read = module.read
    monkeypatch.setattr(module, "read", lambda *args: reads.append(1) or read(*args))
    cutter = BatchCutter(rows=2)
    for rows in (4, 5, 3):
        assert cutter.cut(Batch(torch.rand(rows, 2), torch.arange(rows))).rows == rows
    assert len(reads) == 1
    with pytest.raises(CutError, match=r"batch\.x has 4.*batch\.y has 3"):
        cutter.cut(Batch(torch.rand(4, 2), torch.arange(3)))
    cutter.cut(Batch(torch.rand(4, 2), None))  # another structure: a plan of its own
    cutter.cut(Batch(torch.rand(6, 2), torch.arange(6)))
    assert len(reads) == 3
    assert len(cutter.cut({"x": torch.rand(4, 2), "y": torch.rand(1, 2)})[0].data["y"]) == 1
    assert len(cutter.cut({"x": torch.rand(4, 2), "y": torch.rand(4, 2)})[0].data["y"]) == 2


def test_a_cutter_pickles_without_its_plans() -> None:
    weight = {"a": mask_weight("m"), "b": label_weight("s", shifted=True), "c": row_weight, "d": "once"}
    cutter = BatchCutter(rows=2, weight=weight, layout={"h": axis(1), "s": SHARED, "p": packed("n"), "m": PER_ROW})
    h, m, s, p, n = torch.rand(2, 4), torch.rand(4, 3), torch.ones(3, 2, dtype=torch.long), torch.rand(6), [1, 2, 3, 0]
    batch = {"h": h, "m": m, "s": s, "p": p, "n": n}
    first = cutter.cut(batch)
    second = pickle.loads(pickle.dumps(cutter)).cut(batch)
    assert [dict(sub.share) for sub in first] == [dict(sub.share) for sub in second]
    assert [len(sub.data["p"]) for sub in second] == [3, 3] and second[0].data["s"] is s


def test_group_weights_count_over_all_batches() -> None:
    batches = [torch.randint(0, 5, (5, 4)), torch.randint(0, 5, (2, 6))]
    cutter = BatchCutter(rows=2, weight=label_weight("0"))
    (batch,) = group([[b] for b in batches], batches=2)
    cut = cutter.cut(batch)
    assert [sub.rows for sub in cut] == [2, 2, 1, 2] and cut.rows == 7
    assert [sub.where for sub in cut][-1] == slice(5, 7)
    assert cut.weight == 5 * 4 + 2 * 6 and sum(sub.share for sub in cut) == pytest.approx(1, abs=1e-15)


def test_parts_of_a_group() -> None:
    (batch,) = group([torch.rand(5, 3), torch.rand(2, 4)], batches=2)
    assert [sub.rows for sub in BatchCutter(parts=3).cut(batch)] == [3, 2, 2]
    with pytest.raises(CutError, match="a group of 2 batches of their own padding can't be in fewer parts"):
        BatchCutter(parts=1).cut(batch)
