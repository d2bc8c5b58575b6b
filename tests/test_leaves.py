"""Tensors, arrays, lists and scalars: what each is taken for, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchsplit import PER_ROW, SHARED, BatchCutter, Cut, CutError, axis, join, packed, register
from kinds import Words, difference


def cut(batch: Any, rows: int = 2, **settings: Any) -> Cut:
    return BatchCutter(rows=rows, **settings).cut(batch)


def refusal(batch: Any, rows: int = 2, **settings: Any) -> str:
    with pytest.raises(CutError) as caught:
        cut(batch, rows, **settings)
    return str(caught.value)


class Marked(torch.Tensor):
    """A tensor subclass."""


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.rand(5, 3),
    "one axis": lambda: torch.arange(5),
    "no width": lambda: torch.zeros(5, 0),
    "no width, two axes": lambda: torch.zeros(5, 0, 3),
    "bool": lambda: torch.rand(5, 3) > 0.5,
    "complex": lambda: torch.rand(5, 3, dtype=torch.complex64),
    "conjugated": lambda: torch.rand(5, 3, dtype=torch.complex64).conj(),
    "bfloat16": lambda: torch.rand(5, 3).bfloat16(),
    "uint8": lambda: torch.randint(255, (5, 3), dtype=torch.uint8),
    "transposed": lambda: torch.rand(3, 5).t(),
    "every other": lambda: torch.rand(10, 3)[::2],
    "expanded rows": lambda: torch.rand(1, 3).expand(5, 3),
    "expanded width": lambda: torch.rand(5, 1).expand(5, 3),
    "channels last": lambda: torch.rand(5, 3, 4, 2).to(memory_format=torch.channels_last),
    "subclass": lambda: torch.rand(5, 3).as_subclass(Marked),
    "requires grad": lambda: torch.rand(5, 3, requires_grad=True),
    "with a graph": lambda: torch.rand(5, 3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.rand(5, 3)),
    "meta": lambda: torch.zeros(5, 3, device="meta"),
    "NaN": lambda: torch.full((5, 3), float("nan")),
}


@pytest.mark.parametrize("name", list(TENSORS))
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_tensors_are_cut_as_views(name: str, rows: int) -> None:
    whole = TENSORS[name]()
    found = cut({"x": whole, "row": torch.arange(5)}, rows)
    assert not difference(whole, join(found)["x"])
    for sub in found:
        part, right = sub.data["x"], whole[sub.where]
        assert not difference(part, right) and part.stride() == right.stride() and part.device == whole.device
        assert part.requires_grad == whole.requires_grad
        if not whole.is_meta:
            assert part.data_ptr() == right.data_ptr()
            assert sub.to("cpu").data["x"].data_ptr() == part.data_ptr()


def test_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        whole = torch.rand(5, 3)
    assert torch.equal(join(cut(whole)), whole) and cut(whole)[1].data.is_inference()


def test_gradients_reach_the_batchs_own_tensor() -> None:
    whole = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    for sub in cut({"x": whole}):
        (sub.data["x"] ** 3).sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(whole.grad, 3 * whole.detach() ** 2, rtol=1e-12, atol=0)


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "float": lambda: np.random.rand(5, 3),
    "float16": lambda: np.random.rand(5).astype("f2"),
    "text": lambda: np.array(["a", "bb", "ccc", "d", "e"]),
    "bytes": lambda: np.array([b"a", b"bb", b"c", b"d", b"e"]),
    "dates": lambda: np.arange("2020-01-01", "2020-01-06", dtype="datetime64[D]"),
    "structured": lambda: np.array([(i, [i, i]) for i in range(5)], dtype=[("id", "i4"), ("box", "f4", (2,))]),
    "record": lambda: np.array([(i, i / 2) for i in range(5)], dtype=[("a", "i4"), ("b", "f8")]).view(np.recarray),
    "object": lambda: np.array([None, "a", {"k": 1}, (1, 2), 3], dtype=object),
    "masked": lambda: np.ma.masked_array(np.arange(10).reshape(5, 2), mask=np.arange(10).reshape(5, 2) % 2 == 1, fill_value=7),
    "not masked": lambda: np.ma.masked_array(np.arange(5.0)),
    "fortran": lambda: np.asfortranarray(np.random.rand(5, 3)),
    "reversed": lambda: np.arange(5)[::-1],
    "no width": lambda: np.zeros((5, 0)),
}


@pytest.mark.parametrize("name", list(ARRAYS))
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_arrays_are_cut_as_views(name: str, rows: int) -> None:
    whole = ARRAYS[name]()
    found = cut({"x": whole}, rows)
    assert not difference(whole, join(found)["x"]) and type(join(found)["x"]) is type(whole)
    for sub in found:
        part = sub.data["x"]
        assert type(part) is type(whole) and not difference(part, whole[sub.where])
        assert np.shares_memory(part, whole) or whole.size == 0


def test_a_memory_map_is_not_read_by_the_cut(tmp_path: Path) -> None:
    whole = np.memmap(tmp_path / "array", dtype="f4", mode="w+", shape=(5, 3))
    whole[:] = np.random.rand(5, 3)
    found = cut({"x": whole, "y": np.arange(5)})
    assert all(type(sub.data["x"]) is np.memmap and np.shares_memory(sub.data["x"], whole) for sub in found)
    joined = join(found)["x"]
    assert type(joined) is np.ndarray and joined.tobytes() == whole.tobytes()


def test_arrays_on_another_axis() -> None:
    whole = np.random.rand(3, 5, 2)
    for marker in (axis(1), axis(-2)):
        found = cut({"x": whole, "y": np.arange(5)}, layout={"x": marker})
        assert [sub.data["x"].shape for sub in found] == [(3, 2, 2), (3, 2, 2), (3, 1, 2)]
        assert not difference(join(found)["x"], whole)


# Shared leaves

SCALARS = [3, 2.5, True, None, "abcd", "", b"ab", 1j, Decimal("1.5")]
SCALARS += [np.float32(2), np.str_("abcd"), np.datetime64("2020")]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_are_shared(value: Any) -> None:
    found = cut({"x": torch.rand(4, 2), "value": value})
    assert all(sub.data["value"] is value for sub in found) and join(found)["value"] is value


def test_b06_a_tensor_without_axes_is_shared() -> None:
    batch = {"x": torch.zeros(4, 2), "n": torch.tensor(37), "a": np.array(1.5)}
    found = cut(batch, 3)
    assert [sub.data["n"] is batch["n"] and sub.data["a"] is batch["a"] for sub in found] == [True, True]
    assert join(found)["n"].dim() == 0 and join(found)["n"] == 37
    assert refusal({"n": torch.tensor(37), "rate": 0.5, "name": "abcd"}).startswith("nothing in batch carries rows")


def test_b11_a_first_axis_of_one_broadcasts() -> None:
    batch: dict[str, Any] = {"ids": torch.rand(4, 6), "pos": torch.arange(6)[None], "mask": torch.ones(1, 1, 6, 6)}
    batch["a"] = np.ones((1, 6))
    for sub in cut(batch):
        assert all(sub.data[name] is batch[name] for name in ("pos", "mask", "a"))
    (only,) = cut({"ids": torch.rand(1, 6), "pos": torch.arange(6)[None]})
    assert only.data["pos"].shape == (1, 6)


def test_b11_another_first_axis_has_to_be_declared() -> None:
    batch = {"ids": torch.rand(4, 6), "cache_position": torch.arange(6)}
    for both in (batch, dict(reversed(batch.items()))):
        text = refusal(both)
        for part in ("batch['cache_position']", "(6,)", "4", 'layout={"cache_position": SHARED}'):
            assert part in text
    found = cut(batch, layout={"cache_position": SHARED})
    assert all(sub.data["cache_position"] is batch["cache_position"] for sub in found)
    text = refusal(batch, layout={"cache_positions": SHARED})
    assert text == 'layout={"cache_positions": ...} matches nothing in the batch; did you mean "cache_position"?'


# Lists


def test_b02_strings_options_and_a_lone_string() -> None:
    batch = {
        "gen": {},
        "x": torch.arange(4),
        "prompt": ["a", "b", "c", "d"],
        "tag": "news",
        "opts": {"top_p": 0.9, "stop": None, "classes": ["cat", "dog", "cow"], "more": []},
    }
    found = cut(batch)
    assert [sub.data["prompt"] for sub in found] == [["a", "b"], ["c", "d"]]
    for sub in found:
        assert sub.data["tag"] == "news" and sub.data["gen"] == {} and sub.data["opts"] == batch["opts"]
    assert not difference(join(found), batch)


def test_the_strings_of_default_collate_are_per_row() -> None:
    samples = torch.utils.data.default_collate([(torch.rand(2), "a", {"id": "x"}), (torch.rand(2), "b", {"id": "y"})])
    assert [sub.data[1:] for sub in cut(samples, 1)] == [[("a",), {"id": ["x"]}], [("b",), {"id": ["y"]}]]
    # But a tuple of other things, or of another length, is structure.
    for sub in cut({"x": torch.rand(2, 1), "numbers": (1, 2), "mixed": ("a", 1), "three": ("a", "b", "c")}, 1):
        assert sub.data["numbers"] == (1, 2) and sub.data["mixed"] == ("a", 1) and sub.data["three"] == ("a", "b", "c")


def test_b18_lists_bear_rows_by_their_length() -> None:
    ragged = [torch.zeros(14, 2), torch.zeros(17, 2), torch.zeros(9, 2)]
    assert cut({"x": ragged, "y": torch.arange(3)}).rows == 3
    assert cut({"q": {name: torch.zeros(16, 5) for name in ("ids", "mask", "type")}}).rows == 16
    assert cut({"text": ["a"] * 7}).rows == 7
    text = refusal({"x": ragged[:2]})
    assert "with 14 and 17 for the lengths of its items" in text and 'layout={"x": PER_ROW}' in text
    assert cut({"x": ragged[:2]}, layout={"x": PER_ROW}).rows == 2
    assert cut({"x": ragged[:2], "names": ["a", "b"]}).rows == 2


def test_lists_of_dicts_numbers_and_lists() -> None:
    batch = {
        "x": torch.arange(3),
        "targets": [{"boxes": torch.rand(n, 4), "id": n} for n in (2, 0, 3)],
        "tokens": [[1, 2], [3], []],
        "scores": [0.5, 1.5, None],
        "objects": [object(), object(), object()],
    }
    found = cut(batch)
    assert found[1].data["targets"] == batch["targets"][2:] and found[0].data["tokens"] == [[1, 2], [3]]
    assert found[0].data["scores"] == [0.5, 1.5] and found[0].data["objects"][1] is batch["objects"][1]
    assert join(found)["targets"] == batch["targets"]


# Ambiguity


def test_b01_a_pair_of_tensors_is_structure_also_when_the_batch_has_two_rows() -> None:
    found = cut([torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])], 1)
    assert [[len(leaf) for leaf in sub.data] for sub in found] == [[1, 1], [1, 1]]
    assert found[1].data[1].tolist() == [1]


def test_b01_ragged_rows_are_one_item_a_row() -> None:
    boxes = [torch.zeros(2, 4), torch.zeros(3, 4)]
    found = cut({"x": torch.zeros(2, 5), "boxes": boxes}, 1)
    assert [sub.data["boxes"] == [box] for sub, box in zip(found, boxes, strict=True)] == [True, True]


def test_b01_two_ragged_rows_of_two_boxes_can_be_told() -> None:
    batch = {"x": torch.zeros(2, 5), "boxes": [torch.zeros(2, 4), torch.ones(2, 4)]}
    found = cut(batch, 1)
    assert [[box.shape for box in sub.data["boxes"]] for sub in found] == [[(1, 4), (1, 4)]] * 2
    assert 'fit another reading too; for that one write layout={"boxes": PER_ROW}' in found.explain()
    declared = cut(batch, 1, layout={"boxes": PER_ROW})
    assert [[box.shape for box in sub.data["boxes"]] for sub in declared] == [[(2, 4)], [(2, 4)]]


def test_two_readings_that_differ_are_an_error_with_a_line_for_each() -> None:
    batch = [torch.rand(4, 2), torch.rand(4, 3), torch.rand(1, 3)]
    text = refusal(batch)
    assert 'layout={"": PER_ROW}' in text and 'layout={"0": PER_ROW, "1": PER_ROW, "2": PER_ROW}' in text
    assert cut(batch, layout={"": PER_ROW}).rows == 3
    found = cut(batch, layout={"0": PER_ROW, "2": SHARED})
    assert found.rows == 4 and all(sub.data[2] is batch[2] for sub in found)
    samples = [{"x": torch.rand(4), "y": torch.rand(4)} for _ in range(3)]
    assert 'layout={"": PER_ROW}' in refusal(samples) and cut(samples, layout={"": PER_ROW}).rows == 3
    assert "batch[0]['x'] has 4" in refusal([{"x": torch.rand(4)}, {"y": torch.rand(3)}])
    ragged = [{"image": torch.rand(3, 8, 8), "boxes": torch.rand(n, 4)} for n in (2, 5)]
    assert cut(ragged, 1)[1].data == [ragged[1]]


def test_leaves_that_disagree_are_all_named() -> None:
    batch = {"a": torch.zeros(4, 2), "b": torch.zeros(6, 2), "c": {"d": np.zeros(4)}}
    for both in (batch, dict(reversed(batch.items()))):
        text = refusal(both)
        assert all(part in text for part in ("batch['a'] has 4", "batch['b'] has 6", "batch['c']['d'] has 4"))
        assert 'If the batch has 4 rows: to pass it whole, write layout={"b": SHARED}' in text


UNKNOWN = [range(4), {1, 2}, frozenset(), object(), torch.float32, iter([1]), bytearray(b"abcd")]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_an_unknown_object_is_an_error(value: Any) -> None:
    name = type(value).__name__
    for batch in ({"x": torch.rand(4, 2), "in": [value, 1]}, {"in": (value,)}):
        text = refusal(batch)
        assert text.startswith("batch['in'][0] is a") and f" {name}, which batchsplit can't cut" in text
        assert 'layout={"in.0": SHARED}' in text and f"register({name}, count=" in text
    assert all(sub.data["in"] is value for sub in cut({"x": torch.rand(4), "in": value}, layout={"in": SHARED}))
    assert refusal(value).startswith("batch is a")


# Declared leaves


def test_b14_rnn_states_and_time_first_inputs() -> None:
    batch = {"x": torch.rand(7, 5, 3), "h": torch.rand(2, 5, 4)}
    found = cut(batch, layout={"x": axis(1), "h": axis(1)})
    assert [(sub.data["x"].shape, sub.data["h"].shape) for sub in found] == [
        ((7, 2, 3), (2, 2, 4)),
        ((7, 2, 3), (2, 2, 4)),
        ((7, 1, 3), (2, 1, 4)),
    ]
    assert not difference(join(found), batch)
    text = refusal(batch)
    assert "batch['x'] has 7" in text and 'layout={"x": axis(1), "h": axis(1)}' in text
    shown = cut({"x": torch.rand(5, 7, 3), "h": torch.rand(5, 5, 4)}).explain()
    assert 'Coincidence: "h" fits another reading too; for that one write layout={"h": axis(1)}' in shown
    shown = cut({"x": torch.rand(5, 7, 3), "h": torch.rand(1, 5, 4)}).explain()
    assert 'layout={"h": axis(1)}' in shown


def test_b14_an_lstm_over_time_first_rows_has_the_unsplit_gradients(float64: None) -> None:
    model = torch.nn.LSTM(3, 4, num_layers=2)
    batch = {"x": torch.rand(7, 5, 3), "state": (torch.rand(2, 5, 4), torch.rand(2, 5, 4))}
    weights = torch.rand(7, 1, 4)

    def gradients(total: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(total, list(model.parameters())))

    def loss(data: Any) -> torch.Tensor:
        return (model(data["x"], data["state"])[0].sin() * weights).sum(dim=(0, 2)).mean()

    right = gradients(loss(batch))
    found = cut(batch, layout={"x": axis(1), "state": axis(1)})
    total = torch.zeros(())
    for sub in found:
        total = total + loss(sub.data) * sub.share
    for a, b in zip(gradients(total), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_caches_are_tuples_of_layers_of_tensors() -> None:
    cache = tuple((torch.rand(4, 2, 6, 3), torch.rand(4, 2, 6, 3)) for _ in range(4))
    found = cut({"ids": torch.rand(4, 6), "past_key_values": cache})
    assert all(key.shape == (2, 2, 6, 3) for sub in found for layer in sub.data["past_key_values"] for key in layer)
    assert type(found[0].data["past_key_values"][0]) is tuple and not difference(join(found)["past_key_values"], cache)


def test_b15_images_and_patches_go_with_the_rows_that_own_them() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 4, 2], [1, 2, 4]])
    batch = {
        "input_ids": torch.arange(27).view(3, 9),
        "image_grid_thw": grids,
        "pixel_values": torch.arange(120.0).view(20, 6),
        "images_per_row": torch.tensor([1, 0, 2]),
    }

    def patches(data: Any) -> list[int]:
        images = data["image_grid_thw"].prod(1).split(data["images_per_row"].tolist())
        return [int(own.sum()) for own in images]

    layout = {"image_grid_thw": packed("images_per_row"), "pixel_values": packed(patches)}
    found = cut(batch, layout=layout)
    assert [(s.data["image_grid_thw"].shape, s.data["pixel_values"].shape) for s in found] == [
        ((1, 3), (4, 6)),
        ((2, 3), (16, 6)),
    ]
    assert not difference(join(found), batch)
    middle = cut(batch, 1, layout=layout)[1].data
    assert middle["image_grid_thw"].shape == (0, 3) and middle["pixel_values"].shape == (0, 6)
    text = refusal(batch)
    assert "batch['pixel_values']" in text and "(20, 6)" in text and "packed(counts)" in text
    shown = cut(batch, layout={"pixel_values": packed(patches)}).explain()
    assert 'Coincidence: "image_grid_thw" fits another reading too; for that one write layout' in shown


def test_b13_running_offsets_are_rebased() -> None:
    batch = {"tokens": torch.arange(10).view(2, 5), "cu": torch.tensor([0, 3, 5, 7, 10]), "max_q": 3}
    text = refusal(batch)
    assert "batch['cu'] has 5" in text and "batch['tokens'] has 2" in text
    texts_per_row = packed(lambda data: [2, 2])
    by_hand = lambda leaf, rows: leaf[2 * rows.start : 2 * rows.stop + 1] - leaf[2 * rows.start]  # noqa: E731
    for marker in (texts_per_row, packed(2), by_hand):
        found = cut(batch, 1, layout={"cu": marker})
        assert [sub.data["cu"].tolist() for sub in found] == [[0, 3, 5], [0, 2, 5]]
        assert all(sub.data["max_q"] == 3 for sub in found) and not difference(join(found), batch)
    five = {"tokens": torch.rand(5, 4), "cu": torch.tensor([0, 3, 5, 7, 10])}
    assert 'Coincidence: "cu" fits another reading too' in cut(five).explain()


def test_b13_flat_tokens_with_offsets_of_their_rows() -> None:
    lengths = torch.tensor([3, 0, 4, 1])
    offsets = torch.tensor([0, 3, 3, 7, 8], dtype=torch.int32)
    batch = {"tokens": torch.arange(8), "cu_seqlens": offsets, "lengths": lengths, "numpy": offsets.numpy()}
    layout = dict.fromkeys(("tokens", "cu_seqlens", "numpy"), packed("lengths"))
    for marker in (packed("lengths"), packed(1)):
        found = cut(batch, layout={**layout, "cu_seqlens": marker})
        assert [sub.data["cu_seqlens"].tolist() for sub in found] == [[0, 3, 3], [0, 4, 5]]
        assert found[1].data["numpy"].tolist() == [0, 4, 5] and found[1].data["tokens"].tolist() == [3, 4, 5, 6, 7]
        assert found[0].data["cu_seqlens"].dtype == torch.int32 and not difference(join(found), batch)
    # As many tokens as offsets: which of the two a leaf is its values say.
    small = {"tokens": torch.tensor([5, 6, 7]), "cu": torch.tensor([0, 1, 3]), "lengths": torch.tensor([1, 2])}
    found = cut(small, 1, layout={"tokens": packed("lengths"), "cu": packed("lengths")})
    assert [(s.data["tokens"].tolist(), s.data["cu"].tolist()) for s in found] == [([5], [0, 1]), ([6, 7], [0, 2])]


def test_packed_entries_in_lists_arrays_and_containers() -> None:
    batch = {"n": [2, 0, 1], "in": {"words": ["a", "b", "c"], "a": np.arange(3), "t": (torch.rand(3, 2), 7)}}
    found = cut(batch, layout={"in": packed("n")})
    assert [sub.data["in"]["words"] for sub in found] == [["a", "b"], ["c"]] and len(found[0].data["in"]["t"][0]) == 2
    assert not difference(join(found), batch)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        (packed("ns"), 'no such leaf; did you mean "n"?'),
        (packed("f"), "have to be one whole number, 0 or more, for each row"),
        (packed(lambda data: torch.eye(3).to_sparse()), "have to be one whole number, 0 or more, for each row"),
        (packed(lambda data: torch.ones(3, device="meta")), "have to be one whole number, 0 or more, for each row"),
        (packed(lambda data: 3), "have to be one whole number, 0 or more, for each row"),
        (packed(lambda data: [1, -1, 6]), "have to be one whole number, 0 or more, for each row"),
        (packed(lambda data: [1, 2, 4]), 'packed leaf "x" has 6 entries, but its counts add up to 7'),
        (packed(lambda data: [3, 3]), "batch['y'] (shape (3,)) has 3 rows, neither 1 nor the batch's 2 (known by batch['x'])"),
        (packed(4), "has 6 entries, no multiple of 4 a row"),
    ],
)
def test_packed_entries_whose_counts_do_not_fit(marker: Any, words: str) -> None:
    batch = {"y": torch.rand(3), "n": torch.tensor([1, 2, 3]), "f": torch.rand(3), "x": torch.rand(6, 2)}
    cutter = BatchCutter(rows=2, layout={"x": marker})
    with pytest.raises(CutError) as caught:
        cutter.cut(batch)
    assert words in str(caught.value)


def test_a_function_of_the_leaf_and_its_rows() -> None:
    batch = {"x": torch.arange(5), "pairs": torch.arange(25).view(5, 5)}
    found = cut(batch, layout={"pairs": lambda leaf, rows: leaf[rows, rows]})
    assert [sub.data["pairs"].shape for sub in found] == [(2, 2), (2, 2), (1, 1)]
    assert join(found)["pairs"] is batch["pairs"]  # nobody knows the way back: the batch's own is given


def test_markers_where_there_is_nothing_to_cut() -> None:
    batch = {"x": torch.rand(4, 2), "n": 3, "t": torch.tensor(1.0), "o": object()}
    for path, marker in (("n", PER_ROW), ("n", axis(1)), ("n", packed(2)), ("o", PER_ROW)):
        assert f"is declared {marker}, but a" in refusal(batch, layout={path: marker})
    assert "batch['t'] is declared axis(1), but its shape is ()" in refusal(batch, layout={"t": axis(1)})
    assert "batch['x'] is declared axis(2), but its shape is (4, 2)" in refusal(batch, layout={"x": axis(2)})
    options = {"options": {"a": 1, "b": ["c"]}, "x": torch.rand(4)}
    assert "batch['options'] is declared axis(1), but nothing in it has rows" in refusal(options, layout={"options": axis(1)})
    assert "batch['t'] is declared packed(2), but it has no axis" in refusal(batch, layout={"t": packed(2)})


# Registered types


def test_a_registered_type_is_cut_its_own_way() -> None:
    batch = {"words": Words(list("abcde")), "x": torch.arange(5)}
    found = cut(batch)
    assert [sub.data["words"].words for sub in found] == [["a", "b"], ["c", "d"], ["e"]]
    found[0].data["words"].words.append("new")
    assert found[0].data["words"].words == ["a", "b"], "each time a new part"
    assert not difference(join(found), batch)
    assert "batch['words'] has 4" in refusal({**batch, "words": Words(list("abcd"))})


def test_what_a_registered_type_gives_is_checked() -> None:
    class Odd:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

    register(Odd, count=lambda odd: odd.rows, take=lambda odd, rows: Odd(1), join=lambda parts: parts[0])
    assert "count of the registered Odd gave 'four', not a number of rows" in refusal(Odd("four"))
    with pytest.raises(CutError, match=r"take of the registered Odd gave 1 rows for slice\(0, 2\)"):
        cut(Odd(4))[0].data  # noqa: B018


def test_a_type_registered_after_it_was_read_is_read_anew() -> None:
    class Late(dict):
        """A dict until somebody knows better."""

    cutter, batch = BatchCutter(rows=2), Late(x=torch.rand(4, 2), y=torch.rand(4))
    assert cutter.cut(batch).rows == 4
    register(
        Late, count=lambda late: 3, take=lambda late, rows: Whole(rows.stop - rows.start), join=lambda parts: parts
    )
    register(Whole, count=lambda whole: whole.rows, take=lambda whole, rows: whole, join=lambda parts: parts)
    assert cutter.cut(batch).rows == 3


class Whole(dict):
    def __init__(self, rows: int) -> None:
        self.rows = rows
