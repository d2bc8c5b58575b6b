"""What padding does to a model: rows run at the batch's width, and at their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench, whole, with_limit
from batchsplit.checking.tracing import Call, changed, trace
from batchsplit.layout import dotted
from batchsplit.leaves import Dense


class Padded(NamedTuple):
    """A row with padding: its number, how wide it is by itself, on which side its padding lies, and what says so."""

    row: int
    width: int
    left: bool
    source: str


def padding_causes(bench: Bench, unsplit: Result, tolerance: float, randomness: str) -> list[Cause]:
    """Padding that is not the batch's own: cut off by the cutter, or made anew inside the model for each sub-batch."""
    if getattr(bench.cutter, "padding", "keep") != "keep":
        kept = with_limit(bench.cutter, padding="keep")
        if _exact(bench, kept, unsplit, tolerance, randomness):
            return [
                Cause(
                    "padding",
                    'padding="trim" cuts off padding that this model sees: with padding="keep" the cut is exact.',
                    'Write padding="keep" (the default), or mask padding in the model.',
                    "cutter",
                )
            ]
    wide = unsplit.seen.padded_widths
    if wide and _exact(bench, bench.cutter, unsplit, tolerance, randomness, wide):
        return [
            Cause(
                "padding",
                "the model pads sequences itself, to the longest of the rows it is given, so a sub-batch has "
                f"another length than the batch (which has {max(wide)}): padded to the batch's length the cut is "
                "exact.",
                "Pad to the batch's length: pad_packed_sequence(..., total_length=width), width being that of the "
                "batch's padded leaves.",
                "pad_packed_sequence",
            )
        ]
    return []


def _exact(bench: Bench, cutter: Any, unsplit: Result, tolerance: float, randomness: str, pad_to: Any = None) -> bool:
    try:
        return compare(bench.weighted(cutter, randomness, pad_to), unsplit).within(tolerance)
    except Exception:
        return False


def padding_note(bench: Bench) -> str:
    """Whether the model is sensitive to padding, and where; nothing where no leaf is padded."""
    padded = _padded_row(bench)
    if padded is None:
        return ""
    row = f"Row {padded.row} (by `{padded.source}`)" if padded.source else f"Row {padded.row}"
    try:
        first, width = _first_moved(bench, padded)
    except Exception as error:
        return f"Padding: {row} could not be run at its own width of {padded.width} ({type(error).__name__}: {error})."
    if first is None:
        return (
            f"Padding: the model is not sensitive to it. {row} gives the same at its own width of {padded.width} as at "
            f"the batch's {width}, so trimming sub-batches would be safe."
        )
    where = f"`{first.name}`" if first.name else "the model itself"
    return (
        f"Padding: the model is sensitive to it. {row} gives something else at its own width of {padded.width} than "
        f"at the batch's {width}; {where} ({type(first.module).__name__}) is the first module whose real positions "
        "move. A cut that keeps the batch's padding is not affected; gradients accumulated over separately padded "
        "batches would train another model, and trimming sub-batches is not safe."
    )


def _padded_row(bench: Bench) -> Padded | None:
    """The row with most padding, as a mask or padding tokens have it."""
    masks: list[tuple[str, Tensor]] = []
    tokens: list[tuple[str, Tensor]] = []
    for leaf, leaf_value in bench.leaves():
        if type(leaf.kind) is Dense and leaf.kind.axis == 0 and len(leaf_value.shape) == 2 and leaf_value.shape[1] > 1:
            value = torch.as_tensor(leaf_value)
            if bool(((value == 0) | (value == 1)).all()):
                masks.append((dotted(leaf.path), value))
            elif not value.is_floating_point():
                tokens.append((dotted(leaf.path), value))
    masks.sort(key=lambda one: "mask" not in one[0])
    for leaves, padding in ((masks, 0), (tokens, None)):
        for path, value in leaves:
            for left in (False, True):
                found = _longest_padding(value, left, path, padding)
                if found is not None:
                    return found
    return None


def _longest_padding(value: Tensor, left: bool, path: str, padding: int | None) -> Padded | None:
    """The row that ends (or begins) with most padding, where padding stands nowhere else in any row."""
    ends = value if left else value.flip(1)
    candidates = [padding] if padding is not None else [int(v) for v in ends[:, 0].unique()]
    for v in candidates:
        run = (ends == v).cumprod(1).sum(1)
        if bool(((ends == v).sum(1) == run).all()) and int(run.max()) > 0:
            inner = torch.where(run < value.shape[1], run, 0)  # a row of nothing but padding has no width
            row = int(inner.argmax())
            if int(inner[row]) > 0 and int(run.min()) == 0:
                return Padded(row, value.shape[1] - int(inner[row]), left, path)
    return None


def _first_moved(bench: Bench, padded: Padded) -> tuple[Call | None, int]:
    """The first call whose real positions move when the row is run at its own width, if the model's result does."""
    calls = []
    with bench.lent() as loan:
        full, width = _row(bench, padded, trimmed=False)
        calls.append(trace(bench, loan, full)[1])
    with bench.lent() as loan:
        calls.append(trace(bench, loan, _row(bench, padded, trimmed=True)[0])[1])
    if [call.name for call in calls[0]] != [call.name for call in calls[1]]:
        raise RuntimeError("other modules are called at another width")
    pairs = list(zip(*calls, strict=True))
    last = [pair for pair in pairs if pair[0].module is bench.model] or pairs
    if not any(_moved(a.outputs, b.outputs, padded.left) for a, b in last):
        return None, width
    for a, b in pairs:
        if _moved(a.outputs, b.outputs, padded.left) and not _moved(a.inputs, b.inputs, padded.left):
            return a, width
    return last[-1][0], width


def _row(bench: Bench, padded: Padded, trimmed: bool) -> tuple[Any, int]:
    """One row of the batch, at the batch's width or at its own, and the batch's width."""
    piece = with_limit(whole(bench.cutter), rows=1).cut(bench.data())._pieces[0]
    width = next(
        v.shape[1]
        for leaf, v in zip(piece.reading.leaves, piece.leaves, strict=True)
        if dotted(leaf.path) == padded.source
    )
    own = slice(width - padded.width, None) if padded.left else slice(padded.width)
    values = []
    for leaf, column in zip(piece.reading.leaves, piece.columns, strict=True):
        value = column[padded.row]
        if trimmed and type(leaf.kind) is Dense:
            for k, size in enumerate(value.shape):
                if k != leaf.kind.axis % len(value.shape) and size == width:
                    value = value[(slice(None),) * k + (own,)]
        values.append(value)
    return piece.reading.root.build(values), width


def _moved(full: list[Tensor], trimmed: list[Tensor], left: bool) -> bool:
    for a, b in zip(full, trimmed, strict=False):
        if a.dim() != b.dim() or a.dim() == 0:
            continue
        for k in range(a.dim()):
            if b.shape[k] < a.shape[k]:
                a = a.narrow(k, a.shape[k] - b.shape[k] if left else 0, b.shape[k])
        if a.shape == b.shape and bool(changed(a, b).any()):
            return True
    return False
