"""Every denominator that a batch offers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchsplit.checking.runs import Bench
from batchsplit.checking.widening import Seen
from batchsplit.containers import lookup
from batchsplit.layout import dotted
from batchsplit.leaves import RowList
from batchsplit.weights import Weight, label_weight, mask_weight, row_weight


@dataclass(frozen=True)
class Candidate:
    """One possible denominator: the weight, how it is written, and what the loss then is."""

    weight: Weight
    written: str
    meaning: str


def candidates(bench: Bench, seen: Seen) -> Iterator[Candidate]:
    """Every denominator that this batch offers, the likeliest first."""
    yield Candidate(row_weight, "row_weight", "a mean over rows")
    yield Candidate(None, "None", "a sum already (or it is divided by a count of its own)")
    yield Candidate("once", '"once"', "not a function of the rows")
    reading = bench.leaves()
    labels = sorted(((dotted(leaf.path), value) for leaf, value in reading if _integers(value)), key=_unlike_labels)
    masks = [(dotted(leaf.path), value) for leaf, value in reading if _maskish(value)]
    ignored = [-100, *sorted(seen.ignored - {-100})]
    for path, value in labels:
        here = [v for v in dict.fromkeys([*ignored, -1, 0, *_ends(value)]) if v == -100 or _holds(value, v)]
        for ignore in here:
            for shifted in (True, False) if _dim(value) > 1 else (False,):
                weight = label_weight(path, ignore, shifted)
                which = f"`{path} != {ignore}`" + (", shifted" if shifted else "")
                yield Candidate(weight, repr(weight), f"a mean over {which}")
    for path, value in masks:
        yield Candidate(mask_weight(path), repr(mask_weight(path)), f"a mean over the mask `{path}`")
        if _dim(value) > 1:
            for text, part in (("[:, 1:]", slice(1, None)), ("[:, :-1]", slice(None, -1))):
                function = partial(_part_of_mask, path, part)
                yield Candidate(
                    function, f"lambda data: data[{path!r}]{text}.sum()", f"a mean over the mask `{path}{text}`"
                )
    for weights in seen.class_weights:
        for path, _ in labels:
            for ignore in ignored:
                function = partial(_class_weight, path, weights, ignore)
                text = f"lambda data: class_weights[data[{path!r}]].sum()"
                yield Candidate(function, text, f"divided by the sum of the class weights of `{path}`")
    for leaf, value in reading:
        path = dotted(leaf.path)
        if isinstance(leaf.kind, RowList) or not _dim(value):
            yield Candidate(
                partial(_entries, path),
                f"lambda data: sum(map(len, data[{path!r}]))",
                f"a mean over the entries of `{path}`",
            )
        elif not leaf.kind.bears_rows and leaf.kind.per_row:
            yield Candidate(
                partial(_length, path), f"lambda data: len(data[{path!r}])", f"a mean over the entries of `{path}`"
            )


def _part_of_mask(path: str, part: slice, data: Any) -> Any:
    return lookup(data, path)[:, part].sum()


def _class_weight(path: str, weights: Tensor, ignore: int, data: Any) -> Any:
    labels = lookup(data, path)
    return weights[labels[labels != ignore]].sum()


def _entries(path: str, data: Any) -> int:
    return sum(len(item) for item in lookup(data, path))


def _length(path: str, data: Any) -> int:
    return len(lookup(data, path))


def _dim(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _array(value: Any) -> Tensor | None:
    if isinstance(value, list) and value and all(isinstance(item, Tensor) and item.dim() for item in value):
        return torch.cat([item.flatten() for item in value])  # ragged rows
    try:
        return torch.as_tensor(value) if _dim(value) else None
    except (TypeError, RuntimeError):
        return None


def _integers(value: Any) -> bool:
    array = _array(value)
    return array is not None and not array.is_floating_point() and not array.is_complex() and array.dtype != torch.bool


def _maskish(value: Any) -> bool:
    array = _array(value)
    if array is None or array.layout != torch.strided or array.is_complex():
        return False
    return array.dtype == torch.bool or bool((array >= 0).all())


def _ends(value: Any) -> list[int]:
    """What stands at the ends of rows: padding, it may be."""
    array = _array(value)
    if array is None or array.dim() < 2 or not array.numel() or array.shape[1] == 0:
        return []
    return [int(v) for v in torch.cat([array[:, 0].flatten(), array[:, -1].flatten()]).unique()[:6]]


def _unlike_labels(leaf: tuple[str, Any]) -> tuple[bool, bool]:
    return not any(word in leaf[0].lower() for word in ("label", "target", "tgt")), not _holds(leaf[1], -100)


def _holds(value: Any, number: int) -> bool:
    array = _array(value)
    return array is not None and bool((array == number).any())
