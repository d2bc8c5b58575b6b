"""What a loss is divided by: the weight of a sub-batch is its part of that denominator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from batchsplit.containers import lookup
from batchsplit.errors import WeightError
from batchsplit.layout import Layout, normal
from batchsplit.reading import read


def row_weight(data: Any) -> int:
    """The rows of a batch: the weight for a loss that is a mean over rows. This is a cutter's default.

    Raises:
        CutError: the rows of `data` are in doubt. (A cutter knows them from its own cut, layout included.)

    Example:
        >>> import torch
        >>> from batchsplit import row_weight
        >>> row_weight({"x": torch.rand(4, 2), "y": torch.arange(4)})
        4
    """
    return read([data], Layout()).rows


class Count:
    """A weight that adds up the elements of one leaf."""

    def __init__(self, path: str | int, text: str) -> None:
        self.path, self.text = normal(path), text

    def elements(self, leaf: Any) -> Any:
        """What is added up: a tensor or array like the leaf."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text

    def __call__(self, data: Any) -> Any:
        """The weight of a batch or sub-batch: a number or 0-dim tensor, on the device of the leaf."""
        try:
            leaf = lookup(data, self.path)
        except KeyError as error:
            raise WeightError(f"{self.text} finds no such leaf; {error.args[0]}") from None
        return self.of(leaf)

    def of(self, leaf: Any) -> Any:
        """The weight of the leaf's rows."""
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            return self.elements(leaf).sum()
        if isinstance(leaf, (list, tuple)) and leaf and all(isinstance(x, torch.Tensor) for x in leaf):
            return sum(self.elements(x).sum() for x in leaf)  # ragged rows
        raise WeightError(f"{self.text} counts in tensors and arrays, not in a {type(leaf).__name__}.")


def label_weight(path: str | int, ignore_index: int = -100, shifted: bool = False) -> Count:
    """The weight for a loss that is a mean over target tokens: how many labels are not `ignore_index`.

    `path` names the labels in the batch, whole numbers of shape `(rows,)` or `(rows, width, ...)`. With `shifted=True`
    the first label of each row is left out, as in a causal language model, where no token predicts it.

    Raises:
        CutError: when it counts: no leaf at `path`, labels that are not whole numbers, or nothing to shift.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, label_weight
        >>> batch = {"labels": torch.tensor([[-100, 7, -100, -100], [1, 2, 3, 4]])}
        >>> cut = BatchCutter(rows=1, weight=label_weight("labels", shifted=True)).cut(batch)
        >>> [(sub.weight, sub.share) for sub in cut]
        [(1.0, 0.25), (3.0, 0.75)]
    """
    text = f"label_weight({path!r}" + (f", ignore_index={ignore_index}" if ignore_index != -100 else "")
    text += ", shifted=True)" if shifted else ")"

    return Labels(path, text, ignore_index, shifted)


class Labels(Count):
    """How many labels a loss does not ignore."""

    def __init__(self, path: str | int, text: str, ignore_index: int, shifted: bool) -> None:
        super().__init__(path, text)
        self.ignore_index, self.shifted = ignore_index, shifted

    def elements(self, leaf: Any) -> Any:
        floating = leaf.dtype.is_floating_point if isinstance(leaf, torch.Tensor) else leaf.dtype.kind == "f"
        if floating:
            raise WeightError(f"{self}: the labels are {leaf.dtype}, not whole numbers; for a mask use mask_weight.")
        if self.shifted:
            if len(leaf.shape) < 2:
                raise WeightError(f"{self}: labels of shape {tuple(leaf.shape)} have no width to shift along.")
            leaf = leaf[:, 1:]
        return leaf != self.ignore_index


def mask_weight(path: str | int) -> Count:
    """The weight for a loss that is a mean over a mask: the sum of the mask's entries.

    `path` names the mask in the batch: bool, whole or floating numbers of shape `(rows, ...)`, none of them negative.

    Raises:
        CutError: when it counts: no leaf at `path`, or the sum over a sub-batch is negative or NaN.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, mask_weight
        >>> batch = {"mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
        >>> [sub.share for sub in BatchCutter(rows=1, weight=mask_weight("mask")).cut(batch)]
        [0.75, 0.25]
    """
    return Mask(path, f"mask_weight({path!r})")


class Mask(Count):
    """The sum of a mask."""

    def elements(self, leaf: Any) -> Any:
        # Floats of 16 bits would round or overflow when added up; whole numbers are widened by the sum itself.
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            return wide(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            return leaf.astype(np.float64)
        return leaf


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or in float32 on a device that has no float64."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


Weight = Callable[[Any], Any] | str | None


def check_weight(weight: Any) -> None:
    """Raise where a weight (or one of a mapping of them) is none at all."""
    if isinstance(weight, Mapping):
        if not weight:
            raise WeightError('weight={}: name the terms of the loss, as in weight={"ce": row_weight}.')
        for name, one in weight.items():
            if isinstance(one, Mapping):
                raise WeightError(f"weight[{name!r}] is itself a mapping; a term has one weight.")
            check_weight(one)
    elif weight is not None and weight != "once" and not callable(weight):
        raise WeightError(
            f'weight={weight!r}: write row_weight, label_weight("labels"), mask_weight("mask"), None for a sum, '
            '"once", or a function from a sub-batch\'s data to its weight.'
        )


def numbers(found: Sequence[Any], text: str) -> list[float]:
    """Weights as plain numbers, with one transfer from the device they were counted on for all of them.

    Raises:
        WeightError: one is not a single number, is negative, NaN or infinite.
    """
    for i, value in enumerate(found):
        if not isinstance(value, (int, float, np.generic, torch.Tensor, np.ndarray)) or getattr(value, "ndim", 0):
            raise WeightError(f"the weight {text} of sub-batch {i} is {value!r:.60}: it has to be a number or a 0-dim tensor.")
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    if len(tensors) == len(found) and tensors:
        plain = torch.stack([wide(t.detach()) for t in tensors]).tolist()
    else:
        plain = [float(value) for value in found]
    for i, value in enumerate(plain):
        if not 0 <= value < math.inf:
            raise WeightError(
                f"the weight {text} of sub-batch {i} is {value}: a weight is a part of a denominator, so 0 or more and finite."
            )
    return plain


def shares(weights: Iterable[float], whole: float, text: str) -> list[float]:
    """Each weight over the whole batch's.

    Raises:
        WeightError: the whole weight is 0 (0/0 is no mean), negative or not finite.
    """
    if not 0 < whole < math.inf:
        raise WeightError(
            f"the weight {text} of the whole batch is {whole:g}: its mean loss would be 0/0, so there is nothing to step on. "
            "Leave this batch out."
            if whole == 0
            else f"whole_weight={whole}: a denominator is more than 0 and finite."
        )
    return [weight / whole for weight in weights]


def name_of(weight: Any) -> str:
    """How messages call a weight."""
    return "row_weight" if weight is row_weight else weight if weight == "once" else repr(weight) if isinstance(weight, Count) else getattr(weight, "__name__", repr(weight))
