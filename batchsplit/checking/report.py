"""What a check found, as an object and as a page for people."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

KINDS = ("weight", "module", "loss", "randomness", "padding", "state", "precision", "layout", "error")


class Cause(str):
    """Why a cut is not exact: a sentence, with its `kind` and the place `where` it lies (a module, a leaf, a term).

    Kinds: "weight" (the denominator), "module" and "loss" (rows coupled by a module or by the loss), "randomness",
    "padding", "state", "precision", "layout" (a leaf read in the wrong way), "error" (a sub-batch could not be run).
    """

    __slots__ = ("advice", "kind", "where")

    kind: str
    where: str
    advice: str

    def __new__(cls, kind: str, text: str, advice: str, where: str = "") -> Cause:
        cause = super().__new__(cls, text)
        cause.kind, cause.where, cause.advice = kind, where, advice
        return cause

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.kind, str(self), self.advice, self.where


@dataclass(frozen=True)
class CheckReport:
    """What `check` found: is the cut exact, and if not, why and what to do.

    `exact` is the verdict; `error` how far the cut's gradient or loss is from the unsplit batch's, relative to these
    (after a cause "precision": the error in working precision); `causes` a list of `Cause`, sentences with `kind` and
    `where`; `advice` what to do about them; `notes` what else was seen, such as what padding does to the model;
    `gradients` the relative error by parameter, where it is above the tolerance.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, check
        >>> model = torch.nn.Linear(3, 1)
        >>> batch = {"x": torch.rand(5, 3), "y": torch.rand(5, 1)}
        >>> report = check(model, batch, lambda data: ((model(data["x"]) - data["y"]) ** 2).sum(), BatchCutter(rows=2))
        >>> report.exact, [cause.kind for cause in report.causes], report.advice
        (False, ['weight'], ['Write weight=None.'])
    """

    exact: bool
    error: float
    causes: list[Cause] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loss: float = 0.0
    cut_loss: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    sizes: tuple[int, ...] = ()
    precision: str = "float64"

    def __str__(self) -> str:
        verdict = "EXACT" if self.exact else "NOT EXACT"
        lines = [f"batchsplit check: {verdict}", ""]
        lines.append(_item("batch", f"{self.rows} rows, cut in sub-batches of {' + '.join(map(str, self.sizes))}"))
        lines.append(_item("compared in", self.precision))
        lines.append(_item("error", f"{self.error:.2g} relative to the unsplit batch"))
        if self.cut_loss is not None:
            lines.append(_item("loss", f"unsplit {self.loss:.10g}, cut {self.cut_loss:.10g}"))
        if self.gradients:
            worst = sorted(self.gradients.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{name} {error:.2g}" for name, error in worst[:5])
            more = f" and {len(worst) - 5} more" if len(worst) > 5 else ""
            lines.append(_item("gradients off", shown + more))
        for title, texts in (
            ("Why", [f"{cause.kind}: {cause}" for cause in self.causes]),
            ("What to do", self.advice),
            ("Also seen", self.notes),
        ):
            if texts:
                lines += ["", title, *(_wrapped(text) for text in texts)]
        if not self.exact and not self.causes:
            lines += ["", "No cause was found by experiment; the parameters furthest off are named above."]
        return "\n".join(lines)


def _item(name: str, text: str) -> str:
    return textwrap.fill(text, 116, initial_indent=f"  {name:<14} ", subsequent_indent=" " * 17, break_long_words=False)


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, 112, initial_indent="  - ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
