"""What explain() says: a table that a person can read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from batchsplit import SHARED, BatchCutter, axis, packed
from batchsplit.cli import main
from kinds import Words

BATCH = {
    "input_ids": torch.arange(60).view(10, 6),
    "attention_mask": torch.ones(10, 6, dtype=torch.long).tril(),
    "meta": {"name": [f"row {i}" for i in range(10)], "scale": 0.5},
    "positions": torch.arange(6)[None],
}

TEXT = """\
10 rows in 3 sub-batches: 4 + 2 × 3

leaf            type         shape    treated as       because
--------------  -----------  -------  ---------------  --------------------------
input_ids       torch.int64  (10, 6)  per row, a view  its first axis is the rows
attention_mask  torch.int64  (10, 6)  per row, a view  its first axis is the rows
meta.name       list         10       per row, a list  it has one item a row
meta.scale      float                 shared           it has no rows
positions       torch.int64  (1, 6)   shared           its first axis is 1

The batch has 10 rows, known by batch['input_ids'].
A row is 6 wide (input_ids, the widest of its ids and masks; area_of= would name others); the largest sub-batch has an area of 24.
25.0% of the batch's positions are padding, by attention_mask.

sub-batch  rows  area  padding
---------  ----  ----  -------
0          0:4   24    58.3%
1          4:7   18    5.6%
2          7:10  18    0.0%"""


def test_the_whole_text() -> None:
    assert BatchCutter(rows=4).cut(BATCH).explain() == TEXT


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_every_kind_has_its_line() -> None:
    batch = {
        "packed": pack_sequence([torch.rand(3), torch.rand(2), torch.rand(2), torch.rand(1)]),
        "jagged": torch.nested.nested_tensor([torch.rand(n, 2) for n in (1, 2, 3, 1)], layout=torch.jagged),
        "coo": torch.eye(4).to_sparse(),
        "csr": torch.rand(4, 3).to_sparse_csr(),
        "array": np.zeros((4, 2)),
        "record": np.zeros(4, dtype=[("a", "i4")]).view(np.recarray),
        "words": Words(list("abcd")),
        "state": torch.rand(2, 4),
        "pixels": torch.rand(6, 3),
        "counts": [1, 2, 0, 3],
        "classes": ["a", "b"],
        "weights": torch.rand(9),
        "own": torch.rand(9, 9),
        "nested": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.strided),
        "none": None,
    }
    layout = {"state": axis(1), "pixels": packed("counts"), "weights": SHARED, "nested": SHARED, "own": lambda leaf, rows: leaf[rows]}
    text = BatchCutter(rows=2, layout=layout).cut(batch).explain()
    lines = {line.split("  ")[0]: " ".join(line.split()[1:]) for line in text.splitlines()}
    assert lines["packed"] == "PackedSequence 4 rows of 3 steps at most per row, packed anew a PackedSequence"
    assert lines["jagged"].startswith("torch.float32 (4, j") and lines["jagged"].endswith("per row, a view a jagged nested tensor")
    assert lines["coo"] == "torch.float32 (4, 4) per row, sparse its first axis is the rows"
    assert lines["csr"] == "torch.float32 (4, 3) per row, sparse, a view its first axis is the rows"
    assert lines["array"] == "float64 (4, 2) per row, a view its first axis is the rows"
    assert lines["record"].startswith("recarray of ") and lines["words"] == "Words per row as Words was registered"
    assert lines["state"] == "torch.float32 (2, 4) per row on axis 1, a view as declared"
    assert lines["pixels"] == "torch.float32 (6, 3) per row, the entries it owns packed('counts')"
    assert lines["classes"] == "list 2 shared a list, but not of one item a row"
    assert lines["weights"] == "torch.float32 (9,) shared as declared" and lines["none"] == "NoneType shared it has no rows"
    assert lines["nested"] == "torch.float32 nested shared as declared"
    assert lines["own"] == "torch.float32 (9, 9) cut by your function as declared"


def test_a_bare_tensor_and_many_sub_batches() -> None:
    text = BatchCutter(rows=1).cut(torch.rand(100, 3)).explain()
    assert "(the batch)  torch.float32  (100, 3)" in text and "No leaf says how wide a row is" in text
    lines = text.splitlines()
    assert lines[-7].split() == ["...", "..."] and lines[-1].split() == ["99", "99:100"] and lines[-8].split() == ["5", "5:6"]


@pytest.mark.parametrize(
    "mask", [torch.ones(4, 6).bool().tril(), np.tril(np.ones((4, 6))), torch.ones(4, 6).tril()], ids=["bool", "numpy", "float"]
)
def test_the_share_of_padding_is_that_of_a_mask_of_any_type(mask: object) -> None:
    text = BatchCutter(rows=2).cut({"ids": torch.ones(4, 6, dtype=torch.long), "mask": mask}).explain()
    assert "58.3% of the batch's positions are padding, by mask." in text
    assert "padding" not in BatchCutter(rows=2).cut({"x": torch.rand(4, 6), "mask": torch.rand(4, 6)}).explain()


def test_a_coincidence_is_told_with_the_line_for_the_other_reading() -> None:
    batch = {"x": torch.rand(4, 2), "pair_mask": torch.ones(4, 4), "h": torch.rand(4, 3, 4), "cu_seqlens": torch.arange(4)}
    text = BatchCutter(rows=2).cut(batch).explain()
    for name, marker in (("pair_mask", "SHARED"), ("h", "axis(2)"), ("cu_seqlens", "packed(counts)")):
        assert f'Coincidence: "{name}" fits another reading too; for that one write layout={{"{name}": {marker}}}.' in text
    assert text.count("Coincidence") == 3


# batchsplit explain MODULE:FUNCTION

MODULE = """
import torch
from torch.utils.data import DataLoader
from batchsplit import BatchCutter, group

