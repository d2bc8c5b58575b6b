"""Modules that mix the rows of a batch, so that a cut changes what they compute."""

from __future__ import annotations

import warnings

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from batchsplit.errors import CutError


class Coupled:
    """Watches a model for train-mode BatchNorm: raises, warns once, or allows, when a batch is about to be cut."""

    def __init__(self, model: torch.nn.Module, mode: str) -> None:
        if mode not in ("raise", "warn", "allow"):
            raise CutError(f'coupled={mode!r}: write coupled="raise", "warn" or "allow".')
        self.norms = [] if mode == "allow" else [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
        self.mode = mode

    def look(self, stacklevel: int) -> None:
        """Call before a batch is cut in more than one sub-batch."""
        if not self.norms:
            return
        # In eval mode with running statistics a BatchNorm treats each row by itself.
        mixing = [(name, m) for name, m in self.norms if m.training or m.running_mean is None]
        if not mixing:
            return
        names = ", ".join(f"{name or 'the model'} ({type(module).__name__})" for name, module in mixing[:5])
        names += f" and {len(mixing) - 5} more" if len(mixing) > 5 else ""
        text = (
            f"{names} normalises over the rows of a sub-batch, not of the whole batch, so cut training is not exact. "
            "Put it in eval mode (frozen statistics), use GroupNorm or LayerNorm, or accept it with coupled=\"allow\"."
        )
        if self.mode == "raise":
            raise CutError(text)
        warnings.warn(text, stacklevel=stacklevel)
        self.norms = []
