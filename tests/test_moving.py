"""Moving to a device: in which order, how much at a time, out of what, and through which hands."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from batchsplit import BatchCutter, Cut, StepDriver, group, label_weight, mask_weight, moving
from batchsplit.moving import Ahead, moved, overlapping, pinned

pytestmark = pytest.mark.usefixtures("float64")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch(rows: int = 10) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3), "y": torch.randn(rows, 1)}


def squares(model: nn.Module) -> Any:
    return lambda data: ((model(data["x"]) - data["y"]) ** 2).mean()


def unsplit(model: nn.Module, data: Any) -> list[Tensor]:
    whole = copy.deepcopy(model)
    squares(whole)(data).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def close(model: nn.Module, expected: list[Tensor]) -> None:
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-14)


class Fake:
    """A device whose copies overlap with the running: notes what is done when, and what of it is alive."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = self.started = 0

    def start(self, data: Any) -> Callable[[], Any]:
        here = {name: tensor.clone() for name, tensor in data.items()}
        number, self.started = self.started, self.started + 1
        self.alive.add(here["x"])
        self.most = max(self.most, len(self.alive))
        self.log.append(f"copy {number}")

        def wait() -> Any:
            self.log.append(f"wait {number}")
            return here

        return wait


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    device = Fake()
    monkeypatch.setattr(moving, "overlapping", lambda _: device.start)
    return device


def driven(loss_of: Callable[[nn.Module], Any], cutter: BatchCutter, **more: Any) -> StepDriver:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_of(model), cutter, **more)


def test_the_next_is_copied_while_one_runs(fake: Fake) -> None:
    def noted(model: nn.Module) -> Any:
        def loss_fn(data: Any) -> Tensor:
            fake.log.append("run")
            return squares(model)(data)

        return loss_fn

    driver, data = driven(noted, BatchCutter(rows=3, sizes="full"), device="cpu"), batch()
    expected = unsplit(driver.model, data)
    driver.step(data)
    close(driver.model, expected)
    assert fake.log == [
        "copy 0", "wait 0",
        "copy 1", "run", "wait 1",
        "copy 2", "run", "wait 2",
        "copy 3", "run", "wait 3",
        "run",
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [8, 64, 200])
def test_two_sub_batches_are_on_the_device_however_large_the_batch(fake: Fake, rows: int) -> None:
    driver = driven(squares, BatchCutter(rows=2), device="cpu")
    driver.step(batch(rows))
    assert fake.started == rows // 2 and fake.most == 2 and not fake.alive


def test_a_third_one_would_be_seen(fake: Fake) -> None:
    kept: list[Any] = []

    def keeping(model: nn.Module) -> Any:
        return lambda data: (kept.append(data), squares(model)(data))[1]

    driven(keeping, BatchCutter(rows=2), device="cpu").step(batch(8))
    assert fake.most == 4


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("in_backward", [False, True])
def test_out_of_memory_lets_go_of_what_was_copied_ahead(fake: Fake, failing: int, in_backward: bool) -> None:
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def failing_once(model: nn.Module) -> Any:
        def loss_fn(data: Any) -> Tensor:
            loss = squares(model)(data)
            if next(calls) == failing:
                if not in_backward:
                    fail()
                loss.register_hook(fail)
            return loss

        return loss_fn

    driver, data = driven(failing_once, BatchCutter(rows=3), device="cpu", on_oom="split"), batch()
    expected = unsplit(driver.model, data)
    report = driver.step(data)
    close(driver.model, expected)
    assert report.retries == 1 and fake.most == 2 and not fake.alive


def test_an_error_lets_go_of_what_was_copied_ahead(fake: Fake) -> None:
    def wrong(model: nn.Module) -> Any:
        return lambda data: 1 / 0

    with pytest.raises(ZeroDivisionError):
        driven(wrong, BatchCutter(rows=3), device="cpu").step(batch())
    assert fake.log == ["copy 0", "wait 0", "copy 1", "wait 1"], "memory is given back once the copy is through"


