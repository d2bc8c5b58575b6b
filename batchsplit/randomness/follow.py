"""Two traces of one forward, at different numbers of rows, followed together: where are the rows in what is drawn?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from batchsplit.randomness.axes import Axis, Rows
from batchsplit.randomness.operations import seeded
from batchsplit.randomness.row_ops import FRESH, STRIDED
from batchsplit.randomness.rules import Call, Info, Source, pairs_of, rule_for
from batchsplit.randomness.trace import Event, Ref, Trace


@dataclass
class Draw:
    """A random operation of both traces with the axes of its tensors."""

    few: Event
    many: Event
    inputs: list[list[Axis | None]]
    outputs: list[list[Axis | None]] = field(default_factory=list)
    trouble: str = ""


class Follower:
    """Follows the rows through two traces of one forward, event by event."""

    def __init__(self, few: Trace, many: Trace) -> None:
        self.rows = Rows(few.rows, many.rows)
        self.leaves = many.leaves
        self.draws: list[Draw] = []
        self._infos: dict[int, Info] = {}
        self.parted = False  # whether the traces end up in different operations
        self.steered = False  # whether Python read a value that was drawn, as layer drop does
        self.by_value = False  # whether some tensor's shape depended on values, as that of x[mask] does
        self._anchored: set[int] = set()
        events = zip(few.events, many.events, strict=False)
        done = 0
        for first, second in events:
            if not _alike(first, second):
                break
            self._follow(first, second)
            done += 1
        self._rest(few.events[done:], many.events[done:])

    def _rest(self, few: list[Event], many: list[Event]) -> None:
        """Past the first event where the traces part, nothing is known; it matters only if something is drawn."""
        if not few and not many:
            return
        self.parted = True
        reason = f"the forward runs other operations at {self.rows.few} rows than at {self.rows.many}"
        left = [[event for event in events if seeded(event.op)] for events in (few, many)]
        if [event.op for event in left[0]] != [event.op for event in left[1]]:
            culprit = (left[1] or left[0])[0]
            self.draws.append(Draw(culprit, culprit, [], trouble=reason))
            return
        self.draws += [Draw(first, second, [], trouble=reason) for first, second in zip(*left, strict=True)]
        for i, draw in enumerate(self.draws):
            if i not in self._anchored and any(axis for axes in draw.outputs for axis in axes):
                draw.trouble = draw.trouble or reason

    def _info(self, few: Ref, many: Ref) -> Info:
        if many.number not in self._infos:
            outer = 1 if many.number < self.leaves else None
            axes = [self.rows.axis(sizes, outer) for sizes in pairs_of(few, many)]
            self._infos[many.number] = Info(axes, Source(data=any(axes)))
        info = self._infos[many.number]
        if info.source.lost:
            info.axes = [axis and Axis(axis.factor, lost=info.source.lost) for axis in info.axes]
        return info

    def _follow(self, few: Event, many: Event) -> None:
        infos = [self._info(a, b) for a, b in zip(few.tensors, many.tensors, strict=True)]
        before = [list(info.axes) for info in infos]
        self.steered |= many.name in ("_local_scalar_dense", "is_nonzero", "equal") and bool(infos[0].source.draws)
        draw = Draw(few, many, before) if seeded(many.op) else None
        self.by_value |= _sized_by_value(many)
        by_value = any(i.source.by_value for i in infos) or _sized_by_value(many)
        source = Source(any(i.source.data for i in infos), set().union(*(i.source.draws for i in infos)), by_value)
        made = []
        for position, (a, b) in enumerate(zip(few.results, many.results, strict=True)):
            pairs = pairs_of(a, b)
            call = Call(self.rows, few, many, infos, position, self._infos, self._scramble)
            axes = rule_for(many.op)(call, pairs)
            old = self._infos.get(b.number)
            if old is not None:  # written in place
                if many.name not in STRIDED:
                    old.source.data |= source.data
                    old.source.draws |= source.draws
                    old.source.lost = old.source.lost or next((axis.lost for axis in axes if axis is not None), "")
                old.axes = axes
            elif many.name in FRESH:
                sized = by_value if many.name.endswith("_like") else self.by_value
                self._infos[b.number] = Info(axes, Source(by_value=sized), counts=_counts(many))
            elif any(r.alias_info is not None for r in many.op._schema.returns) and infos:
                self._infos[b.number] = Info(axes, infos[0].source, counts=infos[0].counts)
            else:
                self._infos[b.number] = Info(
                    axes, Source(source.data, set(source.draws), by_value and bool(pairs)), counts=_keeps(many, infos)
                )
            made.append(self._infos[b.number])
        if source.data:
            self._anchored |= source.draws
        if draw is not None:
            draw.outputs = [list(info.axes) for info in made]
            for info in made:
                info.source.draws.add(len(self.draws))
            if any(info.source.by_value for info in (*infos, *made)):
                draw.trouble = (
                    "its shape depends on values (boolean indexing, nonzero), which the unsplit batch alone has"
                )
            self.draws.append(draw)

    def _scramble(self, infos: Sequence[Info], reason: str) -> None:
        """Noise that meets no data before its rows lose their order can't be handed out by rows."""
        for info in infos:
            if not info.source.data:
                for number in info.source.draws:
                    if not self.draws[number].trouble and any(a for axes in self.draws[number].outputs for a in axes):
                        self.draws[number].trouble = reason


def _alike(few: Event, many: Event) -> bool:
    refs = [*zip(few.tensors, many.tensors, strict=False), *zip(few.results, many.results, strict=False)]
    return (
        few.op is many.op
        and len(few.tensors) == len(many.tensors)
        and len(few.results) == len(many.results)
        and all(a.number == b.number and len(a.shape) == len(b.shape) for a, b in refs)
    )


def _sized_by_value(event: Event) -> bool:
    masks = event.argument("indices", ()) if event.name in ("index", "_unsafe_index") else ()
    by_mask = any(index is not None and index.mask for index in masks)
    return by_mask or (torch.Tag.dynamic_output_shape in event.op.tags and event.name != "index")


def _counts(event: Event) -> bool:
    return event.name == "arange" and event.argument("start", 0) == 0 and event.argument("step", 1) == 1


def _keeps(event: Event, infos: list[Info]) -> bool:
    return event.name in {"_to_copy", "clone"} and infos[0].counts
