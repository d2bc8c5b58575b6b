"""How many bytes autograd keeps for the backward pass at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor


class SavedBytes:
    """Counts what is saved for backward inside its block; `peak` is the most at any time, in bytes.

    A storage counts once however many tensors share it, for as long as one of them is kept. Storages of `ignore` (the
    parameters, the batch itself) are there anyway and don't count.

    Example:
        >>> x = torch.zeros(1000, requires_grad=True)
        >>> with SavedBytes(ignore=[x]) as saved:
        ...     x.exp().exp().sum().backward()  # either exp keeps its result: 1000 numbers of 4 bytes
        >>> saved.peak
        8000
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self.peak = 0
        self._now = 0
        self._holders: Counter[int] = Counter()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t, self), lambda kept: kept.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, value, trace)

    def change(self, tensor: Tensor, by: int) -> None:
        """One holder of the tensor's storage more (+1) or less (−1)."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._ignored:
            return
        before, after = self._holders[place], self._holders[place] + by
        self._holders[place] = after
        self._now += storage.nbytes() * ((after > 0) - (before > 0))
        self.peak = max(self.peak, self._now)


class _Kept:
    """One tensor that autograd keeps; it lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor.detach()  # the tensor itself could be an output of the node that keeps it: a cycle
        self.counter = counter
        counter.change(self.tensor, +1)

    def __del__(self) -> None:
        self.counter.change(self.tensor, -1)