batch = {"x": torch.rand(5, 3), "names": list("abcde")}
cutter = BatchCutter(rows=2)

def one(): return batch
def tensor(): return torch.rand(5, 3)
def loader(): return DataLoader(torch.rand(9, 3), batch_size=5)
def generator(): return (one for one in [batch])
def cut(): return cutter.cut(batch)
def with_cutter(): return batch, cutter
def loader_with_cutter(): return loader(), cutter
def cuts(): return cutter.over(loader())
def grouped(): return group([batch, batch], batches=2)
def empty(): return iter([])
def doubt(): return {"x": torch.rand(5, 3), "y": torch.rand(4)}
def broken(): return {}["batch"]
def nothing(): return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_training.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    return "my_training"


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("one", [], "5 rows in 1 sub-batch: 5"),
        ("one", ["--rows", "2"], "5 rows in 3 sub-batches: 2 × 2 + 1"),
        ("one", ["--parts", "5"], "5 rows in 5 sub-batches: 5 × 1"),
        ("tensor", [], "(the batch)  torch.float32  (5, 3)"),
        ("loader", [], "5 rows in 1 sub-batch: 5"),
        ("generator", [], "names  list           5       per row, a list"),
        ("cut", [], "5 rows in 3 sub-batches: 2 × 2 + 1"),
        ("with_cutter", [], "5 rows in 3 sub-batches: 2 × 2 + 1"),
        ("loader_with_cutter", [], "5 rows in 3 sub-batches: 2 × 2 + 1"),
        ("cuts", [], "5 rows in 3 sub-batches: 2 × 2 + 1"),
        ("grouped", [], "loader batch 1: 5 rows"),
    ],
)
def test_the_command_explains_what_a_function_gives(
    module: str, function: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{module}:{function}", *arguments]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("doubt", [], 'layout={"y": SHARED}'),
        ("empty", [], "gives a loader without a batch"),
        ("broken", [], "my_training:broken could not be run: KeyError: 'batch'"),
        ("nothing", [], "nothing in batch carries rows"),
        ("missing", [], "my_training has no function 'missing'"),
        ("with_cutter", ["--rows", "2"], "gives a cutter of its own, so leave out --rows"),
        ("one", ["--rows", "0"], "rows=0: a sub-batch needs at least 1 row"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    module: str, function: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{module}:{function}", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and words in found.err and found.err.count("\n") == 1
