"""Batches of packages that may or may not be there: TensorDict and PyTorch Geometric. Neither is imported here."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from batchsplit.leaves import SCALAR, Kind, Made, Refused, Spans


class TensorDicts(Kind):
    """A TensorDict or tensorclass whose batch size begins with the rows: sliced and concatenated as it does itself."""

    text, why = "per row, a view", "its batch size begins with the rows"

    def count(self, leaf: Any) -> int:
        return leaf.batch_size[0] if leaf.batch_dims else -1

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        return Made(leaf.__getitem__, spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        return torch.cat(parts, dim=0)  # type: ignore[arg-type]


class Graphs(Kind):
    """A PyTorch Geometric Batch: row i is graph i, with its nodes and edges, numbered from 0 in each part."""

    text, why = "per row, put together anew", "one graph a row"

    def count(self, leaf: Any) -> int:
        return leaf.num_graphs

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        def part(rows: slice) -> Any:
            if rows == slice(0, self.count(leaf)):
                return copy.copy(leaf)
            return _batch_class(leaf).from_data_list(leaf[rows], follow_batch=_followed(leaf))

        return Made(part, spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        graphs = [graph for part in parts for graph in part[slice(0, self.count(part))]]
        return _batch_class(parts[0]).from_data_list(graphs, follow_batch=_followed(parts[0]))

    def fits(self, leaf: Any, rows: int) -> bool:
        return self.count(leaf) == rows and _trouble(leaf) is None


def _batch_class(batch: Any) -> Any:
    """Batch, or the class derived from it: an instance is of a class made of that and of the class of its graphs."""
    return type(batch).__mro__[1]


def _stores(batch: Any) -> Iterator[tuple[Any, Any]]:
    """The stores of a Batch, each with the keys that were collated into it."""
    for store in batch.stores:
        key = getattr(store, "_key", None)
        yield store, batch._slice_dict if key is None else batch._slice_dict.get(key, {})


def _followed(batch: Any) -> list[str]:
    """The keys that were given as follow_batch, each known by its key_batch beside it."""
    keys = [key for store, _ in _stores(batch) for key in store if f"{key}_batch" in store]
    return list(dict.fromkeys(keys))


def _added(batch: Any) -> list[str]:
    """Keys that were set on a Batch after its graphs were put together."""
    found = []
    for store, collated in _stores(batch):
        own = {"batch", "ptr", "num_nodes"} | {f"{key}_{what}" for key in collated for what in ("batch", "ptr")}
        found += [key for key in store if key not in collated and key not in own]
    return sorted(set(found))


def _trouble(batch: Any) -> Refused | None:
    """Why a Batch can't be cut by graphs."""
    if not hasattr(batch, "_slice_dict"):
        return Refused(
            "is a Batch that does not know which nodes and edges belong to which graph",
            "make it with Batch.from_data_list",
        )
    added = _added(batch)
    if added:
        return Refused(
            f"is a Batch on which {', '.join(added)} was set after its graphs were put together",
            "set it on each Data before, or put it beside the Batch in a dict",
        )
    return None


TENSOR_DICTS, GRAPHS = TensorDicts(), Graphs()


def optional_kind(value: Any) -> Kind | None:
    """The kind of a value whose package has been imported by somebody else."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_tensor_collection(value):
        if value.batch_dims:
            return TENSOR_DICTS
        return SCALAR if isinstance(value, tensordict.NonTensorData) else None
    return (_trouble(value) or GRAPHS) if is_graphs(value) else None


def is_graphs(value: Any) -> bool:
    """Is it a Batch of PyTorch Geometric?"""
    geometric = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(value, geometric.Batch)
