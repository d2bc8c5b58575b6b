"""A cut, as a table for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from batchsplit.area import AreaOf, width_of
from batchsplit.errors import CutError
from batchsplit.group import Group
from batchsplit.layout import Layout, dotted
from batchsplit.leaves import Dense
from batchsplit.reading import Reading, read

if TYPE_CHECKING:
    from batchsplit.cuts import Cut, Piece

SHOWN = 12  # sub-batches in the table; of more, the first and the last ones
MASKS = ("attention_mask", "input_mask", "padding_mask", "mask")


def explain(cut: Cut) -> str:
    """What each leaf was taken for and why, and the sizes of the sub-batches."""
    lines = [repr(cut).removeprefix("Cut(").removesuffix(")")]
    for i, piece in enumerate(cut._pieces):
        if isinstance(cut.batch, Group):
            lines += ["", f"loader batch {i}: {sum(piece.spans.sizes)} rows"]
        lines += ["", *_explained(piece, cut._cutter.layout, cut._cutter.area_of)]
    return "\n".join(lines)


def _explained(piece: Piece, layout: Layout, area_of: AreaOf) -> list[str]:
    # The cut may have used the plan of another batch, of the same structure but without this one's coincidences.
    reading = read([piece.reading.root.build(piece.leaves)], layout)
    leaves = _leaves(reading, piece.leaves)
    lines = [*_table(["leaf", "type", "shape", "treated as", "because"], leaves), ""]
    lines.append(f"The batch has {sum(piece.spans.sizes)} rows, known by {reading.source}.")
    mask = _mask(reading, piece.leaves)
    width = None
    try:
        width, text = width_of(reading, piece.leaves, piece.spans.batch, area_of)
        largest = width * max(size + piece.filler(i) for i, size in enumerate(piece.spans.sizes))
        lines.append(f"A row is {width} wide ({text}); the largest sub-batch has an area of {largest}.")
    except CutError:
        lines.append("No leaf says how wide a row is, so there is no area.")
    if mask is not None:
        lines.append(f"{_percent(mask[1])} of the batch's positions are padding, by {mask[0]}.")
    others: dict[str, list[str]] = {}
    for leaf in reading.leaves:
        others.setdefault(leaf.other, []).append(f'"{dotted(leaf.path)}"' if leaf.path else "the batch")
    for line, names in others.items():
        if line:
            text = f"{', '.join(names)} {'fits' if len(names) == 1 else 'fit'} another reading too"
            lines.append(f"Coincidence: {text}; for that one write {line}.")
    return [*lines, "", *_sub_batches(piece, width, mask)]


def _leaves(reading: Reading, values: Iterable[Any]) -> list[list[str]]:
    return [
        [dotted(leaf.path) or "(the batch)", _type(value), _shape(value), leaf.kind.text, leaf.kind.why]
        for leaf, value in zip(reading.leaves, values, strict=True)
        if not leaf.container
    ]


def _sub_batches(piece: Piece, width: int | None, mask: tuple[str, Any] | None) -> list[str]:
    rows = [["sub-batch", "rows", *(["area"] if width else []), *(["padding"] if mask else [])]]
    for i, (size, where) in enumerate(zip(piece.spans.sizes, piece.spans.slices, strict=True)):
        area = [str((size + piece.filler(i)) * width)] if width else []
        filler = f" + {piece.filler(i)} filler" if piece.filler(i) else ""
        rows.append([str(i), f"{where.start}:{where.stop}{filler}", *area, *([_percent(mask[1][where])] if mask else [])])
    if len(rows) > SHOWN + 1:
        rows = [*rows[: SHOWN // 2 + 1], ["..."] * len(rows[0]), *rows[-SHOWN // 2 :]]
    return _table(rows[0], rows[1:])


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, rule, *rows]
    ]


def _mask(reading: Reading, values: Iterable[Any]) -> tuple[str, Any] | None:
    """The name of a mask of the positions that are no padding, and the mask itself, where the batch has one."""
    found = {}
    for leaf, value in zip(reading.leaves, values, strict=True):
        name = leaf.path[-1].text if leaf.path else ""
        if name in MASKS and type(leaf.kind) is Dense and leaf.kind.axis == 0 and len(value.shape) == 2:
            if not getattr(value, "is_meta", False) and bool(((value == 0) | (value == 1)).all()):
                found[name] = dotted(leaf.path), value
    return next((found[name] for name in MASKS if name in found), None)


def _percent(mask: Any) -> str:
    return f"{1 - float(mask.sum()) / max(mask.size if isinstance(mask, np.ndarray) else mask.numel(), 1):.1%}"


def _type(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype) if name in ("Tensor", "ndarray", "NestedTensor") else f"{name} of {value.dtype}"
    return name


def _shape(value: Any) -> str:
    if isinstance(value, PackedSequence):
        return f"{value.batch_sizes[0]} rows of {len(value.batch_sizes)} steps at most"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        nested = isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided
        return "nested" if nested else str(tuple(value.shape))
    return str(len(value)) if isinstance(value, (list, tuple, deque)) else ""
