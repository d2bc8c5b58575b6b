"""A cut, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchsplit.area import width_of
from batchsplit.doubts import looks
from batchsplit.errors import CutError
from batchsplit.group import Group
from batchsplit.layout import dotted

if TYPE_CHECKING:
    from batchsplit.cutter import Cut, Piece


def explain(cut: Cut) -> str:
    """What each leaf was taken for and why, and the sizes of the sub-batches."""
    lines = [repr(cut).removeprefix("Cut(").removesuffix(")")]
    for i, piece in enumerate(cut._pieces):
        if isinstance(cut.batch, Group):
            lines += ["", f"loader batch {i}: {piece.spans.slices[-1].stop} rows"]
        lines += ["", *_table(piece), *_notes(piece)]
    return "\n".join(lines)


def _table(piece: Piece) -> list[str]:
    rows = [("leaf", "type", "shape", "treated as")]
    for leaf, value in zip(piece.reading.leaves, piece.leaves, strict=True):
        if leaf.path or len(piece.reading.leaves) == 1:
            rows.append((dotted(leaf.path) or "(the batch)", _type(value), _shape(value), leaf.kind.text))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _notes(piece: Piece) -> list[str]:
    reading = piece.reading
    notes = [f"The batch has {piece.spans.slices[-1].stop} rows, known by {reading.source}."]
    try:
        width, text = width_of(reading, piece.leaves, piece.spans.batch, None)
        notes.append(f"A row is {width} wide ({text}); the largest sub-batch has an area of {width * max(piece.spans.sizes)}.")
    except CutError:
        notes.append("No leaf says how wide a row is, so there is no area.")
    for leaf in reading.leaves:
        if leaf.other:
            notes.append(f'Coincidence: "{dotted(leaf.path)}" fits another reading too; for that one write {leaf.other}.')
    return ["", *notes]


def _type(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else type(value).__name__


def _shape(value: Any) -> str:
    if hasattr(value, "shape"):
        return str(tuple(value.shape))
    return looks(value).split(" of ")[-1] if isinstance(value, (list, tuple)) else ""
