"""Where the rows of a batch lie in a tensor: an axis of size `outer * rows * inner`, followed through views.

`(T, B, D)` holds its rows on axis 1 with outer 1 and inner 1; the flattening `(B * T, D)` holds them on axis 0 with
outer 1 and inner T; `(T * B, D)` with outer T and inner 1. Sizes are pairs, of one forward at `few` and of another at
`many` rows: an axis whose two sizes differ grows with the batch, and nothing about it is read off a single size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Pair = tuple[int, int]


class Axis:
    """An axis of `factor * rows` entries; `outer` is None while nothing has shown the order of its rows."""

    __slots__ = ("_other", "_outer", "factor", "lost")

    def __init__(self, factor: int, outer: int | None = None, lost: str = "") -> None:
        self.factor = factor
        self.lost = lost
        self._outer = 1 if factor == 1 else outer
        self._other: Axis | None = None

    def _root(self) -> Axis:
        axis = self
        while axis._other is not None:
            axis = axis._other
        return axis

    @property
    def outer(self) -> int | None:
        return self._root()._outer

    @property
    def inner(self) -> int:
        return self.factor // (self.outer or 1)

    @property
    def known(self) -> bool:
        return not self.lost and self.outer is not None

    def resolve(self, outer: int) -> None:
        """Later uses settle the order of an axis made without data, such as `torch.rand(rows * width)`."""
        self._root()._outer = outer

    def meets(self, other: Axis) -> Axis | None:
        """The axis that both are when entry i of one meets entry i of the other; None where the orders differ."""
        if self.lost or other.lost or self.factor != other.factor:
            return None
        mine, theirs = self._root(), other._root()
        if mine is theirs:
            return self
        if mine._outer is not None and theirs._outer is not None:
            return self if mine._outer == theirs._outer else None
        if mine._outer is None:
            mine._other = theirs
        else:
            theirs._other = mine
        return self


@dataclass(frozen=True)
class Rows:
    """How many rows the two forwards had that are compared."""

    few: int
    many: int

    def axis(self, sizes: Pair, outer: int | None = None) -> Axis | None:
        """The axis of these two sizes: None where it does not grow with the batch."""
        few, many = sizes
        if few == many:
            return None
        if many % self.many or few * self.many != many * self.few:
            return Axis(0, lost=f"an axis has {few} entries at {self.few} rows and {many} at {self.many}, no multiple")
        return Axis(many // self.many, outer)

    def split(self, sizes: list[Pair], axes: list[Axis | None], into: list[Pair]) -> list[Axis | None]:
        """Axes of a tensor viewed in another shape: row-major, so groups of axes with equal products correspond."""
        result: list[Axis | None] = []
        left, right = 0, 0
        while left < len(sizes) or right < len(into):
            first, second = left, right
            left, right = min(left + 1, len(sizes)), min(right + 1, len(into))
            while True:
                a, b = _product(sizes[first:left]), _product(into[second:right])
                if a == b:
                    break
                if (a[1] < b[1] or a[0] < b[0]) and left < len(sizes):
                    left += 1
                elif right < len(into):
                    right += 1
                else:
                    break
            result += self._group(sizes[first:left], axes[first:left], into[second:right])
        return result

    def _group(self, sizes: list[Pair], axes: list[Axis | None], into: list[Pair]) -> list[Axis | None]:
        new = [self.axis(size) for size in into]
        old = [i for i, axis in enumerate(axes) if axis is not None]
        grown = [i for i, axis in enumerate(new) if axis is not None]
        if not grown:
            return new
        if len(old) != 1 or len(grown) != 1:
            return [axis and Axis(axis.factor, lost="several axes that grow with the batch are viewed as one") for axis in new]
        source, target = axes[old[0]], new[grown[0]]
        assert source is not None and target is not None
        before, after = prod(size[1] for size in sizes[: old[0]]), prod(size[1] for size in into[: grown[0]])
        new[grown[0]] = _reshaped(source, target, before, after)
        return new

    def part(self, axis: Axis, sizes: Pair, starts: Pair, step: int) -> Axis:
        """The axis left when `sizes` entries of `axis` are taken, `step` apart, from `starts` on."""
        taken = self.axis(sizes)
        lost = Axis(taken.factor if taken else 0, lost="an axis that holds the rows is sliced across them")
        if taken is None or taken.lost or axis.lost:
            return lost
        if axis.outer is None and taken.factor == 1:
            # One entry a row: a block of consecutive entries can only be right if rows are innermost, and a stride
            # as long as a row's entries only if they are outermost.
            if step == 1 and axis.factor > 1:
                axis.resolve(axis.factor)
            elif step == axis.factor:
                axis.resolve(1)
        if axis.outer is None:
            return lost
        block, inner = Pair((self.few * axis.inner, self.many * axis.inner)), axis.inner
        if step == 1 and taken.factor % inner == 0 and starts[1] % block[1] == 0:
            if starts[0] * self.many == starts[1] * self.few:
                return Axis(taken.factor, taken.factor // inner)
        if step == inner and starts[0] == starts[1] < inner and taken.factor == axis.outer:
            return Axis(taken.factor, axis.outer)
        return lost


def _product(sizes: list[Pair]) -> Pair:
    return prod(size[0] for size in sizes), prod(size[1] for size in sizes)


def _reshaped(source: Axis, target: Axis, before: int, after: int) -> Axis:
    """`source`, with `before` entries of other axes outside it, becomes `target` with `after` outside."""
    if source.lost:
        return Axis(target.factor, lost=source.lost)
    if source.factor == target.factor and before == after:
        return source
    if source.outer is None and target.factor == 1 and after % before == 0 and source.factor % (after // before) == 0:
        source.resolve(after // before)
    if source.outer is not None:
        outer, rest = divmod(source.outer * before, after)
        if not rest and outer and target.factor % outer == 0:
            return Axis(target.factor, outer)
    return Axis(target.factor, lost="a view mixes its rows with another axis")
