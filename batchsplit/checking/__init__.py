"""`check`: does split equal unsplit for this model, and if not, why?"""

from batchsplit.checking.procedure import check
from batchsplit.checking.report import Cause, CheckReport

__all__ = ["Cause", "CheckReport", "check"]
