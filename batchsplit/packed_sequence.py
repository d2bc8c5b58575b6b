"""PackedSequence: rows that lie in its data step by step, the longest rows first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from batchsplit.leaves import Kind, Made, Spans


class PackedSteps(Kind):
    """A PackedSequence: a part holds the steps of its rows, in the order in which the whole has them."""

    text, why = "per row, packed anew", "a PackedSequence"

    def count(self, leaf: Any) -> int:
        return int(leaf.batch_sizes[0])

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if len(spans.sizes) == 1:
            return [leaf]
        sizes = leaf.batch_sizes.numpy()
        order, lengths, starts = _order(leaf), _lengths(sizes), _starts(sizes)

        def part(rows: slice) -> PackedSequence:
            own = np.flatnonzero((order >= rows.start) & (order < rows.stop))  # where its rows stand, longest first
            sorted_rows = None if leaf.sorted_indices is None else order[own] - rows.start
            return _packed(leaf, starts[: lengths[own[0]], None] + own, lengths[own], sorted_rows)

        return Made(part, spans.slices)

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([_by_row(part, _lengths(part.batch_sizes.numpy())) for part in parts])
        where = np.zeros((lengths.max(), len(lengths)), dtype=np.int64)  # of each step and row in the parts' data
        row = entry = 0
        for part in parts:
            starts = _starts(part.batch_sizes.numpy())
            rows = self.count(part)
            where[: len(starts), row : row + rows] = _by_row(part, entry + starts[:, None] + np.arange(rows))
            row, entry = row + rows, entry + len(part.data)
        order = np.argsort(-lengths, kind="stable") if like is None else _order(like)
        in_order = like.sorted_indices is None if like is not None else all(p.sorted_indices is None for p in parts)
        if in_order and (np.diff(lengths) <= 0).all():
            order, sorted_rows = np.arange(len(lengths)), None
        else:
            sorted_rows = order
        whole = parts[0]._replace(data=torch.cat([part.data for part in parts]))
        return _packed(whole, where[:, order], lengths[order], sorted_rows)


def _packed(source: Any, where: np.ndarray, lengths: np.ndarray, sorted_rows: np.ndarray | None) -> Any:
    """Rows of these lengths, longest first, whose step t lies at `where[t]` in the source's data."""
    there = np.arange(len(where))[:, None] < lengths
    device = source.data.device
    data = source.data.index_select(0, torch.from_numpy(where[there]).to(device))
    indices = None if sorted_rows is None else torch.from_numpy(sorted_rows).to(source.sorted_indices.device)
    back = None if sorted_rows is None else torch.from_numpy(np.argsort(sorted_rows)).to(indices.device)  # type: ignore[union-attr]
    return type(source)(data, torch.from_numpy(there.sum(1)), indices, back)


def _order(packed: Any) -> np.ndarray:
    """The rows of the batch as they stand in the packed data: longest first."""
    if packed.sorted_indices is None:
        return np.arange(int(packed.batch_sizes[0]))
    return packed.sorted_indices.cpu().numpy()


def _by_row(packed: Any, values: np.ndarray) -> np.ndarray:
    """Values by place in the packed data, on the last axis, put in the order of the batch's rows."""
    return values[..., np.argsort(_order(packed))]


def _lengths(sizes: np.ndarray) -> np.ndarray:
    """The length of each row, longest first, from how many rows have a step at each time."""
    return np.searchsorted(-sizes, -np.arange(sizes[0]), side="left")


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Where each time step begins in the packed data."""
    return np.cumsum(sizes) - sizes


PACKED_STEPS = PackedSteps()
