"""Runs that are long, killed, interrupted or side by side: the parameters are those of an undisturbed one."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchsplit
from batchsplit import BatchCutter, CutError, StepDriver

PACKAGE = str(Path(batchsplit.__file__).parent)


class Shuffled:
    """A loader with a position: batches of a shuffled data set, other ones in each epoch."""

    def __init__(self, rows: int = 26, batch_size: int = 6) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.rand(rows, 4, generator=generator)
        self.batch_size, self.epoch, self.taken = batch_size, 0, 0

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        while self.taken < len(self):
            self.taken += 1
            yield self.x[order[(self.taken - 1) * self.batch_size :][: self.batch_size]]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Run:
    """A training with dropout, Adam, a schedule and a scaler, that saves all there is to save."""

    def __init__(self, randomness: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.dies: Callable[[int, int], None] = lambda step, sub: None
        self.subs = 0
        self.driver = StepDriver(
            self.model,
            self.optimizer,
            self.loss,
            BatchCutter(rows=2),
            scheduler=self.scheduler,
            scaler=self.scaler,
            clip_norm=0.5,
            randomness=randomness,
            progress=False,
        )
        self.loader = Shuffled()

    def loss(self, x: Tensor) -> Tensor:
        y = self.model(x)
        if y.requires_grad:
            self.subs += 1
            y.register_hook(lambda grad: self.dies(self.driver.steps, self.subs))
        return ((y - x.sum(1, keepdim=True)) ** 2).mean()

    def save(self, file: Path) -> None:
        parts = [self.model, self.optimizer, self.driver]
        torch.save([torch.get_rng_state(), *(part.state_dict() for part in parts)], f"{file}.new")
        os.replace(f"{file}.new", file)

    def load(self, file: Path, skip: str = "") -> None:
        rng, model, optimizer, driver = torch.load(file)
        if skip == "loader":
            del driver["loader"]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.driver.load_state_dict(driver)
        if skip != "rng":
            torch.set_rng_state(rng)

    def train(self, until: int, file: Path) -> None:
        """Steps until so many, with a checkpoint at every third."""
        while self.driver.steps < until:
            for _ in self.driver.run(self.loader):
                self.subs = 0
                if self.driver.steps % 3 == 0:
                    self.save(file)
                if self.driver.steps == until:
                    break
        self.save(file)


def killed(randomness: str, file: Path, at: int) -> None:
    run = Run(randomness)

    def dies(step: int, sub: int) -> None:
        if step == at and sub == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # in the backward of the second sub-batch

    run.dies = dies
    run.train(12, file)


@pytest.mark.parametrize("randomness", ["fresh", "whole"])
@pytest.mark.parametrize("at", [3, 8, 10])
def test_a_killed_run_goes_on_bit_for_bit(randomness: str, at: int, tmp_path: Path) -> None:
    """Epochs are of 5 steps and checkpoints at 3, 6 and 9: within an epoch, after its first step, before its last."""
    Run(randomness).train(12, tmp_path / "undisturbed")
    file = tmp_path / "killed"
    process = multiprocessing.get_context("fork").Process(target=killed, args=(randomness, file, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    expected = torch.load(tmp_path / "undisturbed")

    def gone_on(skip: str) -> Any:
        run = Run(randomness)
        run.load(file, skip)
        assert run.driver.steps == at // 3 * 3
        run.train(12, tmp_path / "end")
        return torch.load(tmp_path / "end")

    assert same(gone_on(""), expected)
    assert not same(gone_on("loader")[1], expected[1])  # so the test would notice
    assert not same(gone_on("rng")[1], expected[1])


def same(one: Any, other: Any) -> bool:
    """Equal, bit for bit, in nested states."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_loader_of_torchdata_keeps_its_position() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def trained(stop: int | None) -> list[float]:
        def driver_of() -> tuple[StepDriver, Any]:
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            driver = StepDriver(model, optimizer, lambda x: model(x).mean(), BatchCutter(rows=2), progress=False)
            loader = stateful(torch.arange(14.0)[:, None], batch_size=4, shuffle=True)
            return driver, BatchCutter(rows=2).over(loader)  # a CutLoader hands the position through

        driver, loader = driver_of()
        losses: list[float] = []
        for report in driver.run(loader):
            losses.append(report.loss.item())
            if driver.steps == stop:
                break
        if stop is not None:
            state = copy.deepcopy(driver.state_dict())
            driver, loader = driver_of()
            driver.load_state_dict(state)
            assert same(driver.state_dict(), state)  # also before it has run
            losses += [report.loss.item() for report in driver.run(loader)]
        return losses

    whole = trained(None)
    assert len(set(whole)) == 4
    assert trained(1) == trained(3) == trained(4) == whole


