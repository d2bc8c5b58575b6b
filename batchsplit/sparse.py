"""Sparse tensors whose rows can be cut: COO and CSR."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from batchsplit.leaves import Kind, Spans
from batchsplit.plan import offsets


class Coordinates(Kind):
    """A sparse COO tensor: coalesced or not as it was, the values of a coalesced one as views."""

    text, why = "per row, sparse", "its first axis is the rows"
    broadcasts = True

    def count(self, leaf: Any) -> int:
        return leaf.shape[0] if leaf.layout is torch.sparse_coo and leaf.dim() else -1

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if len(spans.sizes) == 1:
            return [leaf]
        indices, values = _entries(leaf)
        starts = offsets(spans.sizes)
        limits = torch.tensor(starts, device=indices.device)
        rows = indices[0].contiguous()
        if not leaf.is_coalesced():  # entries in any order: bring those of a sub-batch together, else as they are
            parts = torch.bucketize(rows, limits, right=True)
            order = parts.argsort(stable=True)
            rows, indices, values = rows[order], indices[:, order], values[order]
            bounds = torch.searchsorted(parts[order], torch.arange(1, len(starts) + 1, device=rows.device)).tolist()
        else:
            bounds = torch.searchsorted(rows, limits).tolist()
        shift = torch.zeros(len(indices), 1, dtype=indices.dtype, device=indices.device)
        cut = []
        for (a, b), start, size in zip(pairwise(bounds), starts, spans.sizes):
            shift[0] = start
            cut.append(_coo(indices[:, a:b] - shift, values[a:b], (size, *leaf.shape[1:]), leaf.is_coalesced()))
        return cut

    def fits(self, leaf: Any, rows: int) -> bool:
        return self.count(leaf) == rows and not leaf.requires_grad

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        starts = offsets([part.shape[0] for part in parts])
        entries = [_entries(part) for part in parts]
        indices = [torch.cat([own[:1] + start, own[1:]]) for (own, _), start in zip(entries, starts)]
        values = torch.cat([own for _, own in entries])
        coalesced = all(part.is_coalesced() for part in parts)
        return _coo(torch.cat(indices, 1), values, (starts[-1], *parts[0].shape[1:]), coalesced)


def _entries(leaf: Any) -> tuple[Any, Any]:
    """Indices `(axes, entries)` and values of a COO tensor."""
    if leaf.is_coalesced():
        return leaf.indices(), leaf.values()
    return leaf._indices(), leaf._values()


def _coo(indices: Any, values: Any, size: tuple[int, ...], coalesced: bool) -> Any:
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=False)


class CompressedRows(Kind):
    """A sparse CSR tensor, or a batch of them: columns and values of a part are views of the whole's."""

    text, why = "per row, sparse, a view", "its first axis is the rows"
    broadcasts = True

    def count(self, leaf: Any) -> int:
        return leaf.shape[0] if leaf.layout is torch.sparse_csr else -1

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if len(spans.sizes) == 1:
            return [leaf]
        starts, columns, values, size = leaf.crow_indices(), leaf.col_indices(), leaf.values(), leaf.shape[1:]
        if starts.dim() > 1:  # each row is a matrix of its own, all of as many entries
            return [_csr(starts[s], columns[s], values[s], (s.stop - s.start, *size)) for s in spans.slices]
        ends = starts[torch.tensor(offsets(spans.sizes), device=starts.device)].tolist()
        return [
            _csr(starts[s.start : s.stop + 1] - a, columns[a:b], values[a:b], (s.stop - s.start, *size))
            for s, (a, b) in zip(spans.slices, pairwise(ends))
        ]

    def fits(self, leaf: Any, rows: int) -> bool:
        return self.count(leaf) == rows and not leaf.requires_grad

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        starts = [part.crow_indices() for part in parts]
        if starts[0].dim() == 1:
            ends = offsets([part.col_indices().shape[-1] for part in parts])
            starts = [own[i > 0 :] + end for i, (own, end) in enumerate(zip(starts, ends))]
        columns, values = (torch.cat([getattr(part, name)() for part in parts]) for name in ("col_indices", "values"))
        return _csr(torch.cat(starts), columns, values, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


def _csr(starts: Any, columns: Any, values: Any, size: tuple[int, ...]) -> Any:
    return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)


COORDINATES, COMPRESSED_ROWS = Coordinates(), CompressedRows()
