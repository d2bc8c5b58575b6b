"""Loaders of batches as loaders of cuts: every protocol that people's loaders have."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from batchsplit import BatchCutter, Cut, CutError, group, row_weight

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*may lead to deadlocks:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]


class Numbers(Dataset):
    """Row i is the number i, its name, and a row of features."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"id": torch.tensor(i), "name": f"row {i}", "x": torch.full((3,), float(i))}


class Stream(IterableDataset):
    """The same without a length, each worker a share of them."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (Numbers(20)[i] for i in range(first, 20, step))


def ids(cut: Cut) -> list[int]:
    assert all(sub.data["name"] == [f"row {i}" for i in sub.data["id"]] for sub in cut)
    return [int(i) for sub in cut for i in sub.data["id"]]


CUTTER = BatchCutter(rows=3)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_dataloader_with_and_without_workers(settings: dict[str, Any]) -> None:
    loader = CUTTER.over(DataLoader(Numbers(20), batch_size=8, **settings))
    assert len(loader) == 3 and loader.batch_size == 8 and len(loader.dataset) == 20
    for _ in range(2):  # a second epoch, with the same workers where they persist
        cuts = list(loader)
        assert [[sub.rows for sub in cut] for cut in cuts] == [[3, 3, 2], [3, 3, 2], [2, 2]]
        assert [ids(cut) for cut in cuts] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


@pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true but no accelerator is found")
def test_pinned_memory() -> None:
    loader = CUTTER.over(DataLoader(Numbers(8), batch_size=8, pin_memory=True))
    assert loader.pin_memory and [ids(cut) for cut in loader] == [list(range(8))]


@pytest.mark.parametrize("workers", [0, 2])
def test_b43_an_iterable_dataset_without_a_length(workers: int) -> None:
    loader = CUTTER.over(DataLoader(Stream(), batch_size=3, num_workers=workers))
    with pytest.raises(TypeError):
        len(loader)
    cuts = list(loader)
    assert sorted(i for cut in cuts for i in ids(cut)) == list(range(20))
    groups = list(group(DataLoader(Stream(), batch_size=3), batches=4))
    assert [len(found) for found in groups] == [4, 3] and CUTTER.cut(groups[1]).rows == 8


def test_generators_and_any_iterable() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for rows in (5, 2):
            yield torch.rand(rows, 2)

    loader = CUTTER.over(batches())
    assert [len(cut) for cut in loader] == [2, 1]
    with pytest.raises(TypeError):
        len(loader)
    assert len(CUTTER.over([torch.rand(3)])) == 1


def test_nothing_is_read_ahead() -> None:
    taken: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for i in range(5):
            taken.append(i)
            yield torch.rand(4)

    cuts = iter(CUTTER.over(batches()))
    assert taken == []
    for i in range(3):
        cut = next(cuts)
        assert [sub.rows for sub in cut] == [2, 2] and taken == list(range(i + 1))


def test_b43_a_break_and_a_new_start() -> None:
    loader = CUTTER.over(DataLoader(Numbers(20), batch_size=8))
    for cut in loader:
        assert ids(cut) == list(range(8))
        break
    assert next(ids(cut) for cut in loader) == list(range(8))
    grouped = group(DataLoader(Numbers(20), batch_size=4), batches=2)
    next(iter(grouped))
    assert [CUTTER.cut(found).rows for found in grouped] == [8, 8, 4]


class Shuffled(torch.utils.data.Sampler[int]):
    """A sampler that shuffles anew in each epoch, as DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_b43_set_epoch_reaches_the_sampler() -> None:
    loader = CUTTER.over(DataLoader(Numbers(8), batch_size=8, sampler=Shuffled()))
    (first,), (same,) = list(loader), list(loader)
    loader.sampler.set_epoch(1)
    (second,) = list(loader)
    loader.set_epoch(2)
    (third,) = list(loader)
    assert ids(first) == ids(same) and len({tuple(ids(cut)) for cut in (first, second, third)}) == 3
    assert loader.sampler.epoch == 2


@pytest.mark.parametrize("through", ["sampler", "batch_sampler", "loader", "dataset"])
def test_set_epoch_finds_what_counts_epochs(through: str) -> None:
    class Epochs:
        epoch = None

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter([[0, 1]])

        def __len__(self) -> int:
            return 1

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.tensor(i)

    counts: Any = Epochs()
    source: Any = {
        "sampler": lambda: DataLoader(Numbers(8), sampler=counts),
        "batch_sampler": lambda: DataLoader(Numbers(8), batch_sampler=counts),
        "loader": lambda: counts,
        "dataset": lambda: DataLoader(counts),
    }[through]()
    for wrapped in (CUTTER.over(source), CUTTER.over(group(source, batches=2))):
        counts.epoch = None
        wrapped.set_epoch(3)
        assert counts.epoch == 3


def test_a_distributed_sampler() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1)
    loader = CUTTER.over(DataLoader(Numbers(8), batch_size=4, sampler=sampler))
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([i for cut in loader for i in ids(cut)])
    assert len(set(map(tuple, orders))) == 3 and sampler.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_stateful_loader_resumes_at_the_next_batch(workers: int, stop: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return CUTTER.over(torchdata.StatefulDataLoader(Numbers(20), batch_size=4, num_workers=workers))

    loader, seen, state = make(), [], None
    for cut in itertools.islice(loader, stop):
        for sub in cut:
            seen += sub.data["id"].tolist()
            state = loader.state_dict()  # amid the sub-batches: the batch counts as consumed
    resumed = make()
    resumed.load_state_dict(state)
    seen += [i for cut in resumed for i in ids(cut)]
    assert seen == list(range(20)), "none skipped and none twice"


def test_attributes_are_the_sources_and_stay_current() -> None:
    source = DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4, drop_last=True)
    loader = CUTTER.over(source)
    assert loader.drop_last and loader.dataset is source.dataset and loader.batch_sampler is source.batch_sampler
    source.note = "later"  # type: ignore[attr-defined]
    assert loader.note == "later" and not hasattr(loader, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing


def test_it_pickles() -> None:
    loader = BatchCutter(rows=3, weight=row_weight).over(DataLoader(Numbers(8), batch_size=8))
    list(loader)  # with a plan in the cutter
    again = pickle.loads(pickle.dumps(loader))
    assert [ids(cut) for cut in again] == [list(range(8))] and again.batch_size == 8
    grouped = pickle.loads(pickle.dumps(group([torch.rand(3)], batches=1)))
    assert len(grouped) == 1


def test_an_error_comes_at_the_batch_that_has_it() -> None:
    cuts = iter(CUTTER.over([torch.rand(4), {"a": torch.rand(4), "b": torch.rand(3)}]))
    assert next(cuts).rows == 4
    with pytest.raises(CutError, match=r"batch\['b'\] has 3"):
        next(cuts)
