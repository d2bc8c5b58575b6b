"""Leaves with a layout of their own: PackedSequence, jagged and sparse tensors, TensorDict, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from batchsplit import PER_ROW, BatchCutter, CutError, axis, join, packed
from batchsplit.leaves import Spans
from batchsplit.optional_types import GRAPHS
from batchsplit.special import detached
from kinds import difference

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]


def refusal(batch: Any, **settings: Any) -> str:
    with pytest.raises(CutError) as caught:
        BatchCutter(rows=2, **settings).cut(batch)
    return str(caught.value)


# PackedSequence


def sequences(*lengths: int, width: int = 3, grad: bool = False) -> list[torch.Tensor]:
    return [torch.rand(n, width, dtype=torch.float64, requires_grad=grad) for n in lengths]


def test_b20_parts_hold_their_rows_in_the_batchs_order() -> None:
    whole = pack_sequence(
        [torch.tensor(row) for row in ([1.0], [4.0, 5.0, 6.0], [2.0, 3.0], [7.0, 8.0, 9.0])], enforce_sorted=False
    )
    assert whole.sorted_indices is not None and whole.sorted_indices.tolist() == [1, 3, 2, 0]
    assert whole.batch_sizes.tolist() == [4, 3, 2]
    first, last = BatchCutter(rows=2).cut(whole)
    assert first.data.data.tolist() == [4, 1, 5, 6] and first.data.batch_sizes.tolist() == [2, 1, 1]
    assert first.data.sorted_indices.tolist() == [1, 0] and first.data.unsorted_indices.tolist() == [1, 0]
    rows, lengths = pad_packed_sequence(last.data, batch_first=True)
    assert lengths.tolist() == [2, 3] and rows[0, :2].tolist() == [2, 3] and rows[1].tolist() == [7, 8, 9]


@pytest.mark.parametrize("lengths", [(1, 3, 2, 3), (3, 3, 3, 3), (1, 1, 1), (4, 2, 2, 1), (5,)])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_b20_joined_it_is_the_same_bit_for_bit(lengths: tuple[int, ...], in_order: bool, rows: int) -> None:
    lengths = tuple(sorted(lengths, reverse=True)) if in_order else lengths
    whole = pack_sequence(sequences(*lengths), enforce_sorted=in_order)
    cut = BatchCutter(rows=rows).cut({"x": whole, "y": torch.arange(len(lengths))})
    assert not difference(whole, join(cut)["x"])
    for sub in cut:
        part = sub.data["x"]
        assert type(part) is PackedSequence and (part.sorted_indices is None) == (whole.sorted_indices is None)
        back, own = pad_packed_sequence(part, batch_first=True)
        assert tuple(own.tolist()) == lengths[sub.where]
        assert torch.equal(back, pad_packed_sequence(whole, batch_first=True)[0][sub.where, : max(own)])


@pytest.mark.parametrize("in_order", [True, False])
def test_b20_an_lstm_has_the_gradients_and_outputs_of_the_unsplit_batch(in_order: bool, float64: None) -> None:
    lengths = (4, 3, 3, 2, 1) if in_order else (2, 4, 1, 3, 3)
    rows = sequences(*lengths, grad=True)
    model = nn.LSTM(3, 5, bidirectional=True)
    whole = pack_sequence(rows, enforce_sorted=in_order)
    weights = torch.rand(10)

    def run(x: PackedSequence) -> tuple[PackedSequence, torch.Tensor]:
        output, (hidden, _) = model(x)
        return output, hidden.transpose(0, 1)

    def loss(output: PackedSequence, hidden: torch.Tensor) -> torch.Tensor:
        return (output.data.sin() @ weights).sum() + (hidden**3).sum()

    def gradients(total: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(total, [*model.parameters(), *rows], retain_graph=True))

    cut = BatchCutter(rows=2).cut(whole)
    outputs = [run(sub.data) for sub in cut]
    expected, expected_hidden = run(whole)
    for found, right in zip(
        gradients(sum((loss(*output) for output in outputs), torch.zeros(()))),
        gradients(loss(expected, expected_hidden)),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    joined, hidden = cut.join(outputs)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-12, atol=1e-14)
    for found, right in zip(pad_packed_sequence(joined), pad_packed_sequence(expected), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


def test_b20_total_length_keeps_the_padding_of_the_whole() -> None:
    whole = pack_sequence(sequences(1, 3, 2, 3), enforce_sorted=False)
    first = BatchCutter(rows=1).cut(whole)[0].data
    assert pad_packed_sequence(first, batch_first=True)[0].shape == (1, 1, 3)
    total = len(whole.batch_sizes)
    assert pad_packed_sequence(first, batch_first=True, total_length=total)[0].shape == (1, 3, 3)


def test_a_packed_sequence_beside_other_rows_and_declared() -> None:
    whole = pack_sequence(sequences(2, 1, 3), enforce_sorted=False)
    text = refusal({"x": whole, "y": torch.rand(4, 2)})
    assert "batch['x'] has 3" in text and "batch['y'] has 4" in text
    assert len(BatchCutter(rows=2, layout={"x": PER_ROW}).cut({"x": whole, "y": torch.rand(3)})) == 2
    for marker in (axis(1), packed("y")):
        text = refusal({"x": whole, "y": torch.rand(3)}, layout={"x": marker})
        assert "a PackedSequence is cut by its own rows" in text and 'layout={"x": PER_ROW}' in text


def test_a_packed_sequence_moves() -> None:
    whole = pack_sequence(sequences(2, 1, 3), enforce_sorted=False)
    sub = BatchCutter(rows=2).cut((whole, "a"))[0]
    assert sub.to("meta").data[0].data.is_meta and sub.to("cpu").data[0].data.data_ptr() == sub.data[0].data.data_ptr()


def test_outputs_of_every_kind_are_detached() -> None:
    x = torch.rand(4, 3, requires_grad=True) * 2
    packed_rows = pack_sequence([x[:2, 0], x[:1, 1]])
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
    outputs = detached({"x": x, "p": packed_rows, "n": nested, "names": ["a"], "list": [x, 3]})
    tensors = [outputs["x"], outputs["p"].data, outputs["n"], outputs["list"][0]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert torch.equal(outputs["p"].data, packed_rows.data) and x.requires_grad and packed_rows.data.requires_grad


# Jagged nested tensors


def jagged(*lengths: int, width: int = 2, **bounds: Any) -> Any:
    values = torch.rand(sum(lengths), width, dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets, **bounds)


@pytest.mark.parametrize("lengths", [(3, 1, 4), (2, 0, 0, 5), (0, 0, 1), (1,)])
def test_jagged_rows_are_views_and_join(lengths: tuple[int, ...]) -> None:
    whole = jagged(*lengths)
    cut = BatchCutter(rows=2).cut({"x": whole, "y": torch.arange(len(lengths))})
    assert not difference(whole, join(cut)["x"])
    for sub in cut:
        part = sub.data["x"]
        assert part.layout is torch.jagged and part.dtype == whole.dtype
        assert part.values().untyped_storage().data_ptr() == whole.values().untyped_storage().data_ptr()
        for own, row in zip(part.unbind(), whole.unbind()[sub.where], strict=True):
            assert torch.equal(own, row)


def test_jagged_leaves_that_share_offsets_still_do() -> None:
    x = jagged(3, 1, 4)
    y = torch.nested.nested_tensor_from_jagged(torch.rand(8, 2), x.offsets())
    for sub in BatchCutter(rows=2).cut({"x": x, "y": y}):
        assert (sub.data["x"] + sub.data["y"]).shape[0] == sub.rows
        there = sub.to("cpu").data
        assert (there["x"] + there["y"]).shape[0] == sub.rows


@pytest.mark.parametrize("bounds", [{"min_seqlen": 1, "max_seqlen": 4}, {}])
def test_jagged_bounds_are_kept_so_that_padding_is(bounds: dict[str, int]) -> None:
    whole = jagged(3, 1, 4, 2, **bounds)
    cut = BatchCutter(rows=1).cut(whole)
    for sub in cut:
        assert sub.data._maybe_max_seqlen == bounds.get("max_seqlen")
        assert sub.data._maybe_min_seqlen == bounds.get("min_seqlen")
        if bounds:
            assert torch.nested.to_padded_tensor(sub.data, 0.0).shape == (1, 4, 2)
    assert join(cut)._maybe_max_seqlen == bounds.get("max_seqlen")


def test_jagged_with_holes_and_with_another_ragged_axis() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.rand(8, 2), torch.tensor([0, 3, 4, 8]), lengths=torch.tensor([2, 1, 3])
    )
    turned = jagged(3, 1, 4).transpose(1, 2)
    for whole in (holes, turned):
        cut = BatchCutter(rows=2).cut(whole)
        parts = [row for sub in cut for row in sub.data.unbind()]
        for own, again, row in zip(parts, join(cut).unbind(), whole.unbind(), strict=True):
            assert torch.equal(own, row) and torch.equal(again, row)


def test_jagged_gradients_reach_the_whole() -> None:
    rows = [torch.rand(n, 2, dtype=torch.float64) for n in (3, 1, 4)]
    values = torch.cat(rows).requires_grad_()
    whole = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 4, 8]))
    for sub in BatchCutter(rows=2).cut(whole):
        (sub.data.values() ** 3).sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, 3 * torch.cat(rows) ** 2, rtol=1e-12, atol=0)


def test_a_strided_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(1, 2)], layout=torch.strided)
    for batch in ({"x": nested, "y": torch.rand(2)}, {"x": nested}):
        text = refusal(batch)
        assert text.startswith("batch['x'] is a nested tensor of layout torch.strided")
        assert "layout=torch.jagged" in text


# Sparse tensors


SPARSE = ["coo", "uncoalesced", "half", "hybrid", "hybrid of 2", "coo of 3 axes", "empty coo"]
SPARSE += ["csr", "int csr", "empty csr", "dense csr", "csr batch"]


def sparse_kinds() -> dict[str, torch.Tensor]:
    eye, wide = torch.eye(5), torch.rand(5, 2, 3) * torch.tensor([1.0, 0, 1, 0, 1]).view(5, 1, 1)
    places = torch.tensor([[4, 0, 2, 0, 0], [0, 1, 1, 0, 1]])
    starts, columns = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 1, 2, 4], [2, 0, 0, 1]))
    return {
        "coo": eye.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(places, torch.rand(5), (5, 3), check_invariants=True),
        "half": eye.half().to_sparse(),
        "hybrid": wide.to_sparse(1),
        "hybrid of 2": wide.to_sparse(2),
        "coo of 3 axes": wide.to_sparse(),
        "empty coo": torch.zeros(5, 4).to_sparse(),
        "csr": eye.to_sparse_csr(),
        "int csr": torch.sparse_csr_tensor(starts, columns, torch.arange(4), (5, 3), check_invariants=True),
        "empty csr": torch.zeros(5, 4).to_sparse_csr(),
        "dense csr": torch.rand(5, 3, 2).to_sparse_csr(dense_dim=1),
        "csr batch": torch.stack([torch.eye(3)] * 5).to_sparse_csr(),
    }


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_b22_sparse_rows_keep_all_that_the_whole_is(kind: str, rows: int) -> None:
    whole = sparse_kinds()[kind]
    cut = BatchCutter(rows=rows).cut({"x": whole, "y": torch.arange(5)})
    assert not difference(whole, join(cut)["x"])
    for sub in cut:
        part = sub.data["x"]
        assert part.layout == whole.layout and part.dtype == whole.dtype and part.shape == (sub.rows, *whole.shape[1:])
        assert torch.equal(part.to_dense(), whole.to_dense()[sub.where])
        if whole.layout is torch.sparse_coo:
            assert part.is_coalesced() == whole.is_coalesced() and part.dense_dim() == whole.dense_dim()
            torch.sparse_coo_tensor(part._indices(), part._values(), part.shape, check_invariants=True)
        else:
            inner = part.crow_indices(), part.col_indices(), part.values()
            assert [x.dtype for x in inner] == [whole.crow_indices().dtype, whole.col_indices().dtype, whole.dtype]
            torch.sparse_csr_tensor(*inner, part.shape, check_invariants=True)
        assert sub.to("meta").data["x"].is_meta and sub.to("cpu").data["x"] is part


def test_b22_values_are_views() -> None:
    for kind in ("coo", "hybrid", "csr", "dense csr", "csr batch"):
        whole = sparse_kinds()[kind]
        for sub in BatchCutter(rows=2).cut(whole):
            own = sub.data.values()
            assert own.numel() == 0 or own.untyped_storage().data_ptr() == whole.values().untyped_storage().data_ptr()


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_b22_gradients_equal_the_unsplit_ones(to_sparse: Callable[[torch.Tensor], torch.Tensor], float64: None) -> None:
    x = to_sparse(torch.rand(5, 4) * (torch.rand(5, 4) > 0.5))
    layer = torch.rand(4, 3, requires_grad=True)

    def gradient(parts: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
        return torch.autograd.grad(sum((((part @ layer) ** 2).mean() * share for part, share in parts), torch.zeros(())), layer)[0]

    cut = BatchCutter(rows=2).cut(x)
    right = gradient([(x, 1.0)])
    torch.testing.assert_close(gradient([(sub.data, sub.share) for sub in cut]), right, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(gradient([(sub.data, 1 / 3) for sub in cut]), right)  # the mean of means is another number


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_b22_a_sparse_tensor_with_a_gradient_of_its_own_is_refused(to_sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = to_sparse(torch.eye(5))
    cutter = BatchCutter(rows=2)
    cutter.cut({"x": x, "y": torch.arange(5)})
    for used in (cutter, BatchCutter(rows=2)):
        with pytest.raises(CutError, match=r"batch\['x'\] is a sparse tensor that requires a gradient.*x.to_dense\(\)"):
            used.cut({"x": x.clone().requires_grad_(), "y": torch.arange(5)})


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_b22_other_layouts_are_refused_by_name(layout: torch.layout) -> None:
    size = None if layout is torch.sparse_csc else (2, 2)
    text = refusal({"m": {"x": torch.eye(4).to_sparse(layout=layout, blocksize=size)}, "y": torch.arange(4)})
    assert text.startswith("batch['m']['x'] is laid out") and str(layout) in text
    assert "to_sparse_csr()" in text and 'layout={"m.x": SHARED}' in text


def test_b22_one_sparse_row_broadcasts_and_axes_are_refused() -> None:
    one = torch.rand(1, 4).to_sparse()
    assert all(sub.data["x"] is one for sub in BatchCutter(rows=2).cut({"x": one, "y": torch.arange(4)}))
    text = refusal({"x": torch.eye(4).to_sparse(), "y": torch.arange(4)}, layout={"x": axis(1)})
    assert "is declared axis(1), but a Tensor is cut by its own rows" in text


# TensorDict and PyTorch Geometric, where they are installed


def test_tensordict_and_tensorclass() -> None:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Sample:
        x: torch.Tensor
        name: str

    inner = {"a": torch.arange(8).view(4, 2), "in": {"b": torch.rand(4, 2, 3)}}
    whole = tensordict.TensorDict(inner, [4, 2], names=["row", "time"])
    texts = tensordict.TensorDict({"a": torch.arange(4)}, [4])
    texts["text"] = tensordict.NonTensorStack("a", "b", "c", "d")
    sample = Sample(torch.rand(4, 2), "all", batch_size=[4])
    batch = {"td": whole, "texts": texts, "sample": sample, "y": torch.arange(4)}
    cut = BatchCutter(rows=3).cut(batch)
    for sub in cut:
        part = sub.data["td"]
        assert type(part) is type(whole) and part.batch_size == (sub.rows, 2) and part.names == ["row", "time"]
        assert part["a"].data_ptr() == whole["a"][sub.where].data_ptr()
        assert list(sub.data["texts"]["text"]) == ["a", "b", "c", "d"][sub.where]
        assert type(sub.data["sample"]) is Sample and sub.data["sample"].name == "all"
        assert sub.to("meta").data["td"]["in", "b"].is_meta
        assert sub.to("cpu").data["td"]["a"].data_ptr() == part["a"].data_ptr()
        part["new"] = part["a"]
    again = join(cut)
    assert (again["td"] == whole).all() and "new" not in {*whole.keys(), *cut[0].data["td"].keys()}
    assert list(again["texts"]["text"]) == ["a", "b", "c", "d"] and torch.equal(again["sample"].x, sample.x)
    assert "batch['y'] has 3" in refusal({**batch, "y": torch.arange(3)})


def test_tensordict_without_a_batch_size_is_walked() -> None:
    tensordict = pytest.importorskip("tensordict")
    whole = tensordict.TensorDict({"a": torch.arange(8).view(4, 2), "n": torch.tensor(3)}, [])
    whole.set_non_tensor("note", "all of it")
    cut = BatchCutter(rows=2).cut(whole)
    for sub in cut:
        assert sub.data["a"].shape == (2, 2) and sub.data["n"] == 3 and sub.data["note"] == "all of it"
    assert torch.equal(join(cut)["a"], whole["a"])


def graph_batch(**settings: Any) -> Any:
    geometric = pytest.importorskip("torch_geometric.data")
    edges = ([[0], [1]], [[0, 1], [1, 2]], [[0], [0]])
    graphs = [
        geometric.Data(x=torch.rand(n, 2), edge_index=torch.tensor(edge), y=torch.tensor([float(n)]), name=f"graph {n}")
        for n, edge in zip((2, 3, 1), edges, strict=True)
    ]
    return geometric.Batch.from_data_list(graphs, **settings)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_b19_graphs_are_cut_with_their_nodes_and_edges() -> None:
    whole = graph_batch(follow_batch=["x"])
    cut = BatchCutter(rows=2).cut({"graphs": whole, "row": torch.arange(3)})
    for sub in cut:
        part = sub.data["graphs"]
        assert type(part) is type(whole) and part.num_graphs == sub.rows
        nodes = (whole.batch >= sub.where.start) & (whole.batch < sub.where.stop)
        assert torch.equal(part.x, whole.x[nodes]) and part.x_ptr[-1] == nodes.sum()
        assert part.name == whole.name[sub.where] and sorted(part.keys()) == sorted(whole.keys())
        assert sub.to("meta").data["graphs"].x.is_meta and not part.x.is_meta
    joined = join(cut)["graphs"]
    for key in whole.keys():  # noqa: SIM118 - a Batch iterates over something else
        assert torch.equal(joined[key], whole[key]) if torch.is_tensor(whole[key]) else joined[key] == whole[key]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_b19_the_reported_numbers() -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    one, two, three = ([[0], [1]], [[0, 1], [1, 2]], [[0], [0]])
    graphs = [
        geometric.Data(x=torch.rand(n, 2), edge_index=torch.tensor(edges))
        for n, edges in ((2, one), (3, two), (1, three))
    ]
    whole = geometric.Batch.from_data_list(graphs)
    assert whole.batch.tolist() == [0, 0, 1, 1, 1, 2] and whole.edge_index.tolist() == [[0, 2, 3, 5], [1, 3, 4, 5]]
    part = GRAPHS.cut(whole, Spans(whole, [1, 2]))[1]
    assert part.edge_index.tolist() == [[0, 1, 3], [1, 2, 3]] and part.batch.tolist() == [0, 0, 0, 1]
    assert part.num_graphs == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_b19_losses_over_graphs_equal_the_unsplit_ones(float64: None) -> None:
    whole = graph_batch()
    layer = torch.rand(2, 1, requires_grad=True)

    def loss(data: Any) -> torch.Tensor:
        sent = torch.zeros_like(data.x).index_add(0, data.edge_index[1], data.x[data.edge_index[0]])
        pooled = torch.zeros(data.num_graphs, 2).index_add(0, data.batch, (data.x + sent).sin())
        return ((pooled @ layer).squeeze(1) - data.y).square().mean()

    whole.x = torch.rand(6, 2)
    whole.y = whole.y.double()
    for sub in BatchCutter(rows=2).cut(whole):
        (loss(sub.data) * sub.share).backward()
    assert layer.grad is not None
    found, layer.grad = layer.grad, None
    loss(whole).backward()
    torch.testing.assert_close(found, layer.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_b19_what_a_graph_batch_can_not_say() -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    whole = graph_batch()
    whole.added = torch.rand(3)
    text = refusal({"graphs": whole, "y": torch.arange(3)})
    assert text.startswith("batch['graphs'] is a Batch on which added was set after") and "set it on each Data" in text
    by_hand = geometric.Batch(x=torch.rand(3, 2), batch=torch.tensor([0, 0, 1]))
    text = refusal({"graphs": by_hand})
    assert "does not know which nodes" in text and "make it with Batch.from_data_list" in text
    assert "is a Data, which batchsplit can't cut" in refusal({"graph": graph_batch()[0], "y": torch.arange(3)})


def test_b19_graph_tensors_in_a_dict() -> None:
    owners = torch.tensor([0, 0, 1, 1, 1, 2])
    batch = {"x": torch.rand(6, 2), "edge_index": torch.zeros(2, 4), "batch": owners, "y": torch.rand(3)}
    text = refusal(batch)
    assert "batch['x'] has 6" in text and "batch['edge_index'] has 2" in text and "batch['y'] has 3" in text
    shown = BatchCutter(rows=1).cut({"edge_index": torch.zeros(2, 4), "y": torch.rand(2)}).explain()
    assert 'Coincidence: "edge_index" fits another reading too' in shown
