"""Paths, markers and what is said of wrong ones."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from batchsplit import PER_ROW, SHARED, BatchCutter, CutError, axis, join, packed, register
from kinds import Pair


def refusal(batch: Any, layout: Any) -> str:
    with pytest.raises(CutError) as caught:
        BatchCutter(rows=2, layout=layout).cut(batch)
    return str(caught.value)


NESTED = {"x": torch.rand(4, 2), "in": {"mask": torch.rand(9)}, "pair": Pair(torch.rand(9), [torch.rand(9), 1]), 7: torch.rand(9)}
WHOLE = {"in.mask": SHARED, "pair.x": SHARED, "pair.y.0": SHARED, "7": SHARED}


@pytest.mark.parametrize(
    "layout",
    [
        WHOLE,
        {"in": SHARED, "pair": SHARED, "7": SHARED},
        {"in": SHARED, "pair.x": SHARED, "pair.y": SHARED, 7: SHARED},
        {"['in']['mask']": SHARED, "pair.x": SHARED, "pair.y[0]": SHARED, "[7]": SHARED},
    ],
)
def test_paths_lead_anywhere_and_can_be_written_in_several_ways(layout: Any) -> None:
    for sub in BatchCutter(rows=2, layout=layout).cut(NESTED):
        assert sub.data["in"]["mask"] is NESTED["in"]["mask"] and sub.data["pair"].y[0] is NESTED["pair"].y[0]


def test_a_tuple_or_list_by_positions_and_the_batch_itself() -> None:
    batch = (torch.rand(4, 2), torch.rand(9))
    for key in ("1", "[1]", 1):
        layout: Any = {key: SHARED}
        assert BatchCutter(rows=2, layout=layout).cut(batch).rows == 4
    rows = [torch.rand(2), torch.rand(2), torch.rand(2)]
    assert BatchCutter(rows=2, layout={"": PER_ROW}).cut(rows).rows == 3
    assert BatchCutter(rows=2, layout={"": axis(1)}).cut(torch.rand(3, 5)).rows == 5


def test_keys_that_look_like_paths() -> None:
    batch = {"x": torch.rand(4, 2), "a.b": torch.rand(9), "c[0]": torch.rand(9)}
    found = BatchCutter(rows=2, layout={"a.b": SHARED, "c[0]": SHARED}).cut(batch)
    assert torch.equal(join(found)["c[0]"], batch["c[0]"])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("in.masks", 'did you mean "in.mask"?'),
        ("mask", 'did you mean "in.mask"?'),
        ("pair.y.1.z", 'did you mean "pair.y.1"?'),
        ("zzzz", 'its paths are "", "x", "in", "in.mask"'),
    ],
)
def test_a_path_that_matches_nothing_suggests_the_nearest(key: str, words: str) -> None:
    text = refusal(NESTED, {**WHOLE, key: SHARED})
    assert text.startswith(f'layout={{"{key}": ...}} matches nothing in the batch') and words in text


def test_wrong_layouts_and_markers() -> None:
    for layout, words in (
        (["x"], "a layout maps paths to markers"),
        ({"x": 1}, "write SHARED, PER_ROW, axis(k), packed(counts)"),
        ({("x", "y"): SHARED}, "a path is text like"),
        ({True: SHARED}, "a path is text like"),
    ):
        with pytest.raises(CutError) as caught:
            BatchCutter(rows=2, layout=layout)  # type: ignore[arg-type]
        assert words in str(caught.value)
    for wrong in (1.5, "1", True, None):
        with pytest.raises(CutError, match="an axis is a whole number; write axis"):
            axis(wrong)  # type: ignore[arg-type]
    for wrong in (1.5, None, True, ["n"]):
        with pytest.raises(CutError, match="counts is the path of a leaf, a function of the batch, or a whole number"):
            packed(wrong)  # type: ignore[arg-type]
    for number in (0, -2):
        with pytest.raises(CutError, match="a row owns at least 1 entry"):
            packed(number)
    with pytest.raises(CutError, match=r"the first argument is a class; write register\(MyBatch"):
        register("Batch", count=len, take=len, join=len)  # type: ignore[arg-type]
    with pytest.raises(CutError, match=r"take=3.*has to be a function"):
        register(Pair, count=len, take=3, join=len)  # type: ignore[arg-type]


@pytest.mark.parametrize("marker", [SHARED, PER_ROW, axis(1), axis(-1), packed("n"), packed(3)])
def test_markers_are_told_by_their_text_and_survive_copies(marker: Any) -> None:
    for again in (pickle.loads(pickle.dumps(marker)), copy.deepcopy(marker), copy.copy(marker)):
        assert again == marker and repr(again) == repr(marker)
    if marker in (SHARED, PER_ROW):
        assert pickle.loads(pickle.dumps(marker)) is marker
    assert repr(marker) in ("SHARED", "PER_ROW", "axis(1)", "axis(-1)", "packed('n')", "packed(3)")


def test_a_marker_on_a_container_is_for_all_tensors_in_it() -> None:
    batch = {"x": torch.rand(4, 2), "state": (torch.rand(2, 4, 3), {"c": torch.rand(5, 4), "n": 3, "t": torch.tensor(1)})}
    found = BatchCutter(rows=2, layout={"state": axis(1)}).cut(batch)
    assert found[0].data["state"][0].shape == (2, 2, 3) and found[0].data["state"][1]["c"].shape == (5, 2)
    inner = BatchCutter(rows=2, layout={"state": axis(1), "state.1.c": SHARED}).cut(batch)
    assert inner[0].data["state"][1]["c"] is batch["state"][1]["c"]
