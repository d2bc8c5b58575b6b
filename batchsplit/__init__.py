"""Cut one padded batch into sub-batches that fit the hardware, and train exactly as on the whole batch."""

from batchsplit.checking import CheckReport, check
from batchsplit.cuts import Cut, SubBatch
from batchsplit.cutter import BatchCutter
from batchsplit.driver import StepDriver, StepReport
from batchsplit.errors import CutError
from batchsplit.forward import CutForward
from batchsplit.group import group
from batchsplit.joining import join
from batchsplit.layout import PER_ROW, SHARED, axis, packed, register
from batchsplit.loader import CutLoader
from batchsplit.step import run_step
from batchsplit.weights import label_weight, mask_weight, row_weight

__version__ = "0.1.0"

__all__ = [
    "PER_ROW",
    "SHARED",
    "BatchCutter",
    "CheckReport",
    "Cut",
    "CutError",
    "CutForward",
    "CutLoader",
    "StepDriver",
    "StepReport",
    "SubBatch",
    "axis",
    "check",
    "group",
    "join",
    "label_weight",
    "mask_weight",
    "packed",
    "register",
    "row_weight",
    "run_step",
]
