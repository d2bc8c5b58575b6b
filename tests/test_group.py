"""Several loader batches as one mathematical batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from batchsplit import BatchCutter, CutError, axis, group


def batches(*rows: int) -> list[torch.Tensor]:
    return [torch.rand(n, 2 + n) for n in rows]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"batches": 2}, [[4, 4], [3, 2], [5]]),
        ({"batches": 9}, [[4, 4, 3, 2, 5]]),
        ({"rows": 8}, [[4, 4], [3, 2, 5]]),
        ({"rows": 5}, [[4, 4], [3, 2], [5]]),
        ({"rows": 1}, [[4], [4], [3], [2], [5]]),
    ],
)
def test_a_group_is_full_with_so_many_batches_or_rows(settings: dict[str, Any], sizes: list[list[int]]) -> None:
    loader = batches(4, 4, 3, 2, 5)
    found = list(group(loader, **settings))
    assert [[len(batch) for batch in one] for one in found] == sizes
    assert all(a is b for a, b in zip((batch for one in found for batch in one), loader, strict=True))
    for one in found:
        cut = BatchCutter(rows=2).cut(one)
        assert cut.rows == sum(map(len, one)) and sum(sub.share for sub in cut) == pytest.approx(1, abs=1e-15)


def test_lengths() -> None:
    assert len(group(batches(1, 1, 1, 1, 1), batches=2)) == 3
    with pytest.raises(TypeError, match="a group by rows has no length"):
        len(group(batches(1), rows=2))
    with pytest.raises(TypeError):
        len(group(iter(batches(1)), batches=2))


def test_wrong_arguments() -> None:
    settings: dict[str, Any]
    for settings in ({}, {"batches": 2, "rows": 3}):
        with pytest.raises(CutError, match="give either batches= or rows="):
            group([], **settings)
    for settings in ({"batches": 0}, {"rows": 0}, {"batches": 1.5}, {"rows": True}):
        with pytest.raises(CutError, match=r"(batches|rows)=.* at least 1"):
            group([], **settings)


def test_nothing_is_read_ahead() -> None:
    taken: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for i in range(5):
            taken.append(i)
            yield torch.rand(2)

    groups = iter(group(loader(), batches=2))
    next(groups)
    assert taken == [0, 1]
    assert len(next(groups)) == 2 and len(next(groups)) == 1 and taken == list(range(5))


def test_rows_are_counted_as_a_cutter_counts_them() -> None:
    loader = [{"x": torch.rand(7, n, 3)} for n in (2, 3, 4)]
    assert [len(one) for one in group(loader, rows=5, layout={"x": axis(1)})] == [2, 1]
    packs = [{"x": pack_sequence([torch.rand(3), torch.rand(1)])} for _ in range(4)]
    assert [len(one) for one in group(packs, rows=4)] == [2, 2]
    with pytest.raises(CutError, match=r"batch\['b'\] has 3"):
        list(group([{"a": torch.rand(2), "b": torch.rand(3)}], rows=4))


def test_each_batch_keeps_its_own_padding_and_structure() -> None:
    loader: list[Any] = [{"x": torch.rand(3, 7)}, (torch.rand(2, 5), ["a", "b"])]
    (one,) = group(loader, batches=2)
    cut = BatchCutter(rows=2).cut(one)
    assert [sub.data["x"].shape for sub in cut[:2]] == [(2, 7), (1, 7)] and cut[2].data[0].shape == (2, 5)
    text = cut.explain()
    assert "loader batch 0: 3 rows" in text and "loader batch 1: 2 rows" in text


def test_attributes_are_the_loaders() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    assert group(loader, batches=2).batch_size == 2
    with pytest.raises(AttributeError):
        _ = group(loader, batches=2).no_such_thing
