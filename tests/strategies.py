"""Nested batches of every kind of leaf and container, drawn by Hypothesis together with a cut of them.

A drawn batch is kept as a tree, so that a test can reach every leaf by its path, and build the batch anew with one leaf
replaced. The simplest choice comes first everywhere: a failing batch shrinks to a dict of one tensor.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from batchsplit import PER_ROW, SHARED, BatchCutter, axis, packed
from kinds import Pair, Record, Words, rows_of

Draw = Callable[[st.SearchStrategy[Any]], Any]
HAS_TENSORDICT = importlib.util.find_spec("tensordict") is not None
HAS_GRAPHS = importlib.util.find_spec("torch_geometric") is not None


@dataclass
class Leaf:
    """A leaf of a drawn batch. `rows` gives what it holds of each row; None where it is shared."""

    value: Any
    rows: Callable[[Any], list[Any]] | None = None
    marker: Any = None
    short: Callable[[Any], Any] | None = None  # the same leaf without its last row
    view: Callable[[Any], Any] | None = None  # the tensor or array in it whose memory a part has to share


@dataclass
class Box:
    """A container of a drawn batch: how to build it, and how to reach what is in it."""

    make: Callable[[list[Any]], Any]
    steps: list[str]
    get: Callable[[Any, str], Any]
    inside: list[Leaf | Box] = field(default_factory=list)


class Placed(NamedTuple):
    """A leaf with its path, and the way to it in a batch or sub-batch."""

    path: str
    leaf: Leaf
    reach: Callable[[Any], Any]


@dataclass
class Drawn:
    """A drawn batch and a cut of it."""

    rows: int
    root: Box
    limit: dict[str, Any]

    @property
    def batch(self) -> Any:
        return self.built()

    def built(self, replaced: Leaf | None = None, value: Any = None) -> Any:
        """The batch, with another value for one of its leaves."""

        def build(node: Leaf | Box) -> Any:
            if isinstance(node, Leaf):
                return value if node is replaced else node.value
            return node.make([build(inner) for inner in node.inside])

        return build(self.root)

    def leaves(self) -> list[Placed]:
        """Every leaf with its path."""
        return list(_placed(self.root, "", lambda data: data))

    @property
    def cutter(self) -> BatchCutter:
        """A new cutter with the drawn limit and what had to be declared."""
        layout = {path: leaf.marker for path, leaf, _ in self.leaves() if leaf.marker is not None}
        return BatchCutter(**self.limit, layout=layout)

    def __repr__(self) -> str:
        markers = {path: leaf.marker for path, leaf, _ in self.leaves() if leaf.marker is not None}
        return f"Drawn(rows={self.rows}, limit={self.limit}, layout={markers}, batch={self.batch!r})"


def _placed(node: Leaf | Box, path: str, reach: Callable[[Any], Any]) -> Iterator[Placed]:
    if isinstance(node, Leaf):
        yield Placed(path, node, reach)
        return
    for step, inner in zip(node.steps, node.inside, strict=True):
        get = partial(_through, reach, node.get, step)
        yield from _placed(inner, f"{path}.{step}" if path else step, get)


def _through(reach: Callable[[Any], Any], get: Callable[[Any, str], Any], step: str, data: Any) -> Any:
    return get(reach(data), step)


# Leaves that are cut by rows


def numbers(draw: Draw, *shape: int, dtypes: tuple[torch.dtype, ...] = ()) -> torch.Tensor:
    """A tensor whose entries tell them apart, of a drawn type, with NaN and -0.0 among them where it has such."""
    kinds = (torch.float32, torch.int64, torch.float64, torch.bool, torch.complex64, torch.uint8, torch.float16)
    dtype = draw(st.sampled_from(dtypes or kinds))
    tensor = torch.arange(int(np.prod(shape))).view(shape).to(dtype)
    if dtype.is_floating_point and tensor.numel() > 2 and draw(st.booleans()):
        tensor.view(-1)[-1], tensor.view(-1)[1] = float("nan"), -0.0
    return tensor


def dense(draw: Draw, rows: int) -> Leaf:
    shape = [rows, *draw(st.lists(st.integers(0, 3), max_size=2))]
    tensor = numbers(draw, *shape)
    form = draw(st.sampled_from(["plain", "strided", "expanded", "leaf", "inner", "subclass", "parameter"]))
    if form == "strided":
        tensor = tensor.unsqueeze(-1).expand(*shape, 2).contiguous().select(-1, 1)
    elif form == "expanded":
        tensor = tensor[:1].expand(*shape)
    elif form == "subclass":
        tensor = tensor.as_subclass(Marked)
    elif tensor.dtype.is_floating_point and form in ("leaf", "inner", "parameter"):
        tensor = torch.nn.Parameter(tensor) if form == "parameter" else tensor.requires_grad_()
        tensor = tensor * 1 if form == "inner" else tensor
    return Leaf(tensor, rows_of, short=lambda x: x[:-1], view=lambda x: x)


class Marked(torch.Tensor):
    """A tensor subclass."""


def array(draw: Draw, rows: int) -> Leaf:
    width = draw(st.integers(0, 3))
    form = draw(st.sampled_from(["float", "int", "text", "structured", "object", "masked", "record"]))
    base = np.arange(rows * width).reshape(rows, width)
    if form in ("structured", "record"):
        value = np.zeros(rows, dtype=[("id", "i4"), ("box", "f4", (2,))])
        value["id"] = np.arange(rows)
        value = value.view(np.recarray) if form == "record" else value
    elif form == "object":
        value = np.array([None, *({"row": i} for i in range(1, rows))], dtype=object)
    elif form == "masked":
        value = np.ma.masked_array(base, mask=base % 3 == 1, fill_value=7)
    else:
        value = base.astype({"float": "f8", "int": "i2", "text": "U4"}[form])
    return Leaf(value, rows_of, short=lambda x: x[:-1], view=lambda x: x)


def strings(draw: Draw, rows: int) -> Leaf:
    names = [f"row {i}" for i in range(rows)]
    form = draw(st.sampled_from([list, tuple, deque, Words]))
    # A list of strings one short is a list of options by contract, and shared: no `short` for it.
    return Leaf(form(names), rows_of, short=(lambda x: Words(x.words[:-1])) if form is Words else None)


def items(draw: Draw, rows: int) -> Leaf:
    make = draw(st.sampled_from([_number, _mapping, _ragged, _nothing]))
    value = [make(i, rows) for i in range(rows)]
    return Leaf(value, rows_of, short=(lambda x: x[:-1]) if make is _ragged else None)


def _number(i: int, rows: int) -> Any:
    return i * 1.5


def _mapping(i: int, rows: int) -> Any:
    return {"id": i, "tags": ["a"] * i, "box": torch.full((i,), i)}


def _ragged(i: int, rows: int) -> Any:
    return torch.full((rows + 1 + i, 2), i)  # never of the batch's rows: a list of such would be structure


def _nothing(i: int, rows: int) -> Any:
    return None if i % 2 else "x"


def declared_items(draw: Draw, rows: int) -> Leaf:
    value = [torch.full((rows, 2), i) for i in range(rows)]
    return Leaf(value, rows_of, PER_ROW, short=lambda x: x[:-1])


def on_axis(draw: Draw, rows: int) -> Leaf:
    k = draw(st.sampled_from([1, -1, -2, 2]))
    shape = [2, 3, 1]
    shape[k] = rows
    tensor = numbers(draw, *shape)
    short = partial(torch.narrow, dim=k % 3, start=0, length=rows - 1)
    return Leaf(tensor, lambda x: rows_of(x.movedim(k, 0)), axis(k), short=short, view=lambda x: x)


def entries(draw: Draw, rows: int) -> Leaf:
    counts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    total = sum(counts)
    form = draw(st.sampled_from(["tensor", "offsets", "array", "list"]))
    value: Any
    marker = packed(lambda batch: counts)
    if form == "offsets":
        value = torch.tensor([0, *np.cumsum(counts)])
        # Without the last one they may be as many as the entries, or as the offsets of that many stretches.
        short = (lambda x: x[:-1]) if rows not in (total, total + 1) else None
        return Leaf(value, lambda part: [str(n) for n in part.diff().tolist()], marker, short=short)
    value = [f"entry {i}" for i in range(total)]
    if form != "list":
        value = numbers(draw, total, 2, dtypes=(torch.float32, torch.int64))
        value = value.numpy() if form == "array" else value
    # How many entries a row of a part owns only the whole can say: entries are compared one by one.
    return Leaf(value, rows_of, marker, short=(lambda x: x[:-1]) if total else None)


def packed_sequence(draw: Draw, rows: int) -> Leaf:
    lengths = draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    in_order = draw(st.booleans())
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    sequences = [torch.arange(length * 2).view(length, 2) + 100.0 * i for i, length in enumerate(lengths)]
    value = pack_sequence(sequences, enforce_sorted=in_order)
    return Leaf(value, rows_of, short=lambda x: pack_sequence(sequences[:-1], enforce_sorted=in_order))


def jagged(draw: Draw, rows: int) -> Leaf:
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    parts = [torch.full((length, 2), float(i)) for i, length in enumerate(lengths)]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    bounds = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)} if draw(st.booleans()) else {}
    value = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets, **bounds)

    def short(x: Any) -> Any:
        return torch.nested.nested_tensor_from_jagged(x.values()[: offsets[-2]], offsets[:-1])

    return Leaf(value, rows_of, short=short, view=lambda x: x.values())


def sparse(draw: Draw, rows: int) -> Leaf:
    width = draw(st.integers(1, 3))
    whole = torch.arange(rows * width).view(rows, width) % draw(st.integers(2, 4)) * 1.0
    form = draw(st.sampled_from(["coo", "uncoalesced", "hybrid", "csr", "csr batch"]))
    if form in ("hybrid", "csr batch"):
        whole = torch.stack([whole, whole * 2], dim=1)
    if form.startswith("csr"):
        whole = whole * 0 + 1.0 if form == "csr batch" else whole  # each matrix has to have as many entries
        return Leaf(whole.to_sparse_csr(), rows_of, short=lambda x: whole[:-1].to_sparse_csr())
    value = whole.to_sparse(2 if form == "hybrid" else whole.dim())
    if form == "uncoalesced":
        twice = torch.cat([value.indices().flip(1), value.indices()], dim=1)
        value = torch.sparse_coo_tensor(twice, torch.cat([value.values()] * 2), value.shape, check_invariants=True)
    return Leaf(value, rows_of, short=lambda x: whole[:-1].to_sparse())


def tensor_dict(draw: Draw, rows: int) -> Leaf:
    from tensordict import TensorDict

    inner = {"a": torch.arange(rows), "in": {"b": torch.arange(rows * 2.0).view(rows, 2)}}
    return Leaf(TensorDict(inner, [rows]), rows_of, short=lambda x: x[:-1], view=lambda x: x["in", "b"])


def graphs(draw: Draw, rows: int) -> Leaf:
    from torch_geometric.data import Batch, Data

    sizes = draw(st.lists(st.integers(1, 3), min_size=rows, max_size=rows))
    data: list[Any] = [
        Data(x=torch.full((n, 2), float(i)), edge_index=torch.tensor([[0], [n - 1]]), y=torch.tensor([i]))
        for i, n in enumerate(sizes)
    ]
    return Leaf(Batch.from_data_list(data), rows_of, short=lambda x: Batch.from_data_list(data[:-1]))


ROW_LEAVES = [dense, array, strings, items, declared_items, on_axis, entries, packed_sequence, jagged, sparse]
ROW_LEAVES += [tensor_dict] * HAS_TENSORDICT + [graphs] * HAS_GRAPHS


def shared(draw: Draw, rows: int) -> Leaf:
    one = torch.arange(4.0).view(1, 4)
    values: list[Any] = [3, None, "x" * rows, b"ab", 0.5, True, torch.tensor(7), np.float32(2), np.array(1.5), 1 + 2j]
    values += [{}, ["option"] * (rows + 1), torch.Size([rows]), ()]
    if rows > 1:
        values += [one, one.numpy(), one.to_sparse(), [one, one[:, :2]] if rows != 2 else one]
    return Leaf(draw(st.sampled_from(values)))


def declared_shared(draw: Draw, rows: int) -> Leaf:
    values: list[Any] = [torch.arange(rows + 2), torch.zeros(rows), object(), {1, 2}]
    values += [{"a": torch.zeros(3)}, [torch.zeros(9)] * rows]
    return Leaf(draw(st.sampled_from(values)), marker=SHARED)


# Containers


def _item(data: Any, step: str) -> Any:
    return data[step]


def _position(data: Any, step: str) -> Any:
    return data[int(step)]


class Tagged(dict):
    """A dict with an attribute of its own, and a constructor that wants an argument."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


