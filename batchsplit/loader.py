"""A loader of batches as a loader of cuts: same length, same order, nothing read ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.group import set_epoch


class CutLoader:
    """Wraps a loader (any iterable of batches): one iteration gives one mathematical batch as one Cut.

    It has the loader's length (`len` raises TypeError where the loader has none), and hands attributes such as
    `dataset`, `sampler`, `batch_size`, `state_dict` and `load_state_dict` through to it. It never reads ahead, so a
    `state_dict` taken between steps is the loader's own; taken amid the sub-batches of a cut, it counts that batch as
    consumed.

    Raises:
        CutError: on iteration, where a batch can't be cut.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = BatchCutter(rows=4).over(DataLoader(TensorDataset(torch.rand(20, 3)), batch_size=8))
        >>> len(loader), loader.batch_size, [[sub.rows for sub in cut] for cut in loader]
        (3, 8, [[4, 4], [4, 4], [4]])
    """

    def __init__(self, loader: Iterable[Any], cutter: BatchCutter) -> None:
        self.loader, self.cutter = loader, cutter

    def __iter__(self) -> Iterator[Cut]:
        for batch in self.loader:
            yield self.cutter.cut(batch)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset, those of them that ask for it, which epoch is to come."""
        set_epoch(self.loader, epoch)

    def __getattr__(self, name: str) -> Any:
        # Not for dunders, nor before __init__: copying and unpickling ask for attributes of an empty object.
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"CutLoader({self.loader!r}, {self.cutter!r})"
