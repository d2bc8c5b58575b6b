"""Going on after running out of memory: what ran is kept, the rest is cut smaller, and the result is the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from batchsplit.allocation import asked_bytes, collect, free_bytes, let_go, out_of_memory
from batchsplit.area import default_width, width_of
from batchsplit.cuts import Cut, SubBatch
from batchsplit.errors import CutError, OutOfMemory
from batchsplit.fitting import Sizes
from batchsplit.plan import shrunk

T = TypeVar("T")


class BeginAgain(Exception):
    """Nothing of what ran can be kept: begin the batch anew, with this cut."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut


class Recovery:
    """Gets one batch through, however little memory there is; it is made for each batch anew.

    What runs the sub-batches tells when one `begins` and `sends_back`, asks whether an error is `caught`, and then, out
    of the `except` block, for a `smaller` cut. After an error in forward, which leaves no gradient behind, what ran is
    kept. After one in backward, which may leave a part behind, the batch begins anew from no gradients at all; so it
    does where forwards change buffers or draw from Python's or numpy's generators, which are noted only once a batch.
    What was learned about sizes is kept in `sizes`.
    """

    def __init__(self, cut: Cut, sizes: Sizes, model: torch.nn.Module, device: Any = None) -> None:
        devices = dict.fromkeys(p.device for p in model.parameters())
        if device is not None:
            devices = dict.fromkeys([torch.device(device), *devices])
        self.device = next(iter(devices), torch.device("cpu"))
        self.sizes, self.retries = sizes, 0
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._before = sys.exception()  # an error that the caller is just handling is none of ours
        self._tried: list[int] = []
        self._shrunk: set[int | None] = set()
        self._widths = [_width(piece, cut._cutter.area_of) for piece in cut._pieces]
        self._versions = _versions(cut)
        self._buffers, self._host = _Buffers(model), _HostGenerators()
        self._start = self._state = _Generators(self._devices)
        self._in_backward = False
        self._cut = self._limited(cut)
        self._held = [new != old for new, old in zip(_by_piece(self._cut), _by_piece(cut), strict=True)]

    def complete(self, attempt: Callable[[Cut, Recovery], T]) -> T:
        """Call `attempt` with a cut, and again with others, until it is through.

        Raises:
            OutOfMemory: one row does not fit.
            CutError: `loss_fn` has changed the batch in place, so that it can't be run again.
        """
        while True:
            try:
                return attempt(self._cut, self)
            except BeginAgain as again:
                self._cut = again.cut
            self._start.restore()
            self._host.restore()
            self._buffers.restore()

    def begins(self) -> None:
        """A sub-batch begins."""
        self._state, self._in_backward = _Generators(self._devices), False

    def sends_back(self) -> None:
        """Its backward begins: from now on gradients may have changed."""
        self._in_backward = True

    def caught(self, error: Exception, sub: SubBatch) -> bool:
        """Is this error to be recovered from? If so, let go of what it holds.

        Raises:
            OutOfMemory: the sub-batch had but one row.
            CutError: the batch has been changed in place.
        """
        if not out_of_memory(error, self._before):
            return False
        let_go(error, self._before)
        self._tried.append(sub.rows + sub.filler)
        if _versions(sub._cut) != self._versions:
            raise CutError(
                f"memory ran out in {sub!r}, but the batch can't be run again in smaller parts: loss_fn has changed "
                'its tensors in place. Let it make new ones (x = x * 2, not x.mul_(2)), or write on_oom="raise".'
            ) from error
        if sub.rows + sub.filler == 1:
            raise self._too_large(error, sub) from error
        return True

    def smaller(self, cut: Cut, failed: int, done: Collection[int]) -> Cut:
        """The batch cut anew after sub-batch `failed` ran out: those `done` (by index) stay, the others shrink.

        Raises:
            BeginAgain: nothing can be kept.
        """
        self.retries += 1
        collect(self.device)
        width = self._widths[_piece_of(cut, failed)]
        self.sizes.failed(width or 0, cut[failed].rows + cut[failed].filler)
        cut = cut._unfilled()  # from now on sizes differ anyway
        self._shrunk.add(width)
        if self._in_backward or not done or self._buffers.moved() or self._host.moved():
            raise BeginAgain(self._limited(cut))
        self._state.restore()
        return self._limited(cut, done)

    def ran(self, cut: Cut) -> None:
        """The whole batch is through: a width that has often gone well is tried with more rows."""
        seen: dict[int | None, tuple[int, int]] = {}
        for width, sizes, held in zip(self._widths, _by_piece(cut), self._held, strict=True):
            largest, rows = seen.get(width, (0, 0))
            seen[width] = max(largest, *sizes), max(rows, sum(sizes) if held else 0)  # 0: not held back by us
        for width, (largest, rows) in seen.items():
            self.sizes.ran(width or 0, largest, 0 if width in self._shrunk else rows)

    def _limited(self, cut: Cut, done: Collection[int] = ()) -> Cut:
        sizes: list[list[int]] = []
        first = 0
        for width, own in zip(self._widths, _by_piece(cut), strict=True):
            limit = self.sizes.limit(width or 0)
            sizes.append(own if limit is None else shrunk(own, limit, {i - first for i in done}))
            first += len(own)
        return cut if sizes == _by_piece(cut) else cut._again(sizes)

    def _too_large(self, error: Exception, sub: SubBatch) -> OutOfMemory:
        collect(self.device)
        width, asked, free = self._widths[_piece_of(sub._cut, sub.index)], asked_bytes(error), free_bytes(self.device)
        row = sum(sub._cut._sizes[: sub.index])
        text = f"row {row} does not fit in memory by itself"
        text += "" if width is None else f": it is {width} wide"
        text += "" if asked is None else f"; {asked:,} bytes were asked for"
        text += "" if free is None else f"; {free:,} bytes are free on {self.device} now that it has been given up"
        text += f". Sub-batches of these sizes ran out: {', '.join(map(str, self._tried))}."
        text += " Shorten or leave out such rows, or make the model smaller."
        return OutOfMemory(text, row, width, asked, free, tuple(self._tried))