def test_another_sub_batch_than_the_one_copied(fake: Fake) -> None:
    cut = BatchCutter(rows=3).cut(batch(9))
    first, second, third = cut
    with Ahead("cpu") as ahead:
        ahead.data(first, second)
        assert torch.equal(ahead.data(third)["x"], third.data["x"])
        assert torch.equal(ahead.data(second)["x"], second.data["x"])
    assert fake.most == 2


def test_without_overlap_nothing_is_ahead() -> None:
    cut = BatchCutter(rows=3).cut(batch())
    assert overlapping(torch.device("cpu")) is None and overlapping(torch.device("meta")) is None
    assert Ahead().data(cut[0])["x"].data_ptr() == cut[0].data["x"].data_ptr()
    assert Ahead("cpu").data(cut[0], cut[1])["x"].data_ptr() == cut[0].data["x"].data_ptr(), "no copy"
    there = Ahead("meta").data(cut[0], cut[1])
    assert there["x"].is_meta and there["x"].shape == (3, 3)


def on_disk(path: Path, rows: int, width: int) -> np.memmap[Any, np.dtype[Any]]:
    return np.memmap(path, dtype=np.float64, mode="w+", shape=(rows, width))


def test_a_memory_map_of_any_size(tmp_path: Path) -> None:
    """64 GiB that lie in no memory: what is cut is looked at nowhere but in its shape."""
    rows = 1 << 22
    try:
        mapped = on_disk(tmp_path / "large", rows, 2048)
    except OSError:
        pytest.skip("no sparse files here")
    mapped[-1] = 7.0
    cut = BatchCutter(rows=1024).cut({"x": mapped, "t": torch.from_numpy(mapped)})
    assert len(cut) == rows // 1024
    last = cut[-1].data
    assert isinstance(last["x"], np.memmap) and last["x"].shape == last["t"].shape == (1024, 2048)
    assert (last["x"][-1] == 7).all() and (last["t"][-1] == 7).all() and (last["t"][:-1] == 0).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_steps_from_a_memory_map(tmp_path: Path, as_tensor: bool) -> None:
    mapped = on_disk(tmp_path / "x", 10, 3)
    mapped[:] = np.random.randn(10, 3)
    y = torch.randn(10, 1)

    def from_map(model: nn.Module) -> Any:
        return lambda data: squares(model)({"x": torch.as_tensor(data["x"]), "y": data["y"]})

    driver = driven(from_map, BatchCutter(rows=3), device="cpu")
    expected = unsplit(driver.model, {"x": torch.tensor(mapped), "y": y})
    driver.step({"x": torch.from_numpy(mapped) if as_tensor else mapped, "y": y})
    close(driver.model, expected)


