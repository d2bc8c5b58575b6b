"""What a run gave, and how far it is from what it should have given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchsplit.checking.memories import State
from batchsplit.checking.widening import Seen

TERM_FLOOR = 1e-2  # a parameter whose gradient is below this part of the whole is judged by the whole's rounding
Gradients = dict[str, Tensor]


@dataclass
class Result:
    """What a run gave: the loss and the gradients, both by term, and the state that the forward left."""

    values: dict[str, float]
    gradients: dict[str, Gradients]
    state: State = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    drew: bool = False  # did it draw random numbers?

    @property
    def loss(self) -> float:
        return math.fsum(self.values.values())

    @property
    def gradient(self) -> Gradients:
        """Of all terms together."""
        total: Gradients = {}
        for gradients in self.gradients.values():
            add(total, gradients)
        return total


@dataclass(frozen=True)
class Difference:
    """How far a gradient and a loss are from the right ones, relative to these."""

    gradient: float
    loss: float
    worst: str = ""  # the parameter furthest off, measured against its own gradient
    worst_error: float = 0.0
    by_name: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return max(self.gradient, self.loss)

    def within(self, tolerance: float) -> bool:
        return max(self.error, self.worst_error) <= tolerance


def add(total: Gradients, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
    """Add gradients to others, in place."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient * factor if name in total else gradient * factor


def compare(found: Result, right: Result) -> Difference:
    """Gradients and loss against the right ones."""
    mine, theirs = found.gradient, right.gradient
    norms = {name: float(g.norm()) for name, g in theirs.items()}
    whole = math.hypot(*norms.values())
    off = {name: float(_minus(mine.get(name), theirs.get(name)).norm()) for name in mine.keys() | theirs.keys()}
    by_name = {name: _over(d, max(norms.get(name, 0.0), TERM_FLOOR * whole)) for name, d in off.items()}
    worst = max(by_name, key=lambda name: _order(by_name[name]), default="")
    scale = max(abs(right.loss), *(abs(v) for v in right.values.values()), *(abs(v) for v in found.values.values()))
    return Difference(
        _over(math.hypot(*off.values()), whole),
        _over(abs(found.loss - right.loss), scale),
        worst,
        by_name.get(worst, 0.0),
        by_name,
    )


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        return a if a is not None else b if b is not None else torch.zeros(())
    return a - b


def _over(difference: float, scale: float) -> float:
    """A relative difference; infinite where something is there that should not be, or where it is no number."""
    if math.isnan(difference) or math.isnan(scale):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value
