"""The experiment's result in words and figures."""

from __future__ import annotations

from statistics import fmean, stdev

import torch

from batchsplit.demo.experiment import ArmResult, Result

HEADINGS = ("arm", "F1", "exact match", "from whole: step 1", "at the end", "saved for backward", "seconds")
KEY = """\
F1 and exact match: mean ± standard deviation over seeds. From whole: a parameter's largest difference, in any seed.
Saved for backward: the most at any time in a first step, without parameters and batch. Seconds: all training steps."""


def summary(result: Result) -> str:
    """What was read, the table with a key to it, and what it says."""
    return f"{read(result)}\n\n{table(result)}\n\n{KEY}\n\n{sentence(result)}"


def read(result: Result) -> str:
    """What the readers were trained and tested on, and what was left out of it."""
    questions, settings = result.questions, result.settings
    text = (
        f"{questions.source}: {len(questions.items)} questions, {result.trained_on} to train on, {result.tested_on} "
        f"held out to test on, with paragraphs of their own.\n{settings.seeds} seed{'s' * (settings.seeds > 1)} × "
        f"{settings.steps} steps of {settings.batch} rows, accumulated and cut {settings.rows} rows at a time, "
        f"{settings.dtype}, no dropout."
    )
    if questions.left_out:
        text += "\nLeft out: " + ", ".join(f"{count} {reason}" for reason, count in questions.left_out.items()) + "."
    if questions.corrected:
        text += "\nKept: " + ", ".join(f"{count} {reason}" for reason, count in questions.corrected.items()) + "."
    return text


def table(result: Result) -> str:
    """One line an arm: mean ± standard deviation over seeds, largest parameter differences, bytes, seconds."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for name, arm in result.arms.items():
        apart = ("–", "–") if name == "whole" else (f"{arm.difference_from_whole:.1e}", f"{arm.difference_at_end:.1e}")
        scores = mean_and_spread(arm.f1), mean_and_spread(arm.exact_match)
        lines.append((name, *scores, *apart, f"{arm.saved_bytes / 2**20:.1f} MiB", f"{arm.seconds:.1f}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))])
        for name, *cells in lines
    )


def mean_and_spread(scores: list[float]) -> str:
    """Mean ± sample standard deviation; the mean alone of a single score.

    Example:
        >>> mean_and_spread([0.5, 0.75]), mean_and_spread([0.5])
        ('0.6250 ± 0.1768', '0.5000')
    """
    return f"{fmean(scores):.4f}" + (f" ± {stdev(scores):.4f}" if len(scores) > 1 else "")


def is_rounding(difference: float, result: Result) -> bool:
    """Whether a difference after the first step is rounding alone.

    Adam divides a gradient by its own size, so where a gradient is nearly zero its rounding is blown up. The line is
    therefore drawn at the square root of the precision, as a part of Adam's longest step: the learning rate.
    """
    return difference <= torch.finfo(getattr(torch, result.settings.dtype)).eps ** 0.5 * result.settings.learning_rate


def sentence(result: Result) -> str:
    """What the numbers say, whatever they say, in one sentence."""
    whole, accumulated, cut = (result.arms[name] for name in ("whole", "accumulated", "cut"))
    first = f"After one step {_agreement('cut', cut, result)}, {_agreement('accumulated', accumulated, result)}"
    away = f"{cut.difference_at_end:.1e} and {accumulated.difference_at_end:.1e} away"
    ends = f"after {result.settings.steps} they are {away}"
    scores = f"in F1 {_compared('cut', cut, whole)}, {_compared('accumulated', accumulated, whole)}"
    saved = f"cut saved {cut.saved_bytes / whole.saved_bytes:.2f} × whole's bytes for backward"
    return f"{first}; {ends}; {scores}; {saved}."


def _agreement(name: str, arm: ArmResult, result: Result) -> str:
    verdict = (
        "agrees with whole to rounding" if is_rounding(arm.difference_from_whole, result) else "differs from whole"
    )
    return f"{name} {verdict} (largest parameter difference {arm.difference_from_whole:.1e})"


def _compared(name: str, arm: ArmResult, whole: ArmResult) -> str:
    gaps = [mine - theirs for mine, theirs in zip(arm.f1, whole.f1, strict=True)]
    gap = fmean(gaps)
    if not any(gaps):
        return f"{name} equals whole"
    text = f"{name} is {abs(gap):.4f} {'below' if gap < 0 else 'above'} whole"
    if len(gaps) == 1:
        return f"{text} (of one seed, which can't tell that from chance)"
    spread = max(stdev(arm.f1), stdev(whole.f1))
    return f"{text} ({'no more' if abs(gap) <= spread else 'more'} than the seeds' spread of {spread:.4f})"