# Before pin_memory and after it


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What stands in for pinning where there is no GPU: a copy, noted."""
    made: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        made.append(tensor.clone())
        return made[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return made


class Encoding(UserDict[str, Any]):
    pass


@pytest.mark.parametrize("kind", [dict, Encoding, lambda d: tuple(d.values()), lambda d: [d, "text"]])
def test_a_cut_is_pinned_as_a_cut(pins: list[Tensor], kind: Any) -> None:
    cut = BatchCutter(rows=4).cut(kind(batch() | {"names": [str(i) for i in range(10)]}))
    through: Any = pin_memory(cut)  # as a DataLoader does with what collate_fn gave
    assert type(through) is Cut and type(through.batch) is type(cut.batch)
    assert len(pins) == 2 and [sub.share for sub in through] == [sub.share for sub in cut]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in pins}
    for sub, before in zip(through, cut):
        found = list(_tensors(sub.data))
        assert {t.untyped_storage().data_ptr() for t in found} == pointers, "views of the pinned batch"
        assert all(torch.equal(a, b) for a, b in zip(found, _tensors(before.data), strict=True))


def _tensors(data: Any) -> Any:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for one in data:
            yield from _tensors(one)
    elif hasattr(data, "values"):
        for one in data.values():
            yield from _tensors(one)


def test_a_pinned_cut_keeps_its_weights_and_its_filler(pins: list[Tensor]) -> None:
    data = {"x": torch.randn(5, 3), "labels": torch.tensor([1, -100, 2, 3, 0])}
    cut = BatchCutter(rows=2, weight=label_weight("labels"), sizes="equal").cut(data, whole_weight=9)
    through = cut.pin_memory()
    assert through.weight == 9 and [sub.weight for sub in through] == [1, 2, 1]
    assert through[-1].filler == 1 and len(through[-1].data["x"]) == 2


def test_a_group_and_a_sub_batch_are_pinned(pins: list[Tensor]) -> None:
    (both,) = group([batch(3), batch(4)], batches=2)
    through = BatchCutter(rows=2).cut(both).pin_memory()
    assert len(pins) == 4 and type(through.batch) is type(both) and [sub.rows for sub in through] == [2, 1, 2, 2]
    sub: Any = pin_memory(BatchCutter(rows=2).cut(batch())[1])
    assert len(pins) == 6 and sub.index == 1 and sub.data["x"] is pins[4]


def test_only_what_can_be_is_pinned(pins: list[Tensor]) -> None:
    sparse = torch.eye(3).to_sparse()
    data = pinned({"a": torch.ones(3), "s": sparse, "array": np.ones(3), "text": "t"})
    assert len(pins) == 1 and data["s"] is sparse and data["text"] == "t"


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), float(index)), "y": torch.ones(1)}


class Collate:
    def __init__(self) -> None:
        self.cutter = BatchCutter(rows=2, weight=mask_weight("y"))

    def __call__(self, rows: list[Any]) -> Cut:
        return self.cutter.cut(torch.utils.data.default_collate(rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_cutting_in_a_collate_function(workers: int) -> None:
    loader = DataLoader(Rows(), batch_size=5, collate_fn=Collate(), num_workers=workers)
    driver = driven(squares, BatchCutter())
    cuts = list(loader)
    assert all(type(cut) is Cut and [sub.rows for sub in cut] == [2, 2, 1] for cut in cuts)
    expected = unsplit(driver.model, cuts[1].batch)
    assert cuts[1].batch["x"][:, 0].tolist() == [5, 6, 7, 8, 9]
    driver.step(cuts[1])
    close(driver.model, expected)
    first = cuts[0][0].data["x"]
    assert first.untyped_storage().data_ptr() == cuts[0].batch["x"].untyped_storage().data_ptr(), "still views"


def test_a_cut_is_pickled_as_it_is() -> None:
    cutter = BatchCutter(rows=4, weight=label_weight("labels"), sizes="equal")
    data = {"x": torch.randn(1, 3), "h": torch.randn(6, 2), "labels": torch.arange(6)}
    cut = pickle.loads(pickle.dumps(cutter.cut(data, whole_weight=11)))
    assert [sub.rows for sub in cut] == [4, 2] and cut[1].filler == 2 and cut.weight == 11
    again = pickle.loads(pickle.dumps(cutter.cut(data)._again([[1, 2, 3]])))
    assert [sub.rows for sub in again] == [1, 2, 3] and [sub.filler for sub in again] == [0, 0, 0]
    sub = pickle.loads(pickle.dumps(cut[1]))
    assert sub.index == 1 and sub.share == 2 / 11 and torch.equal(sub.data["h"][:2], data["h"][4:])


@CUDA
def test_on_a_gpu_the_step_is_the_same_out_of_pageable_and_pinned_memory() -> None:
    for pin in (False, True):
        driver = driven(squares, BatchCutter(rows=3), device="cuda")
        driver.model.cuda()
        data = batch(50)
        expected = unsplit(driver.model, moved(data, "cuda"))
        cut = BatchCutter(rows=3).cut(data)
        driver.step(cut.pin_memory() if pin else cut)
        close(driver.model, expected)


@CUDA
def test_on_a_gpu_inputs_take_the_memory_of_two_sub_batches() -> None:
    model = nn.Linear(1 << 20, 1, device="cuda")
    driver = StepDriver(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda data: model(data).mean(),
        BatchCutter(rows=4),
        device="cuda",
    )
    peaks = []
    for rows in (16, 256):
        driver.step(torch.randn(rows, 1 << 20))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        driver.step(torch.randn(rows, 1 << 20))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    sub_batch = 4 * 8 * (1 << 20)
    assert peaks[1] <= 1.1 * peaks[0] and peaks[1] < 4 * sub_batch
