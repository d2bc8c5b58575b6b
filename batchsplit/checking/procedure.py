"""Does the cut equal the unsplit batch for this model? And if not, why: each cause is an experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchsplit.checking.chance import draw_causes, quiet
from batchsplit.checking.coupled import loss_causes
from batchsplit.checking.denominators import evidence_by_term, weight_causes, wrong_terms
from batchsplit.checking.memories import differing
from batchsplit.checking.mixing import mixing_causes
from batchsplit.checking.readings import layout_causes
from batchsplit.checking.remembering import state_causes
from batchsplit.checking.report import Cause, CheckReport
from batchsplit.checking.results import Result, compare
from batchsplit.checking.rounding import precision_causes
from batchsplit.checking.runs import Bench, first_rows, with_limit
from batchsplit.checking.widths import padding_causes, padding_note
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.group import Group

EXACT = 1e-12
TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROWS = 32


def check(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Any], cutter: BatchCutter | None = None, *, rows: int = ROWS
) -> CheckReport:
    """Does cutting this batch give the unsplit batch's gradients, loss and buffers? And where it does not: why?

    Runs `loss_fn`, forward and backward, on at most the first `rows` rows of `batch`, unsplit and cut, in float64 (with
    stand-ins for the tensors of the model and a copy of the batch: nothing of the user's changes, generators included).
    Where they differ, experiments find the cause; see `CheckReport`. It takes two runs where all is well, some dozens
    where not, and the memory of the unsplit batch in float64; where that is not there, fewer rows are taken. What
    can't be run in float64 is compared in its own precision, with a wider tolerance, and the report says so. Objects
    that `loss_fn` changes outside of modules can't be put back.

    Raises:
        CutError: the batch can't be cut, or has one row; the loss is no scalar; the whole weight is 0.
        Exception: whatever `loss_fn` raises on the unsplit batch.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, check
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        >>> report = check(model, torch.rand(6, 3), lambda x: model(x).square().mean(), BatchCutter(rows=2))
        >>> report.exact, report.causes[0].kind, report.causes[0].where
        (False, 'module', '1')
    """
    if not isinstance(model, nn.Module):
        raise CutError(
            f"check wants a torch.nn.Module first, not a {type(model).__name__}: check(model, batch, loss_fn, cutter)."
        )
    cutter = BatchCutter(parts=2) if cutter is None else cutter
    notes: list[str] = []
    while True:
        try:
            return _check(model, _some(cutter, batch, rows, notes), loss_fn, cutter, notes)
        except torch.OutOfMemoryError:
            if rows <= 2:
                raise
        rows //= 2
        notes[:] = [f"Memory was short, so at most {rows} rows were taken."]


def _some(cutter: BatchCutter, batch: Any, rows: int, notes: list[str]) -> Any:
    if isinstance(batch, Group):
        notes.append("Of the group, the first loader batch was checked.")
    return first_rows(cutter, batch, rows)


def _check(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Any], cutter: BatchCutter, notes: list[str]
) -> CheckReport:
    cut = cutter.cut(batch)
    if cut.rows == 1:
        raise CutError(
            "a batch of one row can't be cut, so there is nothing to check: give a batch of two rows or more."
        )
    if len(cut) == 1:
        cutter = with_limit(cutter, parts=min(3, cut.rows))
        notes.append(
            f"The cutter leaves these {cut.rows} rows whole; they were cut in {min(3, cut.rows)} for the check."
        )
        cut = cutter.cut(batch)
    bench, unsplit, precision, tolerance = _unsplit(model, batch, loss_fn, cutter)
    found, failure = _cut(bench)
    difference = None if found is None else compare(found, unsplit)
    causes: list[Cause] = []
    if difference is None or not difference.within(tolerance):
        causes = _causes(bench, unsplit, found, tolerance, failure)
    elif differing(unsplit.state, found.state if found is not None else {}):
        causes = state_causes(bench, unsplit, found, tolerance)
    error = float("inf") if difference is None else difference.error
    still = bench.but(prepare=quiet)
    if not causes and difference is not None and bench.dtype is torch.float64:
        causes, worse = precision_causes(bench, unsplit, still)
        error = max(error, worse)
    notes.append(padding_note(still))
    return CheckReport(
        exact=difference is not None and difference.within(tolerance) and not causes,
        error=error,
        causes=causes,
        advice=list(dict.fromkeys(cause.advice for cause in causes)),
        notes=[note for note in notes if note],
        loss=unsplit.loss,
        cut_loss=None if found is None else found.loss,
        gradients={} if difference is None else {n: e for n, e in difference.by_name.items() if e > tolerance},
        rows=cut.rows,
        sizes=tuple(sub.rows for sub in cut),
        precision=precision,
    )


def _unsplit(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Any], cutter: BatchCutter
) -> tuple[Bench, Result, str, float]:
    """The unsplit run, in float64 where it can be; the precision in words; and the tolerance."""
    bench = Bench(model, batch, loss_fn, cutter, torch.float64)
    try:
        return bench, bench.whole(), f"float64, tolerance {EXACT:g}", EXACT
    except (CutError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a kernel without float64, a device without it
        bench = bench.but(dtype=None)
        unsplit = bench.whole()  # what raises here again is the user's own error
        dtypes = {p.dtype for p in model.parameters()} & TOLERANCE.keys() or {torch.float32}
        own = max(dtypes, key=lambda dtype: TOLERANCE[dtype])
        text = f"{own}".removeprefix("torch.") + f", tolerance {TOLERANCE[own]:g}: float64 could not be run ({error})"
        return bench, unsplit, text, TOLERANCE[own]


def _cut(bench: Bench) -> tuple[Result | None, Exception | None]:
    try:
        return bench.cut(), None
    except (CutError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what runs whole and not in parts is a finding
        return None, error


def _causes(
    bench: Bench, unsplit: Result, found: Result | None, tolerance: float, failure: Exception | None
) -> list[Cause]:
    """Why the cut run is not the unsplit one. The experiments that follow start each sub-batch from the unsplit run's
    state and random numbers, so that these two can't be mistaken for something else."""
    state = state_causes(bench, unsplit, found, tolerance)
    drawn = draw_causes(bench, unsplit, found, tolerance)
    if drawn.randomness == "unknown":
        return [*drawn.causes, *state]
    base, right, randomness = drawn.bench, drawn.unsplit, drawn.randomness
    try:
        explained = compare(base.weighted(None, randomness), right).within(tolerance)
        parts = list(base.parts(base.cutter, randomness))
    except Exception as error:
        explained, parts, failure = False, [], failure or error
    others: list[Cause] = []
    if not explained:
        evidence = evidence_by_term(right, parts) if parts else {}
        others = (
            weight_causes(base, right, evidence, tolerance, randomness)
            or padding_causes(base, right, tolerance, randomness)
            or layout_causes(base, right, tolerance, randomness)
            or (mixing_causes(base, bench.but(prepare=quiet)) if parts or failure is None else [])
            or weight_causes(base, right, evidence, tolerance, randomness, fitted=True)
        )
        if not others and failure is None and "loss_fn" not in [cause.where for cause in state]:
            others = loss_causes(base, right, tolerance, wrong_terms(base, evidence, tolerance))
    if failure is not None and not others:
        others = [_failed(failure)]
    return [*others, *drawn.causes, *state]


def _failed(error: Exception) -> Cause:
    return Cause(
        "error",
        f"a sub-batch could not be run, though the unsplit batch can: {type(error).__name__}: {error}",
        "See what cut.explain() says of each leaf, and declare in layout what is not one entry a row.",
    )
