"""A loss that couples rows: no weight can make its parts add up, but all rows' outputs joined can be given to it."""

from __future__ import annotations

import copy

from torch import nn

from batchsplit.checking.mixing import trace
from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench
from batchsplit.forward import CutForward


def loss_causes(bench: Bench, unsplit: Result, tolerance: float, wrong: list[str]) -> list[Cause]:
    """What is left where modules treat each row by itself and no weight fits; with CutForward tried on it."""
    which = ", ".join(f'"{term}"' for term in wrong if term)
    loss = f"the terms {which}" if "," in which else f"the term {which}" if which else "it"
    error = _with_cut_forward(bench, unsplit)
    text = (
        f"rows are coupled by the loss: no module mixes rows, and no weight makes the cut exact, so {loss} is no "
        "sum or mean over rows (contrastive, a correlation, a quantile, the balance of experts, ...)."
    )
    if error is not None and error <= tolerance:
        text += f" With CutForward around the model it is exact, here to {error:.1g}."
        advice = (
            "Write model = CutForward(model, cutter) and give loss_fn the whole batch: it sees the outputs of all "
            "rows, joined."
        )
    else:
        advice = (
            "Give the loss the outputs of all rows: CutForward(module, cutter) runs a module sub-batch by "
            "sub-batch and joins its outputs. Here it could not be shown to help as it stands, so split loss_fn "
            "into modules that treat each row by itself, each in a CutForward, and a loss of their outputs."
        )
    return [Cause("loss", text, advice, wrong[0] if wrong else "")]


def _with_cut_forward(bench: Bench, unsplit: Result) -> float | None:
    """The error with CutForward around every module that loss_fn calls itself; None where it can't be run so."""
    try:
        with bench.lent() as loan:
            began, _ = trace(bench, loan, bench.data())
            outermost = {call.module for call in began if call.depth == 0}

        def wrap(model: nn.Module) -> None:
            for module in outermost:
                inner = copy.copy(module)  # the same parameters, with the class's own forward
                cut_forward = CutForward(inner, bench.cutter)
                module.__dict__["forward"] = cut_forward.__call__

        return compare(bench.but(prepare=wrap).whole(), unsplit).error
    except Exception:
        return None
