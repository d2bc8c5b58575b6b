"""The weights and shares of one cut, counted when they are first asked for and only once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from batchsplit.errors import WeightError
from batchsplit.leaves import Dense
from batchsplit.plan import offsets
from batchsplit.weights import Count, name_of, numbers, row_weight, shares

if TYPE_CHECKING:
    from batchsplit.cuts import Piece


class Shares:
    """What each sub-batch holds of the loss's denominator, or of several by the names of loss terms."""

    # Knows the pieces of a cut, not the cut itself: in a circle, a batch would live until Python looks for circles.
    def __init__(self, pieces: Sequence[Piece], weight: Any, whole_weight: Any = None) -> None:
        self.named, self.given = isinstance(weight, Mapping), whole_weight
        if isinstance(whole_weight, Mapping) != self.named and whole_weight is not None:
            raise WeightError("whole_weight has to be a mapping by term exactly when weight is one.")
        if self.named:
            unknown = set(whole_weight or {}) - set(weight)
            if unknown:
                raise WeightError(f"whole_weight names {sorted(unknown)}, which have no weight.")
            self._terms = {name: _Term(pieces, one, (whole_weight or {}).get(name)) for name, one in weight.items()}
        else:
            self._terms = {"": _Term(pieces, weight, whole_weight)}

    def again(self, pieces: Sequence[Piece]) -> Shares:
        """The shares of the same batch cut anew: parts of the same denominators."""
        shares = Shares.__new__(Shares)
        shares.named, shares.given = self.named, self.given
        shares._terms = {name: term.again(pieces) for name, term in self._terms.items()}
        return shares

    def local(self) -> list[float]:
        """This rank's part of each denominator that was not given: see `over`."""
        parts = self._each(lambda term: math.fsum(term.weights) if term.counted else None)
        return [part for part in (parts.values() if self.named else [parts]) if part is not None]

    def over(self, wholes: Sequence[float], ranks: int) -> Shares:
        """The shares where other ranks have parts of the same denominators, and gradients are averaged over ranks.

        Raises:
            WeightError: a denominator is 0 over all ranks.
        """
        left = iter(wholes)
        shares = Shares.__new__(Shares)
        shares.named, shares.given = self.named, self.given
        shares._terms = {
            name: term.over(next(left), ranks) if term.counted else term for name, term in self._terms.items()
        }
        shares.share(0)
        return shares

    @property
    def terms(self) -> list[str]:
        """The names of the terms that have a weight."""
        return list(self._terms)

    @property
    def whole(self) -> Any:
        return self._each(lambda term: term.whole)

    def weight(self, index: int) -> Any:
        return self._each(lambda term: None if term.weights is None else term.weights[index])

    def share(self, index: int) -> Any:
        return self._each(lambda term: term.shares[index]) if self.named else self._terms[""].shares[index]

    def _each(self, get: Any) -> Any:
        if not self.named:
            return get(self._terms[""])
        found = {}
        for name, term in self._terms.items():
            try:
                found[name] = get(term)
            except WeightError as error:
                raise WeightError(f'term "{name}": {error}') from None
        return MappingProxyType(found)


class _Term:
    """One denominator."""

    ranks = 1  # among so many are gradients averaged that are parts of it

    def __init__(self, pieces: Sequence[Piece], weight: Any, whole_weight: Any) -> None:
        if whole_weight is not None and (weight is None or weight == "once"):
            raise WeightError(
                f"whole_weight={whole_weight!r} with weight={weight!r}: such a loss has no denominator to replace."
            )
        self.pieces, self.weight, self.given = pieces, weight, whole_weight

    @cached_property
    def sizes(self) -> list[int]:
        return [size for piece in self.pieces for size in piece.spans.sizes]

    @property
    def counted(self) -> bool:
        """Is it made of what the rows hold, and not given?"""
        return self.given is None and self.weight is not None and self.weight != "once"

    def over(self, whole: float, ranks: int) -> _Term:
        term = _Term(self.pieces, self.weight, self.given)
        term.weights, term.whole, term.ranks = self.weights, whole, ranks
        return term

    def again(self, pieces: Sequence[Piece]) -> _Term:
        term = _Term(pieces, self.weight, self.given)
        term.ranks = self.ranks
        if self.weight == "once":
            term.weights = _once_again(self, term.sizes)
        elif self.weight is not None and (self.weight is not row_weight or self.ranks > 1):
            term.whole = self.whole  # not added up anew, in another order
        return term

    @cached_property
    def weights(self) -> Sequence[float] | None:
        if self.weight is None:
            return None
        if self.weight is row_weight:
            return self.sizes
        if self.weight == "once":
            return [1 / len(self.sizes)] * len(self.sizes)
        return numbers(_found(self.pieces, self.weight), name_of(self.weight))

    @cached_property
    def whole(self) -> float | None:
        if self.weights is None:
            return None
        if self.given is not None:
            return numbers([self.given], "whole_weight")[0]
        if self.weight == "once":
            return 1.0
        return sum(self.sizes) if self.weight is row_weight else math.fsum(self.weights)

    @cached_property
    def shares(self) -> list[float]:
        if self.weights is None or self.whole is None:
            return [1.0] * len(self.sizes)
        parts = shares(self.weights, self.whole, name_of(self.weight))
        return [part * self.ranks for part in parts] if self.ranks > 1 else parts


def _once_again(term: _Term, sizes: Sequence[int]) -> list[float]:
    """The shares of a term without rows after a new cut: what stayed keeps its share, the others split the rest."""
    assert term.weights is not None
    stayed = dict(zip(_ends(term.sizes), term.weights, strict=True))
    new = _ends(sizes)
    rows = sum(stop - start for start, stop in new if (start, stop) not in stayed)
    left = 1 - math.fsum(stayed[ends] for ends in new if ends in stayed)
    return [stayed[ends] if ends in stayed else left * (ends[1] - ends[0]) / rows for ends in new]


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(offsets(sizes)))


def _found(pieces: Sequence[Piece], weight: Any) -> list[Any]:
    """The weight of each sub-batch, as counted: tensors stay on their device."""
    found: list[Any] = []
    for piece in pieces:
        parts = _elements(piece, weight) if isinstance(weight, Count) else None
        if parts is None:
            parts = [weight(piece.data(i)) for i in range(len(piece.spans.sizes))]
        found += parts
    return found


def _elements(piece: Any, weight: Count) -> list[torch.Tensor] | None:
    """Sums over each sub-batch, of what is compared once for the whole batch; None where the leaf is no plain one."""
    for leaf, value in zip(piece.reading.leaves, piece.leaves, strict=True):
        if isinstance(value, torch.Tensor) and ".".join(step.text for step in leaf.path) == weight.path:
            if type(leaf.kind) is Dense and leaf.kind.axis == 0:
                return [part.sum() for part in weight.elements(value).split_with_sizes(piece.spans.sizes)]
    return None