def _tagged(names: list[str], values: list[Any]) -> Tagged:
    new = Tagged("a tag")
    new.update(zip(names, values, strict=True))
    return new


class Wrapped(Mapping[str, Any]):
    """A mapping that is neither a dict nor derived from UserDict."""

    def __init__(self, store: Mapping[str, Any]) -> None:
        self._store = dict(store)

    def __getitem__(self, key: str) -> Any:
        return self._store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


MAPPINGS: list[Callable[[dict[str, Any]], Any]] = [
    dict,
    OrderedDict,
    partial(defaultdict, list),
    UserDict,
    MappingProxyType,
    Wrapped,
    lambda items: _tagged(list(items), list(items.values())),
]


def box(draw: Draw, rows: int, depth: int, anchored: bool = False) -> Box:
    """A container; an anchored one holds a tensor that says for certain how many rows there are."""
    form = draw(st.sampled_from(["mapping", "tuple", "pair", "record", "list"]))
    if form in ("pair", "record"):
        names = ["x", "y"]
    else:
        names = [f"{'k' if form == 'mapping' else ''}{i}" for i in range(draw(st.integers(1, 3)))]
    inside: list[Leaf | Box] = [node(draw, rows, depth, form) for _ in names]
    if form == "list" and len(names) == rows:
        # A list as long as the batch is structure only if all in it are tensors of all rows (so none may be one short).
        inside = [replace(dense(draw, rows), short=None) for _ in names]
    if anchored:
        inside[draw(st.integers(0, len(names) - 1))] = Leaf(torch.arange(rows), rows_of, view=lambda x: x)
    if form == "mapping":
        kind = draw(st.sampled_from(MAPPINGS))
        return Box(lambda values: kind(dict(zip(names, values, strict=True))), names, _item, inside)
    if form == "tuple":
        if all(isinstance(x, Leaf) and isinstance(x.value, (str, bytes)) for x in inside):
            inside[0] = Leaf(1)  # a tuple of nothing but strings may be one a row
        return Box(tuple, names, _position, inside)
    if form == "list":
        return Box(list, names, _position, inside)
    kind = Pair if form == "pair" else Record
    return Box(lambda values: kind(*values), names, getattr, inside)


