"""How many rows a batch has, by which leaf, and when the plan of one batch may be used for another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from batchsplit import PER_ROW, SHARED, BatchCutter, CutError, axis, packed
from batchsplit.layout import Layout
from batchsplit.reading import read


def rows_of(batch: Any, **layout: Any) -> tuple[int, str]:
    found = read([batch], Layout(layout))
    return found.rows, found.source


@pytest.mark.parametrize(
    ("batch", "rows", "source"),
    [
        (torch.rand(4, 2), 4, "batch"),
        ({"x": torch.rand(4, 2)}, 4, "batch['x']"),
        ({"pos": torch.rand(1, 9), "x": torch.rand(4, 2)}, 4, "batch['x']"),
        ({"pos": torch.rand(1, 9)}, 1, "batch['pos']"),
        ((torch.rand(4), {"y": np.zeros(4)}), 4, "batch[0]"),
        ({"names": ["a", "b", "c"]}, 3, "batch['names']"),
        (["a", "b", "c"], 3, "batch"),
        ([], 0, ""),
        ([["a"], ["b", "c"]], 2, "batch"),
        ([torch.rand(4), ["a"] * 4], 4, "batch[0]"),
        ([torch.rand(4), {"y": torch.rand(4)}], 4, "batch[0]"),
        ([torch.rand(4), {"pos": torch.rand(1, 4)}], 4, "batch[0]"),
        ([{"x": torch.rand(4)}, {"y": torch.rand(4)}], 4, "batch[0]['x']"),
        ([{"id": 1}, {"id": 2}], 2, "batch"),
        ([torch.tensor(1), torch.tensor(2)], 2, "batch"),
        ([torch.rand(4)], 4, "batch[0]"),
        ({"p": pack_sequence([torch.rand(3), torch.rand(2)]), "names": ["a", "b"]}, 2, "batch['p']"),
        ({"options": ["a", "b", "c"], "x": torch.rand(4)}, 4, "batch['x']"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_rows_and_where_they_are_known_from(batch: Any, rows: int, source: str) -> None:
    if rows:
        assert rows_of(batch) == (rows, source)
    else:
        with pytest.raises(CutError, match="nothing in batch carries rows"):
            rows_of(batch)


def test_what_is_declared_says_more_than_what_is_not() -> None:
    batch = {"x": torch.rand(7, 5), "h": torch.rand(2, 5)}
    assert rows_of({"h": torch.rand(2, 5)}, h=axis(1)) == (5, "batch['h']")
    with pytest.raises(CutError, match=r"batch\['x'\] \(shape \(7, 5\)\) has 7 rows, neither 1 nor the batch's 5"):
        rows_of(batch, h=axis(1))
    assert rows_of({"x": torch.rand(7, 2), "n": torch.tensor([3, 4])}, x=packed("n")) == (2, "batch['x']")


@pytest.mark.parametrize("batch", [{}, [], (), {"a": {}}, {"n": 3}, None, 3, "abc", {"t": torch.tensor(1)}])
def test_no_leaf_carries_rows(batch: Any) -> None:
    with pytest.raises(CutError, match="nothing in batch carries rows") as caught:
        rows_of(batch)
    assert 'layout={"path": PER_ROW}' in str(caught.value)


@pytest.mark.parametrize("limit", [{"rows": 2}, {"parts": 2}, {"area": 10}, {}])
@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(0, 5), "y": torch.zeros(0, dtype=torch.long)},
        {"x": torch.zeros(0, 5), "names": []},
        (np.zeros((0, 2)),),
        {"x": torch.zeros(0, 3).to_sparse()},
    ],
)
def test_b07_a_batch_of_no_rows(limit: dict[str, Any], batch: Any) -> None:
    cutter = BatchCutter(**limit)
    for _ in range(2):
        with pytest.raises(CutError, match=r"the batch has no rows .*: there is nothing to cut"):
            cutter.cut(batch)


def test_b18_a_dict_bears_rows_through_its_leaves_only() -> None:
    assert rows_of({"q": {"ids": torch.rand(16, 5), "mask": torch.rand(16, 5), "type": torch.rand(16, 5)}}) == (
        16,
        "batch['q']['ids']",
    )


def test_a_container_in_itself() -> None:
    batch: dict[str, Any] = {"x": torch.rand(4)}
    batch["in"] = [batch]
    with pytest.raises(CutError, match=r"batch\['in'\]\[0\] is a dict that contains itself"):
        rows_of(batch)
    again = torch.rand(4)
    assert rows_of({"a": [again, again], "b": [again, again]}) == (4, "batch['a'][0]")


def test_a_list_that_does_not_fit_is_named_with_its_items() -> None:
    batch = {"x": torch.rand(4, 2), "boxes": [torch.rand(n, 4) for n in (2, 3, 5)]}
    with pytest.raises(CutError) as caught:
        rows_of(batch)
    text = str(caught.value)
    assert text.startswith("batch['boxes'][0] (shape (2, 4)) has 2 rows, neither 1 nor the batch's 4 (known by batch['x'])")
    assert text.endswith("(batch['boxes'] is a list of 3, not one item for each of 4 rows.)")


# Plans


class Reads:
    """Counts how often a cutter has to read a batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import batchsplit.cutter as module

        self.count, inner = 0, module.read

        def counted(*args: Any, **settings: Any) -> Any:
            self.count += 1
            return inner(*args, **settings)

        monkeypatch.setattr(module, "read", counted)


