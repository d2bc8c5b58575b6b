"""How wide a row is: the padded positions that its memory follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from batchsplit.containers import lookup
from batchsplit.errors import CutError, LeafError
from batchsplit.layout import dotted, normal
from batchsplit.leaves import Dense
from batchsplit.reading import Reading

AreaOf = str | Sequence[str] | Callable[[Any], int] | None


def width_of(reading: Reading, leaves: list[Any], batch: Any, area_of: AreaOf) -> tuple[int, str]:
    """The width of a row, in padded positions, and which leaves it comes from.

    Raises:
        CutError: `area_of` names no leaf, or the width is in doubt.
    """
    if callable(area_of):
        width = area_of(batch)
        if isinstance(width, bool) or not hasattr(width, "__index__") or int(width) < 0:
            raise CutError(f"area_of returned {width!r}: a width is a whole number of padded positions.")
        return int(width), "by your function"
    widths = {dotted(leaf.path): _width(leaf.kind, value) for leaf, value in zip(reading.leaves, leaves, strict=True)}
    if area_of is not None:
        names = [area_of] if isinstance(area_of, str) else list(area_of)
        return sum(_declared(batch, name, widths) for name in names), " + ".join(names)
    found = [(width, leaf, value) for leaf, value in zip(reading.leaves, leaves, strict=True) if (width := _width(leaf.kind, value))]
    # Token ids and masks say how wide a row is; float features may have any axis there.
    ids = [(width, leaf) for width, leaf, value in found if not _floating(value)]
    features = [(width, leaf) for width, leaf, value in found if _floating(value) and len(value.shape) == 3]
    for candidates in (ids, features):
        if candidates:
            width, leaf = max(candidates, key=lambda c: c[0])
            return width, f"the widest of {'ids and masks' if candidates is ids else 'the features'}: {dotted(leaf.path) or 'the batch'}"
    raise CutError('area=: no leaf says how wide a row is; write area_of="input_ids", several paths, or a function of the batch.')


def _width(kind: Any, value: Any) -> int:
    """The size of the first axis that is not the rows' (0 where there is none)."""
    if not isinstance(kind, Dense) or len(value.shape) < 2:
        return 0
    return value.shape[0 if kind.axis % len(value.shape) else 1]


def _floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, np.ndarray) and value.dtype.kind not in "iub"


def _declared(batch: Any, name: str, widths: dict[str, int]) -> int:
    try:
        lookup(batch, normal(name))
    except KeyError as error:
        raise LeafError(f'area_of="{name}" matches nothing in the batch; {error.args[0]}') from None
    width = widths.get(normal(name), 0)
    if not width:
        raise LeafError(f'area_of="{name}": that leaf has no width; name a leaf of shape (rows, width, ...).')
    return width
