"""The tables of docs/batches.md say what the package does: every row has an example here, and every example a row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from batchsplit import PER_ROW, SHARED, BatchCutter, CutError, axis, join, packed
from kinds import Words, difference

PAGE = (Path(__file__).parent.parent / "docs" / "batches.md").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by their first cell."""
    part = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    lines = next(text for text in part if text.startswith(heading)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def tensor_dict() -> Any:
    return pytest.importorskip("tensordict").TensorDict({"a": torch.arange(4)}, [4])


def graphs(whole: bool = True) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    if not whole:
        return data.Batch(x=torch.rand(4, 2), batch=torch.arange(4))
    edges = torch.tensor([[0], [1]])
    return data.Batch.from_data_list([data.Data(x=torch.rand(2, 2), edge_index=edges) for _ in range(4)])


def ragged() -> list[torch.Tensor]:
    return [torch.rand(n, 2) for n in (5, 6, 7, 8)]


LEAVES: dict[str, Any] = {
    "tensor": lambda: torch.rand(4, 3),
    "NumPy array": lambda: np.zeros((4, 2)),
    "tensor whose first axis is 1": lambda: torch.rand(1, 3),
    "tensor without axes": lambda: torch.tensor(3.0),
    "number, string": lambda: "four",
    "list with one item a row": ragged,
    "tuple of strings": lambda: ("a", "b", "c", "d"),
    "list of scalars": lambda: ["a", "b", "c"],
    "PackedSequence": lambda: pack_sequence(ragged(), enforce_sorted=False),
    "nested tensor, layout jagged": lambda: torch.nested.nested_tensor(ragged(), layout=torch.jagged),
    "sparse tensor, layout COO": lambda: torch.eye(4).to_sparse(),
    "sparse tensor, layout CSR": lambda: torch.eye(4).to_sparse_csr(),
    "TensorDict": tensor_dict,
    "Batch of PyTorch Geometric": graphs,
    "declared `SHARED`": lambda: torch.rand(9),
    "tensor declared `PER_ROW`": lambda: torch.rand(4, 3),
    "list declared `PER_ROW`": lambda: [torch.rand(4) for _ in range(4)],
    "tensor declared `axis(1)`": lambda: torch.rand(2, 4),
    'tensor declared `packed("counts")`': lambda: torch.rand(6, 2),
    'running offsets declared `packed("counts")`': lambda: torch.tensor([0, 1, 1, 3, 6]),
    "declared as a function": lambda: torch.rand(4, 4),
    "`register`ed type": lambda: Words(list("abcd")),
}
MARKERS = {
    "declared `SHARED`": SHARED,
    "tensor declared `PER_ROW`": PER_ROW,
    "list declared `PER_ROW`": PER_ROW,
    "tensor declared `axis(1)`": axis(1),
    'tensor declared `packed("counts")`': packed("counts"),
    'running offsets declared `packed("counts")`': packed("counts"),
    "declared as a function": lambda leaf, rows: leaf[rows, rows],
}
OTHER = torch.rand(4)
REFUSED: dict[str, Any] = {
    "first axis neither 1": lambda: {"x": torch.rand(4), "y": torch.rand(4), "z": [torch.rand(7)]},
    "leaves of different numbers": lambda: {"x": torch.rand(4), "y": torch.rand(3)},
    "list of tensors that could be": lambda: [torch.rand(4), torch.rand(3)],
    "object of an unknown type": lambda: {"x": OTHER, "y": object()},
    "sparse tensor, layout CSC": lambda: {"x": OTHER, "y": torch.eye(4).to_sparse_csc()},
    "sparse tensor that requires": lambda: {"x": OTHER, "y": torch.eye(4).to_sparse().requires_grad_()},
    "nested tensor, layout strided": lambda: {"x": OTHER, "y": torch.nested.nested_tensor(ragged())},
    "Batch of PyTorch Geometric that": lambda: graphs(whole=False),
    "nothing that has rows": lambda: {"a": 1},
    "no rows": lambda: {"x": torch.rand(0, 3)},
}


def test_every_row_has_an_example_and_every_example_a_row() -> None:
    for heading, examples in (("Leaves", LEAVES), ("Refused", REFUSED)):
        for row in table(heading):
            assert len([key for key in examples if _names(key, row, examples)]) == 1, row
        for key in examples:
            assert any(_names(key, row, examples) for row in table(heading)), key


def _names(key: str, row: str, examples: dict[str, Any]) -> bool:
    """Is this the longest of the keys that the row begins with?"""
    return key == max((one for one in examples if row.startswith(one)), key=len, default=None)


@pytest.mark.parametrize("row", list(table("Leaves")))
def test_leaves(row: str) -> None:
    key = next(key for key in LEAVES if _names(key, row, LEAVES))
    leaf = LEAVES[key]()
    batch = {"other": OTHER, "counts": [1, 0, 2, 3], "leaf": leaf}
    cut = BatchCutter(rows=2, layout={"leaf": MARKERS[key]} if key in MARKERS else None).cut(batch)
    (line,) = [text for text in cut.explain().splitlines() if text.startswith("leaf  ") and "treated" not in text]
    treated, because, holds = table("Leaves")[row]
    assert line.endswith(f"{treated}  " + " " * (line.index(because) - line.index(treated) - len(treated) - 2) + because)
    for sub, again in zip(cut, cut, strict=True):
        assert _holds(holds, sub.data["leaf"], again.data["leaf"], leaf), holds
    assert not difference(join(cut)["leaf"], leaf)


def _holds(words: str, part: Any, again: Any, leaf: Any) -> bool:
    if words == "the same object":
        return part is leaf
    if words in ("a new list", "a new tuple"):
        return type(part) is type(leaf) and (part is not again or isinstance(leaf, tuple)) and part is not leaf
    if words == "offsets from 0":
        return int(part[0]) == 0 and int(part[-1]) in (1, 5)
    if words.startswith("what"):
        return part is not leaf
    own, whole = (_memory(x) for x in (part, leaf))
    return (own == whole) == (words == "a view")


def _memory(leaf: Any) -> Any:
    """Where the values of a leaf lie."""
    if isinstance(leaf, np.ndarray):
        return id(leaf if leaf.base is None else leaf.base)
    if isinstance(leaf, PackedSequence):
        return leaf.data.untyped_storage().data_ptr()
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is torch.sparse_coo:
            return leaf.indices().untyped_storage().data_ptr()
        values = leaf if leaf.layout is torch.strided else leaf.values()
        return values.untyped_storage().data_ptr()
    return (leaf.x if hasattr(leaf, "x") else leaf["a"]).untyped_storage().data_ptr()


@pytest.mark.parametrize("row", list(table("Refused")))
def test_refusals(row: str) -> None:
    key = next(key for key in REFUSED if _names(key, row, REFUSED))
    batch = REFUSED[key]()
    if key == "first axis neither 1":
        cutter = BatchCutter(rows=2, layout={"x": PER_ROW})
    else:
        cutter = BatchCutter(rows=2)
    with pytest.raises(CutError) as caught:
        cutter.cut(batch)
    assert table("Refused")[row][0] in str(caught.value)
