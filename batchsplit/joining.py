"""Putting parts together again: a batch from its cut, outputs from those of the sub-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchsplit.containers import leaves_of
from batchsplit.doubts import looks
from batchsplit.errors import CutError, LeafError
from batchsplit.group import Group
from batchsplit.layout import Layout, Path, shown
from batchsplit.leaves import BROADCAST, OTHER_LIST, SCALAR
from batchsplit.reading import Leaf, read
from batchsplit.shapes import real_rows

if TYPE_CHECKING:
    from batchsplit.cuts import Cut


def join(parts: Cut | Sequence[Any], layout: Mapping[str, Any] | None = None) -> Any:
    """Put parts together again, rows in order: `join(cut)` gives the batch back, bit for bit.

    `parts` is a Cut, or a sequence of parts such as outputs of a model: tensors, arrays, lists or containers of them.
    `layout` declares leaves of such parts, as a cutter's layout does.

    Raises:
        CutError: no parts, or a leaf whose rows are in doubt.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, join
        >>> cut = BatchCutter(rows=2).cut({"x": torch.arange(5), "name": "a batch"})
        >>> join(cut)
        {'x': tensor([0, 1, 2, 3, 4]), 'name': 'a batch'}
        >>> join([torch.tensor([1, 2]), torch.tensor([3])])
        tensor([1, 2, 3])
    """
    if hasattr(parts, "_pieces"):
        return _join_batch(parts)  # type: ignore[arg-type]
    parts = list(parts)
    if not parts:
        raise CutError("join([]): there are no parts to join.")
    declared = Layout(layout)
    return _joined(parts, [read([part], declared, root="part").rows for part in parts], None, declared)


def _join_batch(cut: Cut) -> Any:
    batches = []
    for piece in cut._pieces:
        values = [
            leaf.kind.join(list(column), like=value)
            for leaf, column, value in zip(piece.reading.leaves, piece.columns, piece.leaves, strict=True)
        ]
        batches.append(piece.reading.root.build(values))
    return Group(tuple(batches)) if isinstance(cut.batch, Group) else batches[0]


def join_outputs(cut: Cut, outputs: list[Any], layout: Layout) -> Any:
    """The outputs of a cut's sub-batches, joined."""
    if len(outputs) != len(cut):
        raise CutError(f"{len(outputs)} outputs for {len(cut)} sub-batches: give join one output for each, in order.")
    joined, start = [], 0
    for piece in cut._pieces:
        stop = start + len(piece.spans.sizes)
        shares = [cut._shares.share(i) for i in range(start, stop)] if _has_scalars(outputs[start]) else None
        own = outputs[start:stop]
        if piece.filling is not None:
            own = [_without_filler(o, n, piece.filling.size, layout) for o, n in zip(own, piece.spans.sizes, strict=True)]
        joined.append(_joined(own, piece.spans.sizes, shares, layout))
        start = stop
    return joined if isinstance(cut.batch, Group) else joined[0]


def _without_filler(output: Any, rows: int, size: int, layout: Layout) -> Any:
    """The output of a sub-batch that was filled up to `size` rows, for its own rows."""
    return output if rows == size else real_rows(output, read([output], layout, [size], root="outputs"), rows)


def _joined(outputs: list[Any], rows: list[int], shares: list[Any] | None, layout: Layout) -> Any:
    reading = read(outputs, layout, rows, root="outputs")
    gathered: list[list[Any]] = []
    for output in outputs:
        leaves: list[Any] = []
        if not reading.root.gather(output, leaves):
            raise LeafError("the outputs of the sub-batches differ in structure; return the same containers and types.")
        gathered.append(leaves)
    columns = zip(reading.leaves, zip(*gathered, strict=True), strict=True)
    return reading.root.build([_join_leaf(leaf, list(parts), shares) for leaf, parts in columns])


def _join_leaf(leaf: Leaf, parts: list[Any], shares: list[Any] | None) -> Any:
    if leaf.kind is SCALAR:
        return _join_scalar(leaf.path, parts, shares)
    if leaf.kind in (BROADCAST, OTHER_LIST):
        if not all(_same(part, parts[0]) for part in parts):
            raise LeafError(
                f"{shown(leaf.path, 'outputs')} ({looks(parts[0])}) has no rows and differs between sub-batches; "
                "return it with one entry a row."
            )
        return parts[0]
    try:
        return leaf.kind.join(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CutError):
            raise
        found = " and ".join(dict.fromkeys(looks(part) for part in parts))
        raise LeafError(f"{shown(leaf.path, 'outputs')} can't be joined: its parts are of {found}. ({error})") from error


def _join_scalar(path: Path, parts: list[Any], shares: list[Any] | None) -> Any:
    first = parts[0]
    if all(part is first for part in parts):
        return first
    tensor = isinstance(first, torch.Tensor)
    floating = first.dtype.is_floating_point if tensor else isinstance(first, (float, np.floating))
    if floating and shares is not None:
        if isinstance(shares[0], Mapping):
            shares = [share.get(path[-1].text if path else "") for share in shares]
        if None not in shares:
            total = sum(part * share for part, share in zip(parts, shares, strict=True) if share != 0)
            return total.to(first.dtype) if tensor else total  # type: ignore[union-attr]
    if all(_same(part, first) for part in parts):
        return first
    raise LeafError(
        f"{shown(path, 'outputs')} is a {type(first).__name__} without rows and differs between sub-batches: "
        "nobody knows how to join it. Return it with one entry a row, or as a named term of the loss."
    )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)


def _has_scalars(value: Any) -> bool:
    """Is there a floating scalar, whose join needs the shares? (Counting would fail where only rows are joined.)"""
    return any(_floating(leaf) for leaf in leaves_of(value))


def _floating(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dim() == 0 and x.dtype.is_floating_point
    return isinstance(x, (float, np.floating))
