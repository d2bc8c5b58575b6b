"""Runs of a user's loss on stand-ins: on the whole batch, on its sub-batches, and what comes of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from batchsplit.checking.loan import Change, Loan
from batchsplit.checking.memories import state_of
from batchsplit.checking.results import Gradients, Result, add
from batchsplit.checking.widening import WIDE
from batchsplit.containers import map_leaves
from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.group import Group
from batchsplit.randomness import WholeRandomness
from batchsplit.randomness.streams import Streams
from batchsplit.reading import Leaf
from batchsplit.step import accumulate


class Bench:
    """Runs `loss_fn` on stand-ins of the model's tensors and a copy of the batch, each time from the same start.

    `dtype` as in `Loan`; `prepare(model)` changes the stand-ins first (another mode, say).
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[[Any], Any],
        cutter: BatchCutter,
        dtype: torch.dtype | None,
        prepare: Change | None = None,
    ) -> None:
        self.model, self.batch, self.loss_fn, self.cutter = model, batch, loss_fn, cutter
        self.dtype, self.prepare = dtype, prepare
        self.rows = whole(cutter).cut(batch).rows
        self._beside: dict[int, Any] = {}
        self._plans: dict[Any, Any] = {}

    def but(self, **changes: Any) -> Bench:
        """The same bench with other attributes."""
        other = copy.copy(self)
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    @contextmanager
    def lent(self) -> Iterator[Loan]:
        """The model's stand-ins, in place."""
        with Loan(self.model, self.dtype, self.prepare, self._beside) as loan:
            yield loan

    def data(self, batch: Any = None) -> Any:
        """A copy of the batch, its floating leaves widened."""
        return map_leaves(self._leaf, self.batch if batch is None else batch)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            new = leaf.detach().clone()
            new = new.to(WIDE[new.dtype]) if self.dtype is not None and new.dtype in WIDE else new
            return new.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, np.ndarray):
            return leaf.astype(np.float64) if self.dtype is not None and leaf.dtype.kind == "f" else leaf.copy()
        try:
            new = copy.deepcopy(leaf)
        except Exception:  # what can't be copied is lent as it is
            return leaf
        if isinstance(new, PackedSequence) and self.dtype is not None and new.data.dtype in WIDE:
            return new.to(WIDE[new.data.dtype])
        return new

    def whole(self, pad_to: list[int] | None = None) -> Result:
        """The unsplit run."""
        with self.lent() as loan:
            loan.widening.pad_to = pad_to
            return self._run(loan, self.data())

    def part(
        self, cutter: BatchCutter, index: int, randomness: str = "fresh", pad_to: list[int] | None = None
    ) -> Result:
        """The run of one sub-batch alone, without its share, from the same state as the unsplit run."""
        with self.lent() as loan:
            loan.widening.pad_to = pad_to
            cut = cutter.cut(self.data())
            with self.draws(cut, randomness).rows(cut[index].where) if randomness == "whole" else _plain():
                return self._run(loan, cut[index].data)

    def parts(
        self, cutter: BatchCutter, randomness: str = "fresh", pad_to: list[int] | None = None
    ) -> Iterator[Result]:
        """The run of each sub-batch, each from the same state as the unsplit run."""
        for index in range(len(cutter.cut(self.batch))):
            yield self.part(cutter, index, randomness, pad_to)

    def cut(self, cutter: BatchCutter | None = None, batch: Any = None) -> Result:
        """The cut run, as `run_step` does it: one sub-batch after the other, each with its share."""
        with self.lent() as loan:
            start = Streams.now()
            done = accumulate((cutter or self.cutter).cut(self.data(batch)), self.loss_fn)
            drew = not Streams.now().same(start)
            gradients = {name: _dense(p.grad) for name, p in loan.parameters() if p.grad is not None}
            terms = {name: float(term) for name, term in done.terms.items()} or {"": float(done.loss)}
            return Result(terms, {"": gradients}, state_of(loan), loan.widening.seen, drew)

    def weighted(
        self, cutter: BatchCutter | None = None, randomness: str = "fresh", pad_to: list[int] | None = None
    ) -> Result:
        """The cut run with each sub-batch starting from the unsplit run's state, in generators and in modules."""
        cutter = cutter or self.cutter
        total = Result({}, {"": {}})
        for index, share in enumerate([sub.share for sub in cutter.cut(self.data())]):
            part = self.part(cutter, index, randomness, pad_to)
            for term, value in part.values.items():
                own = share[term] if isinstance(share, Mapping) else share
                if own:  # the mean over nothing is NaN
                    total.values[term] = total.values.get(term, 0.0) + own * value
                    add(total.gradients[""], part.gradients[term], own)
        return total

    def leaves(self) -> list[tuple[Leaf, Any]]:
        """The leaves of the batch that are cut by rows, each with its value."""
        piece = whole(self.cutter).cut(self.batch)._pieces[0]
        return [
            (leaf, value) for leaf, value in zip(piece.reading.leaves, piece.leaves, strict=True) if leaf.kind.per_row
        ]

    def draws(self, cut: Cut, randomness: str) -> WholeRandomness:
        """What lends each sub-batch the random numbers of the unsplit batch."""

        def data_for(rows: slice) -> Any:
            sizes = [rows.start, rows.stop - rows.start, self.rows - rows.stop]
            return whole(self.cutter).cut(cut.batch)._again([[n for n in sizes if n]])[1 if rows.start else 0].data

        return WholeRandomness(self.loss_fn, data_for, self.rows, model=self.model, plans=self._plans)

    def _run(self, loan: Loan, data: Any) -> Result:
        start = Streams.now()
        terms = self.terms(data)
        drew = not Streams.now().same(start)
        names, stand_ins = zip(*loan.parameters(), strict=True) if any(True for _ in loan.parameters()) else ((), ())
        gradients: dict[str, Gradients] = {}
        for i, (name, term) in enumerate(terms.items()):
            gradients[name] = {}
            if term.requires_grad and stand_ins:
                found = torch.autograd.grad(term, stand_ins, retain_graph=i + 1 < len(terms), allow_unused=True)
                gradients[name] = {n: _dense(g) for n, g in zip(names, found, strict=True) if g is not None}
        values = {name: float(term.detach()) for name, term in terms.items()}
        return Result(values, gradients, state_of(loan), loan.widening.seen, drew)

    def terms(self, data: Any) -> dict[str, Tensor]:
        """The loss of some data, by term."""
        returned = self.loss_fn(data)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], (Tensor, Mapping)):
            returned = returned[0]
        terms: dict[str, Any] = dict(returned) if isinstance(returned, Mapping) else {"": returned}
        for name, term in terms.items():
            if not isinstance(term, Tensor) or term.dim():
                what = f"the term {name!r}" if name else "the loss"
                raise CutError(
                    f"{what} is {_looks(term)}: loss_fn has to return a scalar tensor, or a mapping of them."
                )
        return terms


@contextmanager
def _plain() -> Iterator[None]:
    yield


def _looks(term: Any) -> str:
    return f"of shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"a {type(term).__name__}"


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient.to(torch.float64) if gradient.device.type != "mps" else gradient


def with_limit(cutter: BatchCutter, **limits: Any) -> BatchCutter:
    """The same cutter with another limit, weight or layout."""
    new = copy.copy(cutter)
    new._plans = []
    if limits.keys() & {"rows", "area", "parts"}:
        new.rows = new.area = new.parts = None
        new.auto = False
    for name, value in limits.items():
        if hasattr(new, name):
            setattr(new, name, value)
    return new


def whole(cutter: BatchCutter) -> BatchCutter:
    """A cutter that reads batches alike and leaves them whole."""
    return with_limit(cutter, rows=None, weight=None, padding="keep", order=None)


def first_rows(cutter: BatchCutter, batch: Any, rows: int) -> Any:
    """The first rows of a batch (of the first, in a group)."""
    if isinstance(batch, Group):
        batch = batch.batches[0]
    cut = with_limit(whole(cutter), rows=rows, sizes="full").cut(batch)
    return batch if len(cut) == 1 else cut[0].data
