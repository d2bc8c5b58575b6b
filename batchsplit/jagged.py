"""Jagged nested tensors: rows of their own length, one after the other in one tensor of values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from batchsplit.leaves import Kind, Spans
from batchsplit.plan import offsets as ends_of


class Jagged(Kind):
    """A nested tensor of layout torch.jagged: a part is a view of the whole's values, with offsets that start at 0."""

    text, why = "per row, a view", "a jagged nested tensor"

    def count(self, leaf: Any) -> int:
        return leaf.shape[0] if leaf.layout is torch.jagged else -1

    def cut(self, leaf: Any, spans: Spans) -> Sequence[Any]:
        if len(spans.sizes) == 1:
            return [leaf]
        axis = leaf._ragged_idx - 1
        ends, offsets = _offsets(leaf.offsets(), spans)
        lengths = [None] * len(offsets) if leaf.lengths() is None else _lengths(leaf.lengths(), spans)
        return [
            # (each part asks for the values anew: backward through one frees what it used of them)
            _nested(leaf.values().narrow(axis, start, stop - start), own, length, leaf)
            for (start, stop), own, length in zip(pairwise(ends), offsets, lengths)
        ]

    def join(self, parts: list[Any], like: Any = None) -> Any:
        if len(parts) == 1:
            return parts[0]
        axis = parts[0]._ragged_idx - 1
        values = [part.values() for part in parts]
        starts = ends_of([value.shape[axis] for value in values])
        offsets = [part.offsets()[i > 0 :] + start for i, (part, start) in enumerate(zip(parts, starts))]
        lengths = None if parts[0].lengths() is None else torch.cat([part.lengths() for part in parts])
        return _nested(torch.cat(values, axis), torch.cat(offsets), lengths, parts[0], parts)


# Two nested tensors can be added up only where they have the very same offsets, not merely equal ones. So leaves that
# share them in the batch share them in a sub-batch as well. The offsets are kept beside the parts for their id's sake.


def _offsets(whole: torch.Tensor, spans: Spans) -> tuple[list[int], list[torch.Tensor]]:
    key = ("jagged", id(whole))
    if key not in spans.memo:
        numbers = whole.tolist()
        ends = [numbers[rows.start] for rows in spans.slices] + [numbers[spans.slices[-1].stop]]
        parts = [whole[rows.start : rows.stop + 1] - end for rows, end in zip(spans.slices, ends)]
        spans.memo[key] = whole, (ends, parts)
    return spans.memo[key][1]


def _lengths(whole: torch.Tensor, spans: Spans) -> Sequence[torch.Tensor]:
    key = ("jagged", id(whole))
    if key not in spans.memo:
        spans.memo[key] = whole, whole.split(spans.sizes)
    return spans.memo[key][1]


def _nested(values: Any, offsets: Any, lengths: Any, like: Any, parts: Sequence[Any] = ()) -> Any:
    """A jagged tensor with the bounds on its lengths that `like` (or all of several parts) was given."""
    shortest = [part._maybe_min_seqlen for part in parts or [like]]
    longest = [part._maybe_max_seqlen for part in parts or [like]]
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets,
        lengths,
        jagged_dim=like._ragged_idx,
        min_seqlen=None if None in shortest else min(shortest),
        max_seqlen=None if None in longest else max(longest),
    )


JAGGED = Jagged()
