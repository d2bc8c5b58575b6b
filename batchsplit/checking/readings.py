"""Leaves that were cut on the wrong axis, or should not have been cut: the shapes fit, and the numbers do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench, with_limit
from batchsplit.layout import PER_ROW, SHARED, Layout, axis, dotted
from batchsplit.leaves import Dense

TRIALS = 24
_MARKS = re.compile(r'"([^"]+)": (SHARED|PER_ROW|axis\((-?\d+)\))')


def layout_causes(bench: Bench, unsplit: Result, tolerance: float, randomness: str) -> list[Cause]:
    """The leaves whose other reading makes the cut exact."""
    for trial in list(_trials(bench))[:TRIALS]:
        layout = Layout({**bench.cutter.layout.declared, **trial})
        try:
            found = bench.weighted(with_limit(bench.cutter, layout=layout), randomness)
        except Exception:  # a reading that this batch, or the model, does not bear
            continue
        if compare(found, unsplit).within(tolerance):
            return [_cause(trial)]
    return []


def _trials(bench: Bench) -> Iterator[dict[str, Any]]:
    """Other readings: those that the cutter itself noticed, all of them together, then what else the shapes allow."""
    noticed: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    # ids and labels are nearly always one row each, so numbers are tried first
    for leaf, value in sorted(bench.leaves(), key=lambda one: not _floating(one[1])):
        path = dotted(leaf.path)
        marks = {name: _marker(word, number) for name, word, number in _MARKS.findall(leaf.other)}
        if marks:
            noticed.append(marks)
        if type(leaf.kind) is Dense and leaf.kind.axis == 0 and path not in bench.cutter.layout.declared:
            shape = tuple(value.shape)
            others += [{path: axis(k)} for k in range(1, len(shape)) if shape[k] == bench.rows]
            others.append({path: SHARED})
    yield from noticed
    if len(noticed) > 1:
        yield {name: marker for marks in noticed for name, marker in marks.items()}
    yield from (other for other in others if other not in noticed)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _marker(word: str, number: str) -> Any:
    return axis(int(number)) if number else {"SHARED": SHARED, "PER_ROW": PER_ROW}[word]


def _cause(trial: dict[str, Any]) -> Cause:
    line = "layout={" + ", ".join(f'"{path}": {marker!r}' for path, marker in trial.items()) + "}"
    names = " and ".join(f"`{path}`" for path in trial)
    text = (
        f"{names} {'were' if len(trial) > 1 else 'was'} cut in the wrong way: the shape allows it, but only with "
        f"{line} is the cut exact."
    )
    return Cause("layout", text, f"Write {line}.", next(iter(trial)))
