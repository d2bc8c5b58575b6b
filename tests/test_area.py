"""Area: how wide a row is, the bound that holds, and what becomes of a row above it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batchsplit import SHARED, BatchCutter, CutError, axis, group


def ids(rows: int, width: int, **more: Any) -> torch.Tensor:
    return torch.randint(0, 9, (rows, width), **more)


SOURCE_AND_TARGET = {"source": ids(12, 7), "target": ids(12, 5), "length": ids(12, 1)[:, 0]}


@pytest.mark.parametrize(
    ("area_of", "width"),
    [
        (None, 7),
        ("source", 7),
        ("target", 5),
        (["target"], 5),
        (("source", "target"), 12),
        (["source", "source", "target"], 19),
        (lambda batch: batch["source"].shape[1] * 2, 14),
        (lambda batch: np.int64(6), 6),
    ],
)
@pytest.mark.parametrize("area", [24, 25, 35, 36, 60, 84, 1000])
@pytest.mark.parametrize("sizes", ["even", "full"])
def test_no_sub_batch_is_above_the_bound_and_no_fewer_would_do(area_of: Any, width: int, area: int, sizes: Any) -> None:
    cut = BatchCutter(area=area, area_of=area_of, sizes=sizes).cut(SOURCE_AND_TARGET)
    assert max(sub.rows for sub in cut) * width <= area
    assert len(cut) == -(-12 // (area // width))
    assert sum(sub.rows for sub in cut) == 12


def test_paths_of_any_container() -> None:
    batch = ((ids(6, 3), ids(6, 4)), {"images": torch.rand(6, 10, 2)})
    assert [sub.rows for sub in BatchCutter(area=34, area_of=("0.1", "[1].images")).cut(batch)] == [2, 2, 2]
    assert [sub.rows for sub in BatchCutter(area=9, area_of=0).cut((ids(6, 3), ids(6, 4)))] == [3, 3]
    # time first: the width is the other axis
    assert [sub.rows for sub in BatchCutter(area=20, layout={"x": axis(1)}).cut({"x": ids(10, 6)})] == [2, 2, 2]
    assert [sub.rows for sub in BatchCutter(area=9).cut(np.zeros((6, 3), dtype=np.int64))] == [3, 3]


@pytest.mark.parametrize(
    ("batch", "width", "words"),
    [
        (SOURCE_AND_TARGET, 7, "A row is 7 wide (source, the widest of its ids and masks; area_of= would name others)"),
        ({"mask": torch.rand(4, 6) < 0.5, "features": torch.rand(4, 90)}, 6, "(mask, the widest of its ids and masks;"),
        ({"features": torch.rand(4, 6, 90), "scores": torch.rand(4, 80)}, 6, "(features, the widest of its features;"),
        (ids(4, 6), 6, "A row is 6 wide (the batch, the widest of its ids and masks;"),
        ({"ids": ids(4, 6), "table": ids(4, 50)}, 6, "A row is 6 wide (ids, the widest"),
    ],
)
def test_the_default_and_where_it_comes_from_stand_in_explain(batch: Any, width: int, words: str) -> None:
    layout = {"table": SHARED} if isinstance(batch, dict) and "table" in batch else None
    cut = BatchCutter(area=2 * width, layout=layout).cut(batch)
    assert {sub.rows for sub in cut} == {2}
    assert words in cut.explain()
    assert f"the largest sub-batch has an area of {2 * width}." in cut.explain()


def test_declared_widths_stand_in_explain() -> None:
    text = BatchCutter(area=30, area_of=("source", "target")).cut(SOURCE_AND_TARGET).explain()
    assert "A row is 12 wide (source: 7 + target: 5, by area_of); the largest sub-batch has an area of 24." in text
    text = BatchCutter(rows=3, area_of="target").cut(SOURCE_AND_TARGET).explain()
    assert "A row is 5 wide (target, by area_of); the largest sub-batch has an area of 15." in text
    text = BatchCutter(area=30, area_of=lambda batch: 8).cut(SOURCE_AND_TARGET).explain()
    assert "A row is 8 wide (by the function given as area_of)" in text


def test_widths_of_a_group_are_each_batch_s_own() -> None:
    (together,) = group([{"x": ids(6, 3)}, {"x": ids(6, 11)}, {"x": ids(6, 6)}], batches=3)
    cut = BatchCutter(area=12).cut(together)
    assert [sub.rows for sub in cut] == [3, 3] + [1] * 6 + [2] * 3
    assert all(sub.data["x"].numel() <= 12 for sub in cut)


@pytest.mark.parametrize("sizes", ["even", "full"])
def test_a_row_above_the_bound_is_an_error_or_stands_alone(sizes: Any) -> None:
    batch = {"x": ids(3, 20)}
    words = r'area=16: one row is 20 wide \(x, .*raise area to 20 or more, or.*oversize="alone"'
    with pytest.raises(CutError, match=words):
        BatchCutter(area=16, sizes=sizes).cut(batch)
    cut = BatchCutter(area=16, sizes=sizes, oversize="alone").cut(batch)
    assert [sub.rows for sub in cut] == [1, 1, 1]
    assert torch.equal(cut.join([sub.data["x"] for sub in cut]), batch["x"])
    # below the bound it changes nothing
    wide = BatchCutter(area=40, sizes=sizes, oversize="alone").cut(batch)
    assert [sub.rows for sub in wide] == [sub.rows for sub in BatchCutter(area=40, sizes=sizes).cut(batch)]
    (together,) = group([{"x": ids(4, 8)}, batch], batches=2)
    assert [sub.rows for sub in BatchCutter(area=16, oversize="alone").cut(together)] == [2, 2, 1, 1, 1]


def test_rows_without_width_have_no_area_to_exceed() -> None:
    assert [sub.rows for sub in BatchCutter(area=3, area_of=lambda batch: 0).cut({"x": ids(5, 2)})] == [3, 2]


@pytest.mark.parametrize(
    ("batch", "area_of", "words"),
    [
        ({"x": torch.rand(4, 3)}, None, r'no leaf says how wide a row is; write area_of="input_ids"'),
        (SOURCE_AND_TARGET, "sources", r"area_of='sources' matches nothing in the batch; .*source"),
        (SOURCE_AND_TARGET, ("source", "length"), r"area_of='length': that leaf has no width"),
        (SOURCE_AND_TARGET, lambda batch: 2.5, r"area_of returned 2.5: a width is a whole number"),
        (SOURCE_AND_TARGET, lambda batch: -1, r"area_of returned -1"),
        (SOURCE_AND_TARGET, lambda batch: True, r"area_of returned True"),
    ],
)
@pytest.mark.parametrize("area", [30, "auto"])
def test_a_width_in_doubt_is_an_error(batch: Any, area_of: Any, words: str, area: Any) -> None:
    with pytest.raises(CutError, match=words):
        BatchCutter(area=area, area_of=area_of).cut(batch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"area": 8, "area_of": 2.5}, "area_of=2.5: write a path"),
        ({"area": 8, "area_of": ()}, r"area_of=\(\): write a path"),
        ({"area": 8, "area_of": ["x", None]}, "write a path"),
        ({"area": 8, "area_of": True}, "write a path"),
        ({"area": 8, "oversize": "drop"}, 'oversize="raise" or oversize="alone"'),
        ({"rows": 8, "oversize": "alone"}, "give area= as well"),
        ({"area": "auto", "oversize": "alone"}, "give area= as well"),
        ({"area": 0}, "area=0: a sub-batch needs at least 1 padded position"),
        ({"area": "big"}, "area='big'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CutError, match=words):
        BatchCutter(**arguments)
