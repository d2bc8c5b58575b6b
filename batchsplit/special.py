"""Leaves with a layout of their own, whose rows are not simply their first axis."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from batchsplit.containers import map_leaves
from batchsplit.jagged import JAGGED
from batchsplit.leaves import Kind, Refused
from batchsplit.optional_types import is_graphs, optional_kind
from batchsplit.packed_sequence import PACKED_STEPS
from batchsplit.sparse import COMPRESSED_ROWS, COORDINATES

TO_CSR = "convert it with .to_dense().to_sparse_csr()"
TENSOR_KINDS: dict[torch.layout, Kind] = {
    torch.jagged: JAGGED,
    torch.sparse_coo: COORDINATES,
    torch.sparse_csr: COMPRESSED_ROWS,
    torch.sparse_csc: Refused("is laid out by columns (torch.sparse_csc)", "convert it with .to_sparse_csr()"),
    torch.sparse_bsr: Refused("is laid out in blocks (torch.sparse_bsr)", TO_CSR),
    torch.sparse_bsc: Refused("is laid out in blocks (torch.sparse_bsc)", TO_CSR),
}
# Its gradient is dense, and the parts, built from its entries, would only give that of the entries.
SPARSE_GRADIENT = Refused("is a sparse tensor that requires a gradient", "write x.to_dense() or x.detach()")
STRIDED_NESTED = Refused("is a nested tensor of layout torch.strided", "make it with layout=torch.jagged")


def special_kind(value: Any) -> Kind | None:
    """The kind of a leaf with a layout of its own, or None for any other."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return STRIDED_NESTED if value.is_nested else None
        if value.requires_grad and value.layout in (torch.sparse_coo, torch.sparse_csr):
            return SPARSE_GRADIENT
        if value.layout in TENSOR_KINDS:
            return TENSOR_KINDS[value.layout] if value.dim() else None
        return Refused(f"has the layout {value.layout}", "convert it with .to_dense()")
    if type(value) in (dict, list, tuple, str, int, float, bool, type(None), np.ndarray):
        return None
    return PACKED_STEPS if isinstance(value, PackedSequence) else optional_kind(value)


def detached(data: Any) -> Any:
    """Data cut off from the graph that computed it, whatever its kinds."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=leaf.data.detach())
        if is_graphs(leaf):
            return copy.copy(leaf).detach()  # which changes the Batch that it is called on
        return leaf.detach() if isinstance(leaf, torch.Tensor) or special_kind(leaf) is not None else leaf

    return map_leaves(detach, data, lambda value: special_kind(value) is not None)