def test_states_that_do_not_fit() -> None:
    with_both, plain = Run("fresh"), driver_of(nn.Linear(4, 1))
    json.dumps(with_both.driver.state_dict())  # plain numbers
    for state, driver, text in [
        (with_both.driver.state_dict(), plain, "the state has a scheduler and the driver has none"),
        (
            plain.state_dict(),
            with_both.driver,
            "the driver has a scheduler and the state has none: make the driver as it was",
        ),
        ({"steps": 3}, plain, r"no state of a StepDriver: take one with driver\.state_dict\(\)"),
    ]:
        before = copy.deepcopy(driver.state_dict())
        with pytest.raises(CutError, match=text):
            driver.load_state_dict(state)
        assert same(driver.state_dict(), before)
    next(iter(plain.run(Shuffled())))
    other = driver_of(nn.Linear(4, 1))
    other.load_state_dict(plain.state_dict())
    with pytest.raises(CutError, match="holds the position of a loader, and a list has no load_state_dict"):
        next(iter(other.run([torch.rand(4, 4)])))


# Memory and files


def driver_of(model: nn.Module, **more: Any) -> StepDriver:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return StepDriver(model, optimizer, lambda x: (model(x) ** 2).mean(), BatchCutter(rows=2), progress=False, **more)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_steps_leave_nothing_behind() -> None:
    """Objects that Python holds, tensors among them, and open files: counted, since resident memory is noisy."""
    model = nn.Linear(4, 1)
    driver = driver_of(model, clip_norm=1.0)
    batches = [torch.rand(rows, 4) for rows in (3, 4, 5)]
    for step in range(2_000):
        driver.step(batches[step % 3])
    objects, files, threads = live(), open_files(), threading.active_count()
    for step in range(8_000):
        driver.step(batches[step % 3])
    assert driver.steps == 10_000
    assert live() - objects < 100
    assert open_files() == files and threading.active_count() == threads


def test_reports_that_are_kept_would_be_seen() -> None:
    driver = driver_of(nn.Linear(4, 1))
    objects = live()
    kept = [driver.step(torch.rand(3, 4)) for _ in range(200)]
    assert live() - objects > 200 and len(kept) == 200


def live() -> int:
    gc.collect()
    return len(gc.get_objects())


def open_files() -> int:
    listed = Path("/proc/self/fd")
    return len(os.listdir(listed)) if listed.exists() else 0


# Interrupts


