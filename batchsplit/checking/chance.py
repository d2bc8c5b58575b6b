"""Dropout and its kin: a cut draws other random numbers than the unsplit batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench


class Drawn(NamedTuple):
    """Whether random numbers are a cause, and how further experiments get the unsplit run's (or none)."""

    causes: list[Cause]
    bench: Bench
    unsplit: Result
    randomness: str


def quiet(model: nn.Module) -> None:
    """Eval mode for all but normalisation, whose rows would no longer be coupled."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0  # cuDNN has no backward in eval mode
        elif "Norm" not in type(module).__name__:
            module.training = False


def draw_causes(bench: Bench, unsplit: Result, cut: Result | None, tolerance: float) -> Drawn:
    """Does the cut differ in its random numbers? Runs it with the unsplit run's, or else with dropout off."""
    if not unsplit.drew:
        return Drawn([], bench, unsplit, "fresh")
    try:
        lent = bench.weighted(None, "whole")
    except Exception:  # an operation that can't be drawn by rows, or a sub-batch that can't be run
        still = bench.but(prepare=quiet)
        without = _quietly(still)
        if without is None or without.drew:
            return Drawn([_cause(bench, _BLIND)], bench, unsplit, "unknown")
        return Drawn(
            [_cause(bench, _left("with dropout off", _try(still, without, tolerance)))], still, without, "fresh"
        )
    exact = compare(lent, unsplit).within(tolerance)
    differs = cut is None or not compare(cut, lent).within(tolerance)
    causes = [_cause(bench, _left('under randomness="whole"', exact))] if differs else []
    return Drawn(causes, bench, unsplit, "whole")


_BLIND = (
    "they can be neither lent (something draws otherwise than with torch, or where it can't be seen) nor switched off, "
    "so that no other cause can be looked for."
)


def _left(how: str, exact: bool) -> str:
    return f"{how} the cut is exact." if exact else f"{how} a difference remains, for which see the other causes."


def _quietly(bench: Bench) -> Result | None:
    """The unsplit run without dropout; None for a model that gives no loss in eval mode."""
    try:
        return bench.whole()
    except Exception:
        return None


def _try(bench: Bench, unsplit: Result, tolerance: float) -> bool:
    try:
        return compare(bench.weighted(), unsplit).within(tolerance)
    except Exception:
        return False


def _cause(bench: Bench, left: str) -> Cause:
    drawing = [name or "the model" for name, module in bench.model.named_modules() if _draws(module)]
    who = ", ".join(f"`{name}`" for name in drawing[:4]) or "somewhere in the forward"
    more = f" and {len(drawing) - 4} more" if len(drawing) > 4 else ""
    return Cause(
        "randomness",
        f"the sub-batches draw other random numbers than the unsplit batch ({who}{more}): {left}",
        "Nothing is wrong with fresh dropout for each sub-batch: it is as good a sample. To have the unsplit batch's "
        'own masks, write randomness="whole".',
        drawing[0] if drawing else "",
    )


def _draws(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, (_DropoutNd, nn.RReLU)):
        return getattr(module, "p", 1.0) > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
