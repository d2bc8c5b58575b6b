"""Getting data to a device: one sub-batch at a time, the next one on its way while the last one runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchsplit.containers import map_leaves
from batchsplit.optional_types import is_graphs
from batchsplit.special import special_kind

if TYPE_CHECKING:
    from batchsplit.cuts import SubBatch

Start = Callable[[Any], Callable[[], Any]]  # starts to copy some data, and returns what waits for the copy


def moved(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Data with everything in it that can move moved to a device; what is there already is not copied."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or special_kind(leaf) is not None:
            # A Batch of PyTorch Geometric moves in place.
            leaf = copy.copy(leaf) if is_graphs(leaf) else leaf
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return _mapped(move, data)


def pinned(data: Any) -> Any:
    """Data with its tensors in page-locked memory; what is so already, or can't be, stays as it is."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.pin_memory() if _plain(leaf) else leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return _mapped(pin, data)


def _mapped(function: Callable[[Any], Any], data: Any) -> Any:
    return map_leaves(function, data, lambda value: special_kind(value) is not None)


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


class Ahead:
    """Gives sub-batches on a device, in turn; while one runs, the one that follows is copied.

    So a device holds the inputs of two sub-batches at most, however large the batch is. Where copies don't overlap with
    the running (on anything but CUDA), each is made when its turn comes, and the device holds one. Without a device the
    data stay where they are.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = None if device is None else torch.device(device)
        self._start: Start | None = None if self.device is None else overlapping(self.device)
        self._held: tuple[SubBatch, Callable[[], Any]] | None = None

    def data(self, sub: SubBatch, following: SubBatch | None = None) -> Any:
        """The data of a sub-batch on the device; those of the `following` one are on their way from now on."""
        if self._start is None:
            return sub.data if self.device is None else moved(sub.data, self.device)
        if self._held is not None and self._held[0] is sub:
            wait = self._held[1]
        else:
            self.drop()  # first, so that there are never three
            wait = self._start(sub.data)
        self._held = None
        data = wait()
        if following is not None:
            self._held = following, self._start(following.data)
        return data

    def drop(self) -> None:
        """Let go of what was copied and not asked for yet."""
        if self._held is not None:
            held, self._held = self._held, None
            held[1]()  # its memory is free for others only once the copy is through

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop()


def overlapping(device: torch.device) -> Start | None:
    """What starts a copy to a device that goes on beside what runs there; None where there is no such thing."""
    return _SideStream(device).start if device.type == "cuda" else None


class _SideStream:
    """Copies to a CUDA device in a stream of their own.

    The memory is taken in the stream that the model runs in, and the copy begins when what that stream has been given so
    far is through. So the memory of the sub-batch before last is free to be taken again, however far ahead of the
    device Python is; taken in the side stream, memory would pile up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def start(self, data: Any) -> Callable[[], Any]:
        running = torch.cuda.current_stream(self.device)
        copies: list[tuple[Tensor, Tensor]] = []

        def place(leaf: Any) -> Any:
            if type(leaf) is not Tensor or not _plain(leaf) or leaf.requires_grad:
                return moved(leaf, self.device, non_blocking=True)
            # Only out of page-locked memory is a copy asynchronous.
            copies.append((torch.empty_like(leaf, device=self.device), leaf.pin_memory()))
            return copies[-1][0]

        placed = _mapped(place, data)
        self.stream.wait_stream(running)
        with torch.cuda.stream(self.stream):
            for there, here in copies:
                there.copy_(here, non_blocking=True)
            arrived = self.stream.record_event()

        def wait() -> Any:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            return placed

        return wait
