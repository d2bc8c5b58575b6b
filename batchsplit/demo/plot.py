"""The experiment's result as a picture; needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from batchsplit.demo.experiment import Result
from batchsplit.errors import CutError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREYS = {"whole": "0.75", "accumulated": "0.45", "cut": "0.15"}
LINES = {"accumulated": "--", "cut": "-"}


def check_plot(path: str | Path) -> None:
    """Find out before the training whether it can be drawn after it.

    Raises:
        CutError: matplotlib is not installed, or writes no file of this kind.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CutError('--plot needs matplotlib: pip install "batchsplit[plot]"')
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        endings = ", ".join(f".{kind}" for kind in sorted(kinds))
        raise CutError(f"--plot {path}: write a name that ends in one of {endings}.")


def plot(result: Result, path: str | Path) -> None:
    """Draw F1 with every seed, the distance from *whole* step by step, and the bytes saved for backward.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    scores, distances, saved = figure.subplots(1, 3, width_ratios=(1, 1.5, 1))
    _scores(scores, result)
    _distances(distances, result)
    _saved(saved, result)
    figure.savefig(path, dpi=150)


def _scores(axes: Axes, result: Result) -> None:
    for x, (name, arm) in enumerate(result.arms.items()):
        axes.bar(x, fmean(arm.f1), color=GREYS[name], width=0.6)
        offsets = [x + (i - (len(arm.f1) - 1) / 2) * 0.12 for i in range(len(arm.f1))]
        axes.plot(offsets, arm.f1, "o", color="white", markeredgecolor="black", markersize=5)
    _named(axes, result)
    axes.set_ylim(0, 1.02)
    axes.set_title("F1: mean (bar) and seeds (dots)")


def _distances(axes: Axes, result: Result) -> None:
    for name, style in LINES.items():
        for i, steps in enumerate(result.arms[name].differences):
            label = name if i == 0 else None
            axes.plot(range(1, len(steps) + 1), steps, style, color=GREYS[name], label=label, linewidth=1.5)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title("Largest parameter difference from whole")
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, title="one line a seed")


def _saved(axes: Axes, result: Result) -> None:
    for x, (name, arm) in enumerate(result.arms.items()):
        bar = axes.bar(x, arm.saved_bytes / 2**20, color=GREYS[name], width=0.6)
        axes.bar_label(bar, fmt="%.1f")
    _named(axes, result)
    axes.margins(y=0.1)
    axes.set_title("Peak saved for backward, MiB")


def _named(axes: Axes, result: Result) -> None:
    axes.set_xticks(range(len(result.arms)), list(result.arms))
    axes.spines[["top", "right"]].set_visible(False)
