"""What holds for every batch and every cut: drawn batches of all kinds, nested and mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchsplit import PER_ROW, SHARED, BatchCutter, CutError, axis, join, packed
from kinds import difference
from strategies import Drawn, batches

TIMES = settings.default.max_examples if settings.default else 100  # 100 in CI, 5,000 in the large profile
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # torch_geometric, on import
]


@settings(max_examples=5 * TIMES)
@given(batches())
def test_a_joined_cut_is_the_batch_bit_for_bit(drawn: Drawn) -> None:
    batch = drawn.batch
    cut = drawn.cutter.cut(batch)
    assert not difference(batch, join(cut))
    assert all(type(sub.data) is type(batch) for sub in cut)
    assert not difference(batch, drawn.batch), "the batch itself was changed"


@settings(max_examples=5 * TIMES)
@given(batches())
def test_every_row_is_in_one_sub_batch_and_in_order(drawn: Drawn) -> None:
    batch = drawn.batch
    cut = drawn.cutter.cut(batch)
    assert cut.rows == drawn.rows
    for path, leaf, reach in drawn.leaves():
        for sub in cut:
            part = reach(sub.data)
            if leaf.rows is None:
                assert part is leaf.value or not difference(part, leaf.value), path
            elif leaf.marker is None or "packed" not in str(leaf.marker):
                assert len(leaf.rows(part)) == sub.rows, path
        if leaf.rows is not None:
            assert [row for sub in cut for row in leaf.rows(reach(sub.data))] == leaf.rows(leaf.value), path


@settings(max_examples=3 * TIMES)
@given(batches())
def test_tensors_and_arrays_are_views(drawn: Drawn) -> None:
    cut = drawn.cutter.cut(drawn.batch)
    for path, leaf, reach in drawn.leaves():
        for sub in cut if leaf.view is not None else ():
            assert leaf.view is not None
            assert _shares_memory(leaf.view(reach(sub.data)), leaf.view(leaf.value)), path
            assert _shares_memory(leaf.view(reach(sub.to("cpu").data)), leaf.view(leaf.value)), path


def _shares_memory(part: Any, whole: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.size == 0 or np.shares_memory(part, whole)
    return part.numel() == 0 or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@settings(max_examples=3 * TIMES)
@given(batches())
def test_limits_are_respected(drawn: Drawn) -> None:
    cut = drawn.cutter.cut(drawn.batch)
    sizes = [sub.rows for sub in cut]
    assert sum(sizes) == drawn.rows and min(sizes) > 0
    if drawn.limit.get("sizes") == "full":
        assert set(sizes[:-1]) <= {drawn.limit["rows"]}
    else:
        assert max(sizes) - min(sizes) <= 1
    most = drawn.limit.get("rows") or drawn.limit.get("area", 3 * drawn.rows) // 3
    assert max(sizes) <= most
    if "parts" in drawn.limit:
        assert len(sizes) == min(drawn.limit["parts"], drawn.rows)
    else:
        assert len(sizes) == -(-drawn.rows // most)


@settings(max_examples=5 * TIMES)
@given(st.data())
def test_a_leaf_that_is_a_row_short_is_an_error_that_names_it(data: st.DataObject) -> None:
    drawn = data.draw(batches(min_rows=3))  # (one row less than two is one row, which broadcasts)
    shortened = [placed for placed in drawn.leaves() if placed.leaf.short is not None]
    assume(shortened)
    path, leaf, _ = data.draw(st.sampled_from(shortened))
    assert leaf.short is not None
    batch = drawn.built(leaf, leaf.short(leaf.value))
    used = drawn.cutter
    used.cut(drawn.batch)
    for cutter in (drawn.cutter, used):
        with pytest.raises(CutError) as caught:
            cutter.cut(batch)
        assert _named(path, str(caught.value)), f"{path} is not in: {caught.value}"


def _named(path: str, text: str) -> bool:
    """Does a message name the path, as layout or as code writes it?"""
    return path in text or path in text.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


# Batches of the same keys and types whose values may read differently: the plan of one is never to be used for another.


def _tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).view(shape)


SIZES = st.sampled_from([2, 3, 2, 3, 1, 4, 0])
WORDS, NUMBERS = st.sampled_from(["a", "bc", "d"]), st.integers(0, 3)
TENSORS = st.one_of(st.builds(_tensor, SIZES), st.builds(_tensor, SIZES, SIZES), st.just(_tensor()))
LAYOUTS = st.sampled_from([torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
RAGGED = st.lists(SIZES.map(_tensor), min_size=1, max_size=3)
# Each of these draws values of one type: what stands at one place of several batches.
PLACES: list[st.SearchStrategy[Any]] = [
    TENSORS,
    st.sampled_from([2, 3]).map(_tensor),
    st.builds(lambda rows, layout: _tensor(rows, 2).to_sparse(layout=layout), st.sampled_from([2, 3, 1]), LAYOUTS),
    st.one_of(RAGGED.map(torch.nested.nested_tensor), TENSORS),
    st.lists(WORDS, max_size=3),
    st.lists(NUMBERS, max_size=3),
    st.one_of(st.lists(WORDS, max_size=3), st.lists(NUMBERS, max_size=3)).map(tuple),
    st.lists(NUMBERS, min_size=1, max_size=4).map(torch.tensor),
    st.lists(TENSORS, min_size=1, max_size=3),
    RAGGED,
    st.lists(st.fixed_dictionaries({"k": TENSORS}), max_size=3),
    st.lists(st.fixed_dictionaries({"k": NUMBERS}), max_size=3),
    st.lists(st.lists(WORDS, max_size=2), max_size=3),
    st.fixed_dictionaries({"k": st.one_of(TENSORS, st.lists(WORDS, max_size=3))}),
    st.tuples(TENSORS, st.lists(WORDS, max_size=3)),
    st.builds(lambda rows: np.zeros(rows), SIZES),
]


def _counts_of_b(batch: Any) -> Any:
    return batch.get("b", []) if isinstance(batch, dict) else [*batch, [], []][1]


MARKS = [SHARED, PER_ROW, axis(1), axis(-1), packed("b"), packed("1"), packed(1), packed(2), packed(_counts_of_b)]
MARKERS = st.sampled_from(MARKS)
DECLARED = st.dictionaries(st.sampled_from(["a", "a.k", "a.0", "0"]), MARKERS, max_size=1)
WRAPPED = st.sampled_from([lambda values: dict(zip("abc", values)), list, tuple])


def _outcome(cutter: BatchCutter, batch: Any) -> str:
    try:
        cut = cutter.cut(batch)
        return repr([sub.data for sub in cut]) + repr(join(cut)) + cut.explain()
    except CutError as error:
        return f"CutError: {error}"


@settings(max_examples=6 * TIMES)
@given(st.data())
def test_a_used_cutter_and_a_new_one_agree(data: st.DataObject) -> None:
    layout = data.draw(st.one_of(st.just({}), DECLARED))
    limit: dict[str, Any] = data.draw(st.sampled_from([{"rows": 1}, {"parts": 2}, {"area": 6}]))
    wrap = data.draw(WRAPPED)
    places = data.draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3))
    used = BatchCutter(**limit, layout=layout)
    for _ in range(6):
        batch = wrap([data.draw(place) for place in places])
        assert _outcome(used, batch) == _outcome(BatchCutter(**limit, layout=layout), batch)