class _Generators:
    """Where torch's random generators stand, on the CPU and on some devices; cheap enough for each sub-batch."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = [(device, _on(device).get_rng_state(*_index(device))) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            _on(device).set_rng_state(state, *_index(device))


class _HostGenerators:
    """Where Python's and numpy's random generators stand, from which few forwards draw; once a batch."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()

    def moved(self) -> bool:
        return random.getstate() != self.python or not _same(np.random.get_state(), self.numpy)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def _same(state: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(state, other, strict=True))


def _on(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one


class _Buffers:
    """A model's buffers (running statistics, say), which a forward that failed may have changed already."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.kept = [(m, name, b, _version(b), b.clone()) for m, name, b in _buffers(model)]

    def moved(self) -> bool:
        return any(m._buffers.get(name) is not b or _version(b) != version for m, name, b, version, _ in self.kept)

    def restore(self) -> None:
        if not self.moved():
            return
        with torch.no_grad():
            for m, name, b, _, value in self.kept:
                m._buffers[name] = b.copy_(value)
        self.kept = [(m, name, b, _version(b), value) for m, name, b, _, value in self.kept]


def _buffers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not torch.nn.parameter.is_lazy(buffer):
                yield module, name, buffer


def _versions(cut: Cut) -> list[int]:
    """How often each tensor of a batch has been written to. (Writes into numpy arrays leave no trace.)"""
    return [_version(tensor) for piece in cut._pieces for leaf in piece.leaves for tensor in _tensors(leaf)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, list, tuple, Mapping)):
        for one in value:
            yield from _tensors(one)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _width(piece: Any, area_of: Any) -> int | None:
    if area_of is None:
        found = default_width(piece.reading, piece.leaves)
        return None if found is None else found[0]
    return width_of(piece.reading, piece.leaves, piece.spans.batch, area_of)[0]


def _by_piece(cut: Cut) -> list[list[int]]:
    return [list(piece.spans.sizes) for piece in cut._pieces]


def _piece_of(cut: Cut, index: int) -> int:
    for k, sizes in enumerate(_by_piece(cut)):
        if index < len(sizes):
            return k
        index -= len(sizes)
    raise IndexError(index)
