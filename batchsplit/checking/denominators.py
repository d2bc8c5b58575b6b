"""Is the weight wrong? Every denominator that a batch offers is tried; the one that makes the cut exact is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from batchsplit.checking.candidates import Candidate, candidates
from batchsplit.checking.report import Cause
from batchsplit.checking.results import Gradients, Result, compare
from batchsplit.checking.runs import Bench, with_limit
from batchsplit.errors import CutError
from batchsplit.weights import row_weight

SKETCH = 128  # entries of each parameter's gradient by which candidates are told apart
FIT = 1e-9


class Evidence:
    """What each sub-batch's loss alone sends back, in a sketch: enough to try any weight without another run."""

    def __init__(self, unsplit: Result, parts: list[Result], term: str) -> None:
        right = unsplit.gradients[term]
        chosen = {n: g.flatten().abs().topk(min(SKETCH, g.numel())).indices for n, g in right.items()}
        self.target = _sketch(right, right, chosen)
        self.columns = [_sketch(part.gradients[term], right, chosen) for part in parts]
        self.losses = [part.values[term] for part in parts]
        self.loss = unsplit.values[term]

    def error(self, shares: list[float]) -> float:
        """How far these shares are from making the cut exact."""
        counted = [(s, c, v) for s, c, v in zip(shares, self.columns, self.losses, strict=True) if s]
        total = sum((c * s for s, c, _ in counted), torch.zeros_like(self.target))
        loss = abs(math.fsum(s * v for s, _, v in counted) - self.loss)
        scale = max([abs(self.loss)] + [abs(s * v) for s, _, v in counted]) or 1.0
        off = float((total - self.target).norm()) / (float(self.target.norm()) or 1.0)
        return math.inf if math.isnan(off) or math.isnan(loss) else max(off, loss / scale)

    def fitted(self, tolerance: float) -> list[float] | None:
        """The shares that would make the cut exact, from the gradients alone; None where there are none.

        They have to add up to 1, as those of any mean do: those of a loss that is another function of a mean (its
        root, say) do not, and no weight can stand for them.
        """
        live = [i for i, column in enumerate(self.columns) if torch.isfinite(column).all() and column.any()]
        entries = int((self.target != 0).sum())
        if not live or entries < 2 * len(live) + 2:  # almost any gradient would be fitted
            return None
        matrix = torch.stack([self.columns[i] for i in live], 1).cpu()
        found = torch.linalg.lstsq(matrix, self.target.cpu()[:, None], driver="gelsd").solution.flatten().tolist()
        shares = [0.0] * len(self.columns)
        for i, share in zip(live, found, strict=True):
            shares[i] = share
        fits = (
            self.error(shares) < tolerance
            and abs(math.fsum(shares) - 1) < 100 * tolerance
            and min(shares) > -100 * tolerance
        )
        return shares if fits else None


def _sketch(gradients: Gradients, right: Gradients, chosen: Mapping[str, Tensor]) -> Tensor:
    pieces = [
        gradients[name].flatten()[index] if name in gradients else torch.zeros_like(right[name].flatten()[index])
        for name, index in chosen.items()
    ]
    return torch.cat([piece.cpu() for piece in pieces]) if pieces else torch.zeros(1)


def shares_of(bench: Bench, weight: Any) -> list[float] | None:
    """The shares that a weight gives, or None where it gives none."""
    try:
        return [sub.share for sub in with_limit(bench.cutter, weight=weight).cut(bench.data())]
    except Exception:  # a candidate that does not suit this batch
        return None


def weight_causes(
    bench: Bench,
    unsplit: Result,
    evidence: Mapping[str, Evidence],
    tolerance: float,
    randomness: str,
    fitted: bool = False,
) -> list[Cause]:
    """The terms whose weight is wrong; empty where no weight makes the cut exact.

    With `fitted` also where the right shares are those of no denominator that the batch offers.
    """
    right: dict[str, Any] = {}
    causes: list[Cause] = []
    for term, one in evidence.items():
        now = _given(bench, term)
        shares = shares_of(bench, now)
        if shares is not None and one.error(shares) < max(FIT, tolerance):
            right[term] = now
            continue
        found = next((c for c in candidates(bench, unsplit.seen) if _fits(bench, one, c, tolerance)), None)
        if found is not None:
            right[term] = found.weight
            causes.append(_named(term, now, found, shares, one))
            continue
        free = one.fitted(max(FIT, tolerance)) if fitted else None
        if free is None:
            return []
        causes.append(_unknown(term, free, shares))
    if causes and len(right) == len(evidence) and not _confirmed(bench, unsplit, right, tolerance, randomness):
        return []
    return causes


def wrong_terms(bench: Bench, evidence: Mapping[str, Evidence], tolerance: float) -> list[str]:
    """The terms of the loss that the weights given do not make exact."""
    wrong = []
    for term, one in evidence.items():
        shares = shares_of(bench, _given(bench, term))
        if shares is None or one.error(shares) >= max(FIT, tolerance):
            wrong.append(term)
    return wrong


def _given(bench: Bench, term: str) -> Any:
    weight = bench.cutter.weight
    return weight.get(term) if isinstance(weight, Mapping) else weight


def _fits(bench: Bench, evidence: Evidence, candidate: Candidate, tolerance: float) -> bool:
    shares = shares_of(bench, candidate.weight)
    return shares is not None and evidence.error(shares) < max(FIT, tolerance)


def _confirmed(bench: Bench, unsplit: Result, right: Mapping[str, Any], tolerance: float, randomness: str) -> bool:
    """Is the cut exact with these weights, in a run of its own?"""
    weight = right[""] if list(right) == [""] else dict(right)
    try:
        return compare(bench.weighted(with_limit(bench.cutter, weight=weight), randomness), unsplit).within(tolerance)
    except CutError:
        return False


def _named(term: str, given: Any, found: Candidate, shares: list[float] | None, evidence: Evidence) -> Cause:
    loss = f'the term "{term}"' if term else "your loss"
    text = f"the denominator is wrong: {loss} is {found.meaning}"
    if found.weight is None:
        text += ", so nothing may scale it again"
    elif given is None:
        text += ", and without a weight every sub-batch counts in full"
    if shares is not None:
        text += f" ({_name(given)} is off by {evidence.error(shares):.3g})"
    weight = f"weight={{{term!r}: {found.written}, ...}}" if term else f"weight={found.written}"
    return Cause("weight", f"{text}: `{weight}`", f"Write {weight}.", term)


def _unknown(term: str, fitted: list[float], shares: list[float] | None) -> Cause:
    loss = f'the term "{term}"' if term else "your loss"
    numbers = ", ".join(f"{share:.4g}" for share in fitted)
    now = ", ".join(f"{share:.4g}" for share in shares or [])
    text = (
        f"the denominator is wrong: {loss} is a mean, but over nothing that the batch holds as such. The cut is "
        "exact with "
        f"the shares {numbers}" + (f" instead of {now}." if now else ".")
    )
    advice = (
        "Give the cutter a function from a sub-batch's data to its part of the denominator, as in "
        "weight=lambda data: class_weights[data['labels']].sum(); its parts have to be in the ratio "
        + " : ".join(numbers.split(", "))
        + "."
    )
    return Cause("weight", text, advice, term)


def _name(weight: Any) -> str:
    return f"weight={'row_weight' if weight is row_weight else getattr(weight, '__name__', repr(weight))}"


def evidence_by_term(unsplit: Result, parts: list[Result]) -> dict[str, Evidence]:
    """For each term of the loss, what each sub-batch alone sends back."""
    return {term: Evidence(unsplit, parts, term) for term in unsplit.values}