def batch_of(rows: int) -> Any:
    return {
        "x": torch.rand(rows, 3),
        "names": ["a"] * rows,
        "texts": ("a",) * rows,
        "dicts": [{"id": 1}] * rows,
        "pos": torch.rand(1, 3),
        "options": {"classes": ["a"] * 20, "n": torch.tensor(3)},
        "sparse": torch.eye(rows).to_sparse(),
        "pair": [torch.rand(rows), torch.rand(rows)],
    }


def test_a_plan_is_used_for_every_batch_of_the_same_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, cutter = Reads(monkeypatch), BatchCutter(rows=3)
    for rows in (5, 7, 4, 19):
        assert cutter.cut(batch_of(rows)).rows == rows
    assert reads.count == 1
    for rows in (5, 4, 6):  # a pair, as default_collate gives it
        cutter.cut([torch.rand(rows, 3), torch.rand(rows)])
    assert reads.count == 2
    cutter.cut(batch_of(6))
    assert reads.count == 2, "plans of several structures are kept"


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.rand(4, 3, requires_grad=True)},
        {"options": {"classes": ["b"] * 9, "n": torch.tensor(4)}},
        {"pos": torch.rand(1, 8)},
    ],
)
def test_a_plan_still_fits_where_nothing_reads_differently(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    reads, cutter = Reads(monkeypatch), BatchCutter(rows=3)
    cutter.cut(batch_of(5))
    assert cutter.cut({**batch_of(4), **change}).rows == 4 and reads.count == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.rand(5, 3)}, "batch['x'] has 5"),
        ({"names": ["a"] * 4 + [torch.rand(3)]}, "not one item for each of 4 rows"),
        ({"texts": (1, 2, 3, 4)}, ""),
        ({"texts": ("a", "b", "c")}, ""),
        ({"pos": torch.rand(3, 3)}, "batch['pos'] has 3"),
        ({"options": {"classes": ["a"] * 4, "n": torch.tensor(3)}}, ""),
        ({"options": {"classes": ["a"] * 20, "n": torch.arange(4)}}, ""),
        ({"options": {"classes": ["a"] * 20, "n": torch.arange(3)}}, "batch['options']['n'] has 3"),
        ({"sparse": torch.sparse_csr}, ""),
        ({"sparse": torch.sparse_csc}, "is laid out by columns"),
        ({"sparse": torch.eye(4)}, ""),
        ({"pair": [torch.rand(4), torch.rand(3)]}, "batch['pair'][1] (shape (3,)) has 3"),
        ({"dicts": [{"id": torch.rand(4)}] * 4}, ""),
        ({"new": 1}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_a_plan_is_never_used_where_a_value_reads_differently(change: Any, words: str) -> None:
    used, new = BatchCutter(rows=3), BatchCutter(rows=3)
    used.cut(batch_of(5))
    batch = {**batch_of(4), **change}
    if isinstance(batch["sparse"], torch.layout):
        batch["sparse"] = torch.eye(4).to_sparse(layout=batch["sparse"])
    if words:
        texts = []
        for cutter in (used, new):
            with pytest.raises(CutError) as caught:
                cutter.cut(batch)
            texts.append(str(caught.value))
        assert words in texts[0] and texts[0] == texts[1]
        return
    for sub, right in zip(used.cut(batch), new.cut(batch), strict=True):
        assert repr(sub.data) == repr(right.data)
    assert used.cut(batch).explain() == new.cut(batch).explain()


def test_explain_sees_the_coincidences_of_this_batch_not_of_the_plans() -> None:
    used = BatchCutter(rows=3)
    assert "Coincidence" not in used.cut({"x": torch.rand(5, 2), "mask": torch.rand(5, 4)}).explain()
    assert 'Coincidence: "mask"' in used.cut({"x": torch.rand(4, 2), "mask": torch.rand(4, 4)}).explain()


def test_counts_of_packed_entries_are_read_at_every_cut() -> None:
    used = BatchCutter(rows=1, layout={"x": packed("n")})
    for counts in ([1, 2], [3, 0], [0, 0, 4]):
        batch = {"n": torch.tensor(counts), "x": torch.arange(sum(counts)), "y": torch.rand(len(counts))}
        assert [len(sub.data["x"]) for sub in used.cut(batch)] == counts
    for counts, words in (([1, 2], "its counts add up to 3"), ([1, 1, 2], r"batch\['y'\] .*has 2 rows")):
        with pytest.raises(CutError, match=words):
            used.cut({"n": torch.tensor(counts), "x": torch.rand(4), "y": torch.rand(2)})


def test_the_layout_is_checked_against_each_new_structure() -> None:
    used = BatchCutter(rows=2, layout={"mask": SHARED, "in.y": PER_ROW})
    used.cut({"x": torch.rand(4), "mask": torch.rand(9), "in": {"y": torch.rand(4)}})
    with pytest.raises(CutError, match=r'"mask": ...} matches nothing in the batch; (its paths are|did you mean)'):
        used.cut({"x": torch.rand(4), "in": {"y": torch.rand(4)}})
