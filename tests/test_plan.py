from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from more_itertools import chunked_even

from batchsplit import CutError
from batchsplit.plan import check_limit, even_sizes, limited_sizes, offsets, ranges, shared_out


@pytest.mark.parametrize("value", [0, -1, 2.5, True, False, float("nan"), "8", None, [8]])
def test_a_limit_is_a_whole_number_of_at_least_1(value: Any) -> None:
    with pytest.raises(CutError, match=r"^rows=") as caught:
        check_limit("rows", value)
    assert "at least 1" in str(caught.value)


def test_the_unit_is_named() -> None:
    with pytest.raises(CutError, match="1 padded position; write area=1 or more"):
        check_limit("area", 0)
    with pytest.raises(CutError, match="a cut needs at least 1 part; write parts=1 or more"):
        check_limit("parts", -3)


@given(st.integers(1, 200), st.integers(1, 220))
def test_even_sizes_are_those_of_more_itertools(rows: int, limit: int) -> None:
    assert limited_sizes(rows, limit) == [len(chunk) for chunk in chunked_even(range(rows), limit)]


@given(st.integers(0, 200), st.integers(1, 220), st.sampled_from(["even", "full"]))
def test_limits_are_kept_and_every_row_is_there(rows: int, limit: int, sizes: str) -> None:
    found = limited_sizes(rows, limit, sizes)
    assert sum(found) == rows and all(0 < size <= limit for size in found)
    assert len(found) == -(-rows // limit)
    if sizes == "even":
        assert max(found, default=0) - min(found, default=0) <= 1
    else:
        assert all(size == limit for size in found[:-1])


@given(st.integers(1, 200), st.integers(1, 220))
def test_parts_are_as_many_as_asked_for_or_as_rows(rows: int, parts: int) -> None:
    found = even_sizes(rows, parts)
    assert len(found) == min(rows, parts) and sum(found) == rows
    assert max(found) - min(found) <= 1 and min(found) > 0


def test_b08_sizes() -> None:
    assert even_sizes(6, 5) == [2, 1, 1, 1, 1]
    assert even_sizes(3, 5) == [1, 1, 1]
    assert limited_sizes(146, 4) == [4] * 35 + [3] * 2
    assert limited_sizes(146, 4, "full") == [4] * 36 + [2]


@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_parts_of_several_batches(parts: int, rows: list[int]) -> None:
    given_out = shared_out(parts, rows)
    assert all(1 <= n <= count for n, count in zip(given_out, rows, strict=True))
    assert sum(given_out) == min(max(parts, len(rows)), sum(rows))


@given(st.lists(st.integers(1, 9), min_size=1))
def test_ranges_follow_each_other(sizes: list[int]) -> None:
    rows = [i for part in ranges(sizes) for i in range(part.start, part.stop)]
    assert rows == list(range(sum(sizes))) and offsets(sizes)[-1] == sum(sizes)
