"""Several ranks: what they tell each other before and after a step, and how gradients get from one to the others."""

from batchsplit.ranks.others import Ended, Ranks, several_ranks
from batchsplit.ranks.reduction import Reduction, Turn, harmless
from batchsplit.ranks.wrappers import reduction_of

__all__ = ["Ended", "Ranks", "Reduction", "Turn", "harmless", "reduction_of", "several_ranks"]
