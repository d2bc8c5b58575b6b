"""The shapes of sub-batches: which there were, and how all get the same one, by rows that leave no trace in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchsplit.declared import ByFunction, PackedEntries
from batchsplit.errors import LeafError, WeightError
from batchsplit.layout import dotted, shown
from batchsplit.leaves import Dense, Spans, is_offsets
from batchsplit.weights import Labels, Mask, name_of

if TYPE_CHECKING:
    from batchsplit.cuts import Piece
    from batchsplit.reading import Reading

ATTENTION = ("attention_mask", "input_mask", "padding_mask", "key_padding_mask", "src_key_padding_mask")


@dataclass(frozen=True)
class Filling:
    """Filler rows are repeated from the last real one, but for what makes the loss leave them out."""

    size: int  # rows of each sub-batch
    blank: Mapping[str, Any]  # the value of filler rows in labels and masks, by path

    def data(self, piece: Piece, index: int) -> Any:
        """The data of a sub-batch, filled up."""
        rows = piece.spans.sizes[index]
        parts = [column[index] for column in piece.columns]
        if rows < self.size:
            stop = piece.spans.slices[index].stop
            last = piece.rows(slice(stop - 1, stop))
            for i, (leaf, value) in enumerate(zip(piece.reading.leaves, piece.leaves, strict=True)):
                if leaf.kind.per_row and not leaf.container:
                    parts[i] = self._filled(leaf, value, parts[i], last[i], rows)
        return piece.reading.root.build(parts)

    def _filled(self, leaf: Any, value: Any, part: Any, row: Any, rows: int) -> Any:
        where = shown(leaf.path)
        if isinstance(leaf.kind, ByFunction) or (isinstance(leaf.kind, PackedEntries) and is_offsets(value)):
            raise LeafError(f'sizes="equal": {where} ({leaf.kind.text}, {leaf.kind.why}) can\'t be filled up; {EVEN}.')
        path = dotted(leaf.path)
        if path in self.blank:
            row = _full_like(row, self.blank[path])
        filled = leaf.kind.join([part, *[row] * (self.size - rows)])
        if leaf.kind.bears_rows and leaf.kind.count(filled) != self.size:
            raise LeafError(
                f'sizes="equal": {where} was filled up to {leaf.kind.count(filled)} rows, not {self.size}; {EVEN}.'
            )
        return filled

    def check(self, piece: Piece) -> None:
        """Raise where the labels or the mask that mark filler rows are no plain leaf of the batch."""
        plain = {
            dotted(leaf.path)
            for leaf, value in zip(piece.reading.leaves, piece.leaves, strict=True)
            if type(leaf.kind) is Dense and isinstance(value, (torch.Tensor, np.ndarray))
        }
        for path in self.blank:
            if path not in plain:
                raise LeafError(
                    f'sizes="equal": filler rows are marked in "{path}", which is no tensor with rows here; {EVEN}.'
                )


EVEN = 'write sizes="even" or sizes="full"'


def blanks(weight: Any) -> dict[str, Any]:
    """What to write into labels and masks, so that the terms of a loss leave a row out.

    Raises:
        WeightError: under such a weight a loss has no way to leave rows out.
    """
    found: dict[str, Any] = {}
    for one in weight.values() if isinstance(weight, Mapping) else [weight]:
        if one == "once":  # has no rows
            continue
        if isinstance(one, Labels):
            _note(found, one.path, one.ignore_index)
        elif isinstance(one, Mask) and one.path.rpartition(".")[2] not in ATTENTION:
            _note(found, one.path, 0)
        else:
            raise WeightError(_refusal(one))
    if not found:
        raise WeightError(_refusal(weight))
    return found


def _note(found: dict[str, Any], path: str, value: Any) -> None:
    if found.setdefault(path, value) != value:
        raise WeightError(
            f'sizes="equal": "{path}" is counted in two ways, so filler rows can\'t be marked in it; {EVEN}.'
        )


def _refusal(weight: Any) -> str:
    text = f'sizes="equal" with weight={"None" if weight is None else name_of(weight)}: the last sub-batch has to be filled up, and '
    if isinstance(weight, Mask):
        text += "a model that attends to nothing in a row may give NaN; give the loss a mask of its own"
    else:
        text += "a loss of all its rows would count the filler too"
    return (
        f"{text}. Write weight=label_weight(...) where the loss leaves an ignore index out; or put ones of shape (rows,) into "
        f'the batch, let the loss be (losses * ones).sum() / ones.sum(), and write weight=mask_weight("ones"); or {EVEN}.'
    )


def _full_like(row: Any, value: Any) -> Any:
    return (
        torch.full_like(row, value, requires_grad=False) if isinstance(row, torch.Tensor) else np.full_like(row, value)
    )


def real_rows(output: Any, reading: Reading, rows: int) -> Any:
    """A sub-batch's output without the rows that were filler: its first ones."""
    leaves: list[Any] = []
    reading.root.gather(output, leaves)
    spans = Spans(output, [rows, reading.rows - rows])
    return reading.root.build(
        [leaf.kind.cut(value, spans)[0] for leaf, value in zip(reading.leaves, leaves, strict=True)]
    )


def shape_keys(sizes: Sequence[int], leaves: Sequence[Any], kinds: Sequence[Any]) -> list[tuple[int, ...]]:
    """The shapes of sub-batches in short: their rows, then the other axes' sizes, each once, in the order of the leaves."""
    others: dict[int, None] = {}
    for value, kind in zip(leaves, kinds, strict=True):
        if isinstance(kind, Dense):
            own = kind.axis % len(value.shape)
            others.update((size, None) for axis, size in enumerate(value.shape) if axis != own)
    return [(rows, *others) for rows in dict.fromkeys(sizes)]
