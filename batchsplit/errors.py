"""What goes wrong on a user's side: every error names what was wrong, where, and what to write instead."""


class CutError(ValueError):
    """A batch, limit, weight or loss that cannot be cut exactly.

    Example:
        >>> from batchsplit import BatchCutter, CutError
        >>> try:
        ...     BatchCutter(rows=0)
        ... except CutError as error:
        ...     print(error)
        rows=0: a sub-batch needs at least 1 row; write rows=1 or more, or rows=None for no cut.
    """


class LeafError(CutError):
    """A leaf of a batch (or of a model's outputs) whose rows are in doubt."""


class WeightError(CutError):
    """A weight that is no denominator: zero over the whole batch, negative, NaN, or found nowhere."""


class LossError(CutError):
    """A loss that cannot be accumulated: not a scalar, without gradient, or not finite."""


class OtherRankError(CutError):
    """Another rank has failed in this step, so that this one can't go on either; that rank has the error itself."""


class OutOfMemory(CutError, MemoryError):
    """A single row that does not fit in memory, so that no cut helps.

    It carries the `row` (its index in the batch), its `width` in padded positions, the bytes `asked` for and `free`
    (each None where that can't be known), and in `tried` the sizes of the sub-batches that ran out, in rows.
    """

    def __init__(
        self, text: str, row: int, width: int | None, asked: int | None, free: int | None, tried: tuple[int, ...]
    ) -> None:
        super().__init__(text)
        self.row, self.width, self.asked, self.free, self.tried = row, width, asked, free, tried

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.args[0], self.row, self.width, self.asked, self.free, self.tried)
