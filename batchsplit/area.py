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

AreaOf = str | int | Sequence[str | int] | Callable[[Any], int] | None


def check_area_of(area_of: Any) -> None:
    """Raise for an `area_of` that names no widths."""
    names = _names(area_of)
    paths = bool(names) and all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in names)
    if not (area_of is None or callable(area_of) or paths):
        raise CutError(f'area_of={area_of!r}: write a path like "input_ids", several, or a function of the batch.')


def width_of(reading: Reading, leaves: list[Any], batch: Any, area_of: AreaOf) -> tuple[int, str]:
    """The width of a row, in padded positions, and in words which leaves it comes from.

    Raises:
        CutError: `area_of` names no leaf or one without a width, or no leaf says how wide a row is.
    """
    if callable(area_of):
        width = area_of(batch)
        if isinstance(width, bool) or not hasattr(width, "__index__") or int(width) < 0:
            raise CutError(f"area_of returned {width!r}: a width is a whole number of padded positions.")
        return int(width), "by the function given as area_of"
    if area_of is not None:
        pairs = zip(reading.leaves, leaves, strict=True)
        widths = {dotted(leaf.path): _width(leaf.kind, value) for leaf, value in pairs}
        own = [(str(name), _declared(batch, name, widths)) for name in _names(area_of)]
        text = " + ".join(f"{name}: {width}" for name, width in own) if len(own) > 1 else own[0][0]
        return sum(width for _, width in own), f"{text}, by area_of"
    found = default_width(reading, leaves)
    if found is None:
        raise CutError(
            'area=: no leaf says how wide a row is; write area_of="input_ids", several paths, or a function of the '
            "batch."
        )
    return found


def default_width(reading: Reading, leaves: list[Any]) -> tuple[int, str] | None:
    """The width of a row where nobody declared it, and in words where it comes from; None where no leaf says it."""
    ids: list[tuple[int, str]] = []
    features: list[tuple[int, str]] = []
    for leaf, value in zip(reading.leaves, leaves, strict=True):
        width = _width(leaf.kind, value)
        # Token ids and masks say how wide a row is; float features may have any axis there.
        if width and not _floating(value):
            ids.append((width, dotted(leaf.path)))
        elif width and len(value.shape) == 3:
            features.append((width, dotted(leaf.path)))
    for candidates, name in ((ids, "ids and masks"), (features, "features")):
        if candidates:
            width, path = max(candidates, key=lambda one: one[0])
            return width, f"{path or 'the batch'}, the widest of its {name}; area_of= would name others"
    return None


def _names(area_of: Any) -> list[Any]:
    if isinstance(area_of, (str, int)):
        return [area_of]
    return list(area_of) if isinstance(area_of, Sequence) else []


def _width(kind: Any, value: Any) -> int:
    """The size of the first axis that is not the rows' (0 where there is none)."""
    if not isinstance(kind, Dense) or len(value.shape) < 2:
        return 0
    return value.shape[0 if kind.axis % len(value.shape) else 1]


def _floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, np.ndarray) and value.dtype.kind not in "iub"


def _declared(batch: Any, name: str | int, widths: dict[str, int]) -> int:
    try:
        lookup(batch, normal(name))
    except KeyError as error:
        raise LeafError(f"area_of={name!r} matches nothing in the batch; {error.args[0]}") from None
    width = widths.get(normal(name), 0)
    if not width:
        raise LeafError(f"area_of={name!r}: that leaf has no width; name a leaf of shape (rows, width, ...).")
    return width