def node(draw: Draw, rows: int, depth: int, around: str) -> Leaf | Box:
    if depth > 0 and draw(st.integers(0, 3)) == 3:
        return box(draw, rows, depth - 1)
    kinds = [dense, shared, declared_shared, *ROW_LEAVES]
    leaf = draw(st.sampled_from(kinds))(draw, rows)
    # A list of nothing but scalars is itself one item a row, or shared.
    return dense(draw, rows) if around == "list" and leaf.rows is None else leaf


@st.composite
def batches(draw: Draw, min_rows: int = 1) -> Drawn:
    """Nested batches together with a cut of them."""
    rows = draw(st.integers(min_rows, 7))
    root = box(draw, rows, depth=2, anchored=True)
    if root.get is _position and draw(st.booleans()):  # or its list would be the only thing that says how many rows
        root = Box(lambda values: {"in": values[0]}, ["in"], _item, [root])
    limit: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"rows": st.integers(1, 8), "sizes": st.sampled_from(["even", "full"])}),
            st.fixed_dictionaries({"parts": st.integers(1, 8)}),
            st.builds(lambda area: {"area": area, "area_of": _three}, st.integers(3, 24)),
            st.just({}),
        )
    )
    return Drawn(rows, root, limit)


def _three(batch: Any) -> int:
    return 3