@pytest.mark.parametrize(
    "where", ["before the first sub-batch", "between sub-batches", "forward", "backward", "optimizer"]
)
def test_ctrl_c_leaves_the_driver_usable(where: str) -> None:
    model = nn.Linear(4, 1)
    calls, armed = [0], [False]

    def press() -> None:
        if armed[0]:
            signal.raise_signal(signal.SIGINT)  # Python raises KeyboardInterrupt

    def loss_fn(x: Tensor) -> Tensor:
        calls[0] += 1
        if where == "between sub-batches" and calls[0] == 2:
            press()
        y = model(x)
        if where == "forward" and calls[0] == 2:
            press()
        if where == "backward" and calls[0] == 2:
            y.register_hook(lambda grad: press())
        return (y**2).mean()

    def weight(x: Tensor) -> int:
        if where == "before the first sub-batch":
            press()
        return len(x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    driver = StepDriver(model, optimizer, loss_fn, BatchCutter(rows=2, weight=weight), progress=False)
    if where == "optimizer":
        optimizer.register_step_pre_hook(lambda *args: press())
    x = torch.rand(6, 4)
    driver.step(x)
    before, armed[0], calls[0] = copy.deepcopy([model.state_dict(), optimizer.state_dict()]), True, 0
    with pytest.raises(KeyboardInterrupt):
        driver.step(x)
    assert same([model.state_dict(), optimizer.state_dict()], before) and driver.steps == 1
    assert all(p.grad is None for p in model.parameters()) or where == "optimizer"
    armed[0] = False
    undisturbed = copy.deepcopy(model)
    other = torch.optim.SGD(undisturbed.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    StepDriver(undisturbed, other, lambda x: (undisturbed(x) ** 2).mean(), BatchCutter(rows=2)).step(x)
    driver.step(x)
    assert same(model.state_dict(), undisturbed.state_dict())


class Presses:
    """Ctrl-C at the n-th call of a function of the package."""

    def __init__(self, at: int) -> None:
        self.left, self.place = at, ""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_filename}:{name}"
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.mark.parametrize("randomness", ["fresh", "whole"])
def test_ctrl_c_at_every_call_of_a_step(randomness: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    driver = driver_of(model, randomness=randomness)
    x = torch.rand(6, 4)
    driver.step(x)
    at, pressed = 0, True
    while pressed:
        at += 1
        before, steps = copy.deepcopy([model.state_dict(), driver.optimizer.state_dict()]), driver.steps
        driver.optimizer.zero_grad()
        press = Presses(at)
        sys.setprofile(press)
        try:
            driver.step(x)
            pressed = False
        except KeyboardInterrupt:
            now = [model.state_dict(), driver.optimizer.state_dict()]
            assert (same(now, before) and driver.steps == steps) or "StepReport" in press.place, press.place
            assert all(p.grad is None for p in model.parameters()) or driver.steps > steps, press.place
        finally:
            sys.setprofile(None)
        if at % 10 == 0 or not pressed:
            twin = copy.deepcopy(model)
            other = driver_of(twin, randomness=randomness)
            other.optimizer.load_state_dict(copy.deepcopy(driver.optimizer.state_dict()))
            state = torch.get_rng_state()
            driver.step(x)
            torch.set_rng_state(state)
            other.step(x)
            assert same(model.state_dict(), twin.state_dict()), press.place
    assert at > 15  # it was interrupted at all of these


# Threads


def test_two_drivers_in_one_process() -> None:
    def trained(seed: int, randomness: str) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.rand(p.shape, generator=generator))
        driver = driver_of(model, randomness=randomness, clip_norm=1.0)
        for _ in range(40):
            driver.step(torch.rand(7, 4, generator=generator))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plans = [(1, "fresh"), (2, "whole"), (3, "fresh"), (4, "whole")]
    alone = [trained(*plan) for plan in plans]
    together: list[Any] = [None] * len(plans)

    def work(index: int) -> None:
        together[index] = trained(*plans[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert same(together, alone)
    assert not same(alone[0], alone[2])


def test_two_drivers_take_turns_with_one_model() -> None:
    """Two losses of one model, each with its own optimizer, as two drivers on the same thread."""
    model = nn.Linear(4, 1)
    uncut = copy.deepcopy(model)
    drivers = [driver_of(model), driver_of(model, clip_norm=0.1)]
    optimizers = [torch.optim.SGD(uncut.parameters(), lr=0.01, momentum=0.9) for _ in drivers]
    for _ in range(3):
        for driver, optimizer in zip(drivers, optimizers, strict=True):
            x = torch.rand(5, 4)
            driver.step(x)
            optimizer.zero_grad()
            (uncut(x) ** 2).mean().backward()
            if driver.clip_norm:
                nn.utils.clip_grad_norm_(uncut.parameters(), driver.clip_norm)
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), uncut.state_dict(), rtol=1e-5, atol=1e-6)
