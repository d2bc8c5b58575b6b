"""`randomness="whole"`: random operations draw for the whole batch and keep a sub-batch's rows."""

from batchsplit.randomness.operations import RandomnessError
from batchsplit.randomness.whole import WholeRandomness

__all__ = ["RandomnessError", "WholeRandomness"]
