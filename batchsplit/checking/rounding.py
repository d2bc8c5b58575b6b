"""In lower precision a cut may be no further from the float64 truth than the unsplit batch is."""

from __future__ import annotations

import torch

from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench

FACTOR = 1.25
FLOOR = {torch.float32: 16.0, torch.bfloat16: 0.5, torch.float16: 0.5}  # in units of eps: below this all is rounding


def precision_causes(bench: Bench, unsplit: Result, still: Bench) -> tuple[list[Cause], float]:
    """Gradients that lose their small parts as they add up in the parameters' precision, and their relative error.

    `unsplit` is the run in float64, the truth. Random numbers are others in another precision, so a model that draws is
    compared as `still` has it, with dropout off. Given as a cause only where adding the very same gradients up in a
    wider precision mends it.
    """
    dtypes = {p.dtype for p in bench.model.parameters() if p.is_floating_point()} & FLOOR.keys()
    if not dtypes:
        return [], 0.0
    own = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    working = (still if unsplit.drew else bench).but(dtype=None)
    try:
        truth = still.whole() if unsplit.drew else unsplit
        if truth.drew:
            return [], 0.0
        whole = compare(working.whole(), truth).gradient
        cut = compare(working.cut(), truth).gradient
    except Exception:  # what can't be run in its own precision here (16 bits on a CPU) can't be judged
        return [], 0.0
    if cut <= max(FACTOR * whole, FLOOR[own] * torch.finfo(own).eps):
        return [], 0.0
    wide = compare(working.weighted(), truth).gradient
    if wide > max(FACTOR * whole, cut / 2):
        return [], 0.0
    name = str(own).removeprefix("torch.")
    text = (
        f"precision: in float64 the cut is exact, but the gradients of the sub-batches add up in {name}, where "
        f"small parts vanish: their sum is {cut:.2g} from the float64 gradient, the unsplit batch's {whole:.2g}; "
        f"the same gradients added up in a wider precision, {wide:.2g}."
    )
    advice = 'Add gradients up in float32: accumulate="float32", which StepDriver does by itself for 16-bit parameters.'
    return [Cause("precision", text, advice, name)], cut
