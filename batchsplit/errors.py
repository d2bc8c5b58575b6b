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
