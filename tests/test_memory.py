"""Running out of memory: the step gives what it would have given, counts nothing twice, and learns what fits."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchsplit import BatchCutter, CutError, StepDriver, group, label_weight, row_weight
from batchsplit.allocation import asked_bytes, out_of_memory
from batchsplit.errors import OutOfMemory
from batchsplit.fitting import EDGE, PATIENCE, Sizes

pytestmark = pytest.mark.usefixtures("float64")

Data = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> Iterator[None]:
    """A collection has less to look at: pytest's and torch's own objects stay out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


class Net(nn.Module):
    """Two layers with a place between them where backward can be stopped."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.head, self.dropout = nn.Linear(5, 7), nn.Linear(7, 3), nn.Dropout(dropout)
        self.between: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.body(x)))
        if self.between is not None:
            hidden.register_hook(self.between)
        return self.head(hidden)


def memory_gone(text: str = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(text)


def batch_of(rows: int, width: int = 4) -> Data:
    """Fresh random inputs; every row has labels, and rows have different numbers of them."""
    labels = torch.randint(0, 3, (rows, width))
    labels[:, 1:][torch.rand(rows, width - 1) < 0.4] = -100
    return {"x": torch.randn(rows, width, 5), "labels": labels, "row": torch.arange(rows)}


def token_loss(model: nn.Module, data: Data) -> Tensor:
    return nn.functional.cross_entropy(model(data["x"]).flatten(0, 1), data["labels"].flatten())


class Trap:
    """A loss function that runs out of memory at its nth call, in forward or in the middle of backward."""

    def __init__(self, model: Net, at: int, where: str, loss: Callable[[nn.Module, Data], Any] = token_loss) -> None:
        self.model, self.at, self.where, self.loss = model, at, where, loss
        self.calls = 0
        self.ran: list[list[int]] = []
        self.partial: list[bool] = []

    def __call__(self, data: Data) -> Any:
        number, self.calls = self.calls, self.calls + 1
        self.ran.append(data["row"].tolist())
        self.model.between = None
        if number == self.at and self.where == "backward":
            before = None if self.model.head.weight.grad is None else self.model.head.weight.grad.clone()

            def fail(grad: Tensor) -> None:
                now = self.model.head.weight.grad
                self.partial.append(now is not None and (before is None or not torch.equal(now, before)))
                raise memory_gone()

            self.model.between = fail
        returned = self.loss(self.model, data)
        if number == self.at and self.where == "forward":
            torch.rand(3)  # the failed try has drawn from the generators
            raise memory_gone()
        return returned


def driver_of(model: nn.Module, loss_fn: Any, cutter: Any = None, **more: Any) -> StepDriver:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return StepDriver(model, optimizer, loss_fn, cutter, progress=False, **{"on_oom": "split", **more})


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def flat(rows: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(rows))


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    assert len(found) == len(wanted) > 0
    return all((f - w).norm() <= 1e-12 * w.norm() for f, w in zip(found, wanted, strict=True))


def unsplit(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the batch as it is."""
    twin = deepcopy(model)
    twin.zero_grad()
    value = loss(twin, batch)
    value.backward()
    return value.detach(), gradients(twin)


TOKENS = label_weight("labels")
PLACES = [(at, where) for at in range(4) for where in ("forward", "backward")]


@pytest.mark.parametrize(("at", "where"), PLACES)
def test_a_step_is_the_same_wherever_memory_runs_out(at: int, where: str) -> None:
    model, batch = Net(), batch_of(16)
    loss, wanted = unsplit(model, token_loss, batch)
    trap = Trap(model, at, where)
    report = driver_of(model, trap, BatchCutter(rows=4, weight=TOKENS)).step(batch)
    assert close(gradients(model), wanted)
    assert abs(report.loss - loss) <= 1e-12 * loss
    assert report.retries == 1
    if where == "backward":
        assert trap.partial == [True]  # there was something to be counted twice
    # What ran before an error in forward is kept; after one in backward the batch begins anew, cut from the batch.
    sizes = [4] * at + [2] * (8 - 2 * at) if where == "forward" else [2] * 8
    assert [len(rows) for rows in trap.ran[: at + 1]] == [4] * (at + 1)
    done = trap.ran[:at] + trap.ran[at + 1 :] if where == "forward" else trap.ran[at + 1 :]
    assert [len(rows) for rows in done] == sizes
    assert flat(done) == list(range(16))
    assert report.sub_batches == len(sizes)


def test_part_of_a_gradient_counted_twice_would_be_seen() -> None:
    model, batch = Net(), batch_of(16)
    _, wanted = unsplit(model, token_loss, batch)
    trap = Trap(model, 2, "backward")
    for sub in BatchCutter(rows=4, weight=TOKENS).cut(batch):  # what a loop without care does
        for half in (sub,):
            try:
                (trap(half.data) * half.share).backward()
            except torch.OutOfMemoryError:
                (trap(half.data) * half.share).backward()
    assert not close(gradients(model), wanted)


@pytest.mark.parametrize(("at", "where"), PLACES)
def test_the_same_cut_gives_the_same_bits_with_dropout_and_optimizer(at: int, where: str) -> None:
    model, batch = Net(dropout=0.4), batch_of(16)
    twin = deepcopy(model)
    cutter = BatchCutter(rows=4, weight=TOKENS)
    sizes = [4] * at + [2] * (8 - 2 * at) if where == "forward" else [2] * 8
    state = torch.get_rng_state()
    disturbed = driver_of(model, Trap(model, at, where), cutter).step(batch)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    undisturbed = driver_of(twin, Trap(twin, 99, ""), on_oom="raise").step(cutter.cut(batch)._again([sizes]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(disturbed.loss, undisturbed.loss)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.randn())])
@pytest.mark.parametrize(("at", "where"), PLACES)
def test_python_s_and_numpy_s_generators_go_back_too(at: int, where: str, draw: Callable[[], float]) -> None:
    model, batch = Net(), batch_of(16)
    twin = deepcopy(model)

    def loss(model: nn.Module, data: Data) -> Tensor:
        return token_loss(model, {**data, "x": data["x"] * draw()})

    random.seed(3)
    np.random.seed(3)
    driver_of(model, Trap(model, at, where, loss), BatchCutter(rows=4, weight=TOKENS)).step(batch)
    after = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    driver_of(twin, Trap(twin, 99, "", loss), BatchCutter(rows=2, weight=TOKENS)).step(batch)
    assert after == (random.random(), np.random.rand())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("at", "where"), [(0, "forward"), (2, "forward"), (3, "backward")])
def test_sums_of_16_bit_gradients_are_no_different(at: int, where: str) -> None:
    model, batch = Net().bfloat16(), batch_of(16)
    batch["x"] = batch["x"].bfloat16()
    twin = deepcopy(model)
    cutter = BatchCutter(rows=4, weight=TOKENS)
    sizes = [4] * at + [2] * (8 - 2 * at) if where == "forward" else [2] * 8
    driver_of(model, Trap(model, at, where), cutter).step(batch)
    driver_of(twin, Trap(twin, 99, ""), on_oom="raise").step(cutter.cut(batch)._again([sizes]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_nothing_of_a_learned_size_shows_in_the_next_step() -> None:
    model, batches = Net(), [batch_of(16) for _ in range(4)]
    twin = deepcopy(model)
    driver = driver_of(model, Trap(model, 1, "backward"), BatchCutter(rows=8, weight=TOKENS))
    plain = driver_of(twin, Trap(twin, 99, ""), BatchCutter(weight=TOKENS))
    for batch in batches:
        report = driver.step(batch)
        plain.step(batch)
        assert close(list(model.parameters()), list(twin.parameters()))
    assert (report.retries, report.sub_batches, driver.steps) == (0, 4, 4)


# Letting go of what an error holds


class Activation:
    """What a weak reference can be held to."""


def wrapped(kind: str, error: Exception) -> None:
    if kind == "bare":
        raise error
    try:
        raise error
    except torch.OutOfMemoryError as found:
        if kind == "from":
            raise RuntimeError("the user's own") from found
        if kind == "context":
            raise RuntimeError("the user's own")  # noqa: B904 (that is the case)
        if kind == "again":
            raise
        KEPT.append(found)  # a user's log that keeps the error
        raise RuntimeError("kept") from found


KEPT: list[Exception] = []


@pytest.mark.parametrize(
    ("kind", "where", "times"),
    [
        ("from", "forward", 50),
        *((kind, where, 3) for kind in ("bare", "context", "again", "kept") for where in ("forward", "backward")),
    ],
)
def test_b45_activations_of_the_failed_try_are_gone_before_the_retry(kind: str, where: str, times: int) -> None:
    model = Net()
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []  # at each first forward of a retry

    def loss_fn(data: Data) -> Tensor:
        if len(data["x"]) == 2 and data["row"][0] == 0:
            alive.append(sum(ref() is not None for ref in held))
        activation, hidden = Activation(), model.body(data["x"])
        held.extend([weakref.ref(activation), weakref.ref(hidden)])
        loop: list[Any] = [activation]
        loop.append(loop)  # only the collector frees this one
        if len(data["x"]) > 2:
            if where == "forward":
                wrapped(kind, memory_gone())
            hidden.register_hook(lambda grad: wrapped(kind, memory_gone()))
        return hidden.square().mean()

    driver = driver_of(model, loss_fn, BatchCutter(rows=4))
    for _ in range(times):
        driver.load_state_dict({"steps": 0, "sizes": {"widths": {}}})  # so that every step runs out
        assert driver.step(batch_of(4)).retries == 1
    assert alive == [0] * times
    assert len(held) == 6 * times


def test_b45_an_error_kept_in_the_except_block_holds_activations() -> None:
    """The trap itself: inside `except`, what the failed frame had is still there."""

    def fails(refs: list[Any]) -> None:
        activation = Activation()
        refs.append(weakref.ref(activation))
        raise memory_gone()

    refs: list[Any] = []
    try:
        fails(refs)
    except torch.OutOfMemoryError:
        gc.collect()
        assert refs[0]() is not None
    assert refs[0]() is None


# One row, other errors, nobody asked


def above(limit: int, model: nn.Module, where: str = "forward") -> Callable[[Data], Tensor]:
    """A loss function that runs out of memory with more rows than `limit`."""
    seen: list[list[int]] = []

    def loss_fn(data: Data) -> Tensor:
        seen.append(data["row"].tolist())
        if len(data["row"]) > limit and where == "forward":
            raise memory_gone()
        loss = token_loss(model, data)
        if len(data["row"]) > limit:
            loss.register_hook(_raise)
        return loss

    loss_fn.seen = seen  # type: ignore[attr-defined]
    return loss_fn


def _raise(grad: Tensor) -> None:
    raise memory_gone()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("cutter", [{"rows": "auto"}, {"area": "auto"}, {"rows": 16}, {"parts": 1}, {}])
def test_b46_every_try_cuts_the_original_batch(cutter: dict[str, Any], where: str) -> None:
    model, batch = Net(), batch_of(16)
    _, wanted = unsplit(model, token_loss, batch)
    loss_fn: Any = above(3, model, where)
    report = driver_of(model, loss_fn, BatchCutter(**cutter, weight=TOKENS)).step(batch)
    assert close(gradients(model), wanted)
    assert [len(rows) for rows in loss_fn.seen] == [16, 8, 4] + [2] * 8
    assert flat(loss_fn.seen[3:]) == list(range(16))
    assert (report.retries, report.rows, report.sub_batches) == (3, 16, 8)


def test_b46_without_asking_the_very_error_goes_up() -> None:
    model, error = Net(), memory_gone()
    before = [p.clone() for p in model.parameters()]

    def loss_fn(data: Data) -> Tensor:
        hidden = model(data["x"])
        assert hidden is not None
        raise error

    with pytest.raises(torch.OutOfMemoryError) as caught:
        driver_of(model, loss_fn, BatchCutter(rows=4), on_oom="raise").step(batch_of(16))
    assert caught.value is error
    assert caught.traceback[-1].frame.f_locals.get("hidden") is not None  # for a debugger
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b46_a_row_that_does_not_fit_is_named(where: str) -> None:
    model, batch = Net(), batch_of(6, width=9)
    before = [p.clone() for p in model.parameters()]

    def loss_fn(data: Data) -> Tensor:
        loss = token_loss(model, data)
        if 4 in data["row"]:
            if where == "forward":
                raise memory_gone()
            loss.register_hook(_raise)
        return loss

    driver = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    with pytest.raises(OutOfMemory, match=r"row 4 .* it is 9 wide; 2,147,483,648 bytes were asked for") as caught:
        driver.step(batch)
    error = caught.value
    assert isinstance(error, CutError)
    assert isinstance(error, MemoryError)
    assert (error.row, error.width, error.asked) == (4, 9, 2 << 30)
    assert error.free is None or error.free > 0
    assert error.tried == (6, 3, 2, 1)
    assert "Sub-batches of these sizes ran out: 6, 3, 2, 1." in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert driver.steps == 0
    # the next batch, without such a row, goes through
    assert driver.step({key: value[:4] for key, value in batch.items()}).rows == 4


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[2]' is invalid for input of size 3"),
        RuntimeError("memory format out of memory order"),
        ValueError("CUDA out of memory"),
        KeyError("DefaultCPUAllocator: can't allocate memory"),
        CutError("out of memory"),
    ],
)
def test_b46_other_errors_are_not_retried(error: Exception) -> None:
    calls = []

    def loss_fn(data: Data) -> Tensor:
        calls.append(len(data["row"]))
        raise error

    with pytest.raises(type(error)) as caught:
        driver_of(Net(), loss_fn, BatchCutter(rows=4)).step(batch_of(8))
    assert caught.value is error
    assert calls == [4]


def test_an_error_raised_while_the_caller_handles_one_of_memory_is_not_retried() -> None:
    """Python gives it the handled one as its context."""
    calls = []

    def loss_fn(data: Data) -> Tensor:
        calls.append(len(data["row"]))
        raise ValueError("no memory in this")

    driver = driver_of(Net(), loss_fn, BatchCutter(rows=4))

    def step() -> None:
        try:
            raise memory_gone()
        except torch.OutOfMemoryError:
            driver.step(batch_of(8))

    with pytest.raises(ValueError, match="no memory in this") as caught:
        step()
    assert out_of_memory(caught.value)  # so it looks like one
    assert calls == [4]


def test_a_step_inside_an_except_block_recovers() -> None:
    model = Net()
    loss_fn: Any = above(3, model)
    try:
        raise memory_gone()
    except torch.OutOfMemoryError:
        report = driver_of(model, loss_fn, BatchCutter(rows=4)).step(batch_of(8))
    assert report.retries == 1


def test_interrupts_are_not_retried() -> None:
    def loss_fn(data: Data) -> Tensor:
        try:
            raise memory_gone()
        except torch.OutOfMemoryError:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        driver_of(Net(), loss_fn, BatchCutter(rows=4)).step(batch_of(8))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (memory_gone(), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("my log: DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (TypeError("std::bad_alloc"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_one: bool) -> None:
    assert out_of_memory(error) is is_one


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 55), lambda: np.empty(1 << 60, dtype=np.uint8)])
def test_errors_of_the_real_allocators_count(allocate: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert out_of_memory(caught.value)


def test_bytes_asked_for_are_read_where_the_error_says_them() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert asked_bytes(caught.value) == 1 << 55
    assert asked_bytes(memory_gone("Tried to allocate 20.50 MiB.")) == 20 * (1 << 20) + (1 << 19)
    assert asked_bytes(RuntimeError("nothing said")) is None


# The batch itself


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b48_a_batch_changed_in_place_is_a_loud_error(where: str) -> None:
    model, batch = Net(), batch_of(8)
    before = [p.clone() for p in model.parameters()]

    def loss(model: nn.Module, data: Data) -> Tensor:
        data["x"].mul_(2)
        return token_loss(model, data)

    with pytest.raises(CutError, match=r"SubBatch\(2 of 2.*changed its tensors in place") as caught:
        driver_of(model, Trap(model, 1, where, loss), BatchCutter(rows=4)).step(batch)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b48_new_tensors_and_popped_labels_are_fine(where: str) -> None:
    model, batch = Net(), batch_of(8)

    def loss(model: nn.Module, data: Data) -> Tensor:
        data["x"] = data["x"] * 2
        labels = data.pop("labels")
        return nn.functional.cross_entropy(model(data["x"]).flatten(0, 1), labels.flatten())

    _, wanted = unsplit(model, loss, dict(batch))
    driver_of(model, Trap(model, 1, where, loss), BatchCutter(rows=4, weight=TOKENS)).step(batch)
    assert close(gradients(model), wanted)
    assert list(batch) == ["x", "labels", "row"]


def test_b48_views_keep_the_batch_alive_no_longer_than_the_cut() -> None:
    batch = batch_of(8)
    cut = BatchCutter(rows=4).cut(batch)
    refs = [weakref.ref(t) for t in batch.values()]
    x = batch["x"]
    inside = range(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes())
    assert all(sub.data["x"].data_ptr() in inside for sub in cut)
    assert cut[0].to("cpu").data["x"].data_ptr() == x.data_ptr()
    del cut, batch, x
    gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize(("at", "where"), [(1, "forward"), (1, "backward"), (3, "forward"), (4, "backward")])
def test_a_group_has_a_size_for_each_width(at: int, where: str) -> None:
    model, batches = Net(), [batch_of(8, width=3), batch_of(7, width=6), batch_of(2, width=3)]

    def loss(model: nn.Module, data: Data) -> Tensor:
        return nn.functional.cross_entropy(model(data["x"]).flatten(0, 1), data["labels"].flatten(), reduction="sum")

    def whole(model: nn.Module, batches: list[Data]) -> Tensor:
        tokens = sum(int((b["labels"] != -100).sum()) for b in batches)
        return torch.stack([loss(model, b) for b in batches]).sum() / tokens

    _, wanted = unsplit(model, whole, batches)
    (together,) = group(batches, batches=3)
    trap = Trap(model, at, where)
    report = driver_of(model, trap, BatchCutter(rows=4, weight=TOKENS)).step(together)
    assert close(gradients(model), wanted)
    assert report.retries == 1


@pytest.mark.parametrize(("at", "where"), [(1, "forward"), (2, "forward"), (1, "backward")])
def test_a_cut_given_keeps_its_weights(at: int, where: str) -> None:
    """`whole_weight`, and a penalty that counts once whatever the number of sub-batches."""
    model, batch = Net(), batch_of(10)

    def terms(model: nn.Module, data: Data) -> dict[str, Tensor]:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        scores = model(data["x"])
        return {"ce": token_loss(model, data), "l2": penalty, "row": scores.square().mean(), "sum": scores.sum()}

    def whole(model: nn.Module, data: Data) -> Tensor:
        found, tokens = terms(model, data), (data["labels"] != -100).sum()
        return found["ce"] * tokens / 77 + found["l2"] + found["row"] + found["sum"]

    loss, wanted = unsplit(model, whole, batch)
    weight = {"ce": TOKENS, "l2": "once", "row": row_weight, "sum": None}
    cut = BatchCutter(rows=4, weight=weight).cut(batch, whole_weight={"ce": 77})
    report = driver_of(model, Trap(model, at, where, terms)).step(cut)
    assert close(gradients(model), wanted)
    assert abs(report.loss - loss) <= 1e-12 * abs(loss)
    assert report.retries == 1
    assert (cut.rows, len(cut)) == (10, 3)  # the caller's own has not changed


def test_outputs_are_joined_in_the_order_of_the_batch() -> None:
    model, batch = Net(), batch_of(16)

    def loss(model: nn.Module, data: Data) -> tuple[Tensor, Any]:
        scores = model(data["x"])
        return scores.square().mean(), {"scores": scores, "row": data["row"]}

    report = driver_of(deepcopy(model), Trap(model, 2, "forward", loss), BatchCutter(rows=4)).step(batch)
    assert report.outputs["row"].tolist() == list(range(16))
    torch.testing.assert_close(report.outputs["scores"], model(batch["x"]).detach(), rtol=1e-12, atol=0)


# Together with the rest of a step


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_with_clipping_scaler_scheduler_and_autocast_off(where: str) -> None:
    model, batch = Net(), batch_of(12)
    twin = deepcopy(model)
    steps = []
    for one, trap in ((model, Trap(model, 1, where)), (twin, Trap(twin, 99, ""))):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        driver = StepDriver(
            one, optimizer, trap, BatchCutter(rows=4, weight=TOKENS), scheduler=scheduler, clip_norm=0.01,
            scaler=scaler, on_oom="split", progress=False,
        )  # fmt: skip
        driver.step(batch)
        driver.step(batch)
        steps.append(scheduler.last_epoch)
    assert steps == [2, 2]
    assert close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_with_an_optimizer_that_evaluates_again_and_again(at: int) -> None:
    model, batch = Net(), batch_of(8)
    twin = deepcopy(model)
    for one, trap in ((model, Trap(model, at, "backward")), (twin, Trap(twin, 99_999, ""))):
        optimizer = torch.optim.LBFGS(one.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        driver = StepDriver(one, optimizer, trap, BatchCutter(rows=4, weight=TOKENS), on_oom="split", progress=False)
        assert driver.step(batch).retries == (one is model)
    # a line search amplifies rounding
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_buffers_that_a_failed_forward_has_changed_are_put_back(where: str) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + len(x)  # a new tensor in its place
            return super().forward(self.norm(x.flatten(0, 1)).view_as(x))

    model, batch = Counting(), batch_of(8)
    twin = deepcopy(model)
    driver_of(model, Trap(model, 1, where), BatchCutter(rows=4), coupled="allow").step(batch)
    driver_of(twin, Trap(twin, 99, ""), BatchCutter(rows=2), coupled="allow").step(batch)
    assert model.seen == 8
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_batch_that_is_first_cut_by_a_retry_is_watched_for_batchnorm() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))

    def loss_fn(data: Data) -> Tensor:
        if len(data["x"]) > 4:
            raise memory_gone()
        return model(data["x"]).square().mean()

    with pytest.raises(CutError, match="BatchNorm1d"):
        driver_of(model, loss_fn, BatchCutter(rows="auto"), coupled="raise").step({"x": torch.randn(8, 5)})
    with pytest.warns(UserWarning, match="BatchNorm1d") as caught:
        driver_of(model, loss_fn, BatchCutter(rows="auto")).step({"x": torch.randn(8, 5)})
    assert caught[0].filename == __file__


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", range(4))
def test_only_what_runs_last_synchronises(at: int, where: str) -> None:
    class Ranked(Net):
        held: bool = False

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.held = True
            try:
                yield
            finally:
                self.held = False

    model, batch = Ranked(), batch_of(16)
    batch["labels"][12:] = -100  # the last sub-batch has weight 0, and runs first
    _, wanted = unsplit(model, token_loss, batch)
    held: list[bool] = []

    def loss(model: nn.Module, data: Data) -> Tensor:
        held.append(model.held)  # type: ignore[arg-type]
        return token_loss(model, data)

    trap = Trap(model, at, where, loss)
    driver_of(model, trap, BatchCutter(rows=4, weight=TOKENS)).step(batch)
    if where == "backward" and at == 0:  # weight 0: there is no backward to fail in
        assert held == [True] * 3 + [False]
    else:
        again = at + 1 if where == "backward" else 0
        assert held[again:].count(False) == 1 + (where == "forward" and at == 3)
        assert held[-1] is False
    assert close(gradients(model), wanted)


def test_a_sub_batch_that_other_ranks_wait_for_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranked(Net):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            yield

    monkeypatch.setattr("batchsplit.step.several_ranks", lambda: True)
    model, batch = Ranked(), batch_of(16)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        driver_of(model, Trap(model, 3, "forward"), BatchCutter(rows=4)).step(batch)
    assert "SubBatch(4 of 4" in caught.value.__notes__[0]
    assert driver_of(model, Trap(model, 2, "backward"), BatchCutter(rows=4)).step(batch).retries == 1


# Learning what fits


class Arena:
    """Memory that holds so many bytes: what is saved for backward, and in backward three times as much for each."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.live, self.peak = capacity, 0, 0
        self.failed: list[str] = []

    def take(self, size: int, where: str) -> None:
        if self.live + size > self.capacity:
            self.failed.append(where)
            raise memory_gone(f"Tried to allocate {size / 1024:.2f} KiB.")
        self.peak = max(self.peak, self.live + size)

    def __call__(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        size = 0 if isinstance(tensor, nn.Parameter) or tensor.is_leaf else tensor.nbytes
        self.take(size, "forward")
        return Saved(self, tensor, size)

    def unpack(self, saved: Saved) -> Tensor:
        self.take(3 * saved.size, "backward")
        return saved.tensor


class Saved:
    def __init__(self, arena: Arena, tensor: Tensor, size: int) -> None:
        self.arena, self.tensor, self.size = arena, tensor.detach(), size  # not in a circle with its own node
        arena.live += size

    def __del__(self) -> None:
        self.arena.live -= self.size


class Attention(nn.Module):
    """Saves width × width scores beside width activations."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(x))
        scores = torch.softmax(hidden @ hidden.transpose(1, 2), -1)
        return self.out(scores @ hidden)


def arena_loss(model: nn.Module, arena: Arena) -> Callable[[Data], Tensor]:
    def loss_fn(data: Data) -> Tensor:
        with arena():
            return token_loss(model, data)

    return loss_fn


@pytest.mark.parametrize("kibibytes", [21, 33, 50, 70, 150, 1000])
def test_steps_through_a_small_arena_equal_those_without_one(kibibytes: int) -> None:
    model, arena = Attention(), Arena(kibibytes * 1024)
    twin = deepcopy(model)
    driver = driver_of(model, arena_loss(model, arena), BatchCutter(rows="auto", weight=TOKENS))
    plain = driver_of(twin, arena_loss(twin, Arena(1 << 40)), BatchCutter(weight=TOKENS))
    retries = 0
    for _ in range(3):
        for width in (3, 12, 20, 7):
            batch = batch_of(12, width)
            retries += driver.step(batch).retries
            plain.step(batch)
            assert arena.live == 0
    assert close(list(model.parameters()), list(twin.parameters()))
    assert retries == len(arena.failed)
    assert (retries > 0) == (kibibytes < 1000)


def test_the_arena_fails_in_both_passes() -> None:
    where: set[str] = set()
    for kibibytes in range(10, 90, 8):
        model, arena = Attention(), Arena(kibibytes * 1024)
        driver_of(model, arena_loss(model, arena), BatchCutter(rows="auto", weight=TOKENS)).step(batch_of(12, 12))
        where |= set(arena.failed)
    assert where == {"forward", "backward"}


def test_a_size_is_remembered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    loss_fn: Any = above(3, model)
    driver = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    with caplog.at_level(logging.INFO, logger="batchsplit"):
        first = driver.step(batch_of(16, width=5))
        later = [driver.step(batch_of(16, width=5)) for _ in range(PATIENCE - 1)]
    assert first.retries == 3
    assert all((report.retries, report.sub_batches) == (0, 8) for report in later)
    assert [r.getMessage() for r in caplog.records] == [
        "out of memory with 16 rows of width 5: now at most 8",
        "out of memory with 8 rows of width 5: now at most 4",
        "out of memory with 4 rows of width 5: now at most 2",
    ]
    assert driver.step(batch_of(2, width=5)).sub_batches == 1


def test_a_size_grows_back_to_what_fits_and_seldom_asks_for_more() -> None:
    model = Net()
    loss_fn: Any = above(5, model)
    driver = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    reports = [driver.step(batch_of(20)) for _ in range(300)]
    assert max(len(rows) for rows in loss_fn.seen[-40:]) == 5
    assert [report.retries > 0 for report in reports].count(True) <= 4
    assert all(report.retries == 0 for report in reports[-50:])


def test_a_size_grows_when_memory_becomes_free() -> None:
    model = Net()
    small: Any = above(2, model)
    driver = driver_of(model, small, BatchCutter(rows="auto", weight=TOKENS))
    driver.step(batch_of(16))
    driver.loss_fn = above(99, model)
    reports = [driver.step(batch_of(16)) for _ in range(PATIENCE * EDGE * 4)]
    assert reports[-1].sub_batches == 1


def test_less_memory_than_there_was() -> None:
    sizes = Sizes()
    sizes.failed(10, rows=16)
    sizes.ran(10, largest=8, rows=16)
    assert sizes.limit(10) == 8
    sizes.failed(10, rows=8)  # had fitted
    assert sizes.limit(10) == 4
    sizes.ran(10, largest=4, rows=16)
    sizes.known[10].rows = 6
    sizes.failed(10, rows=6)
    assert sizes.limit(10) == 4  # back to what fits, not to half


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (1.0, 0.02), (0.0, 0.05), (3.0, 0.001)])
def test_sizes_of_unseen_widths_follow_area_and_its_square(a: float, b: float) -> None:
    def fits(width: int) -> int:
        return int(20_000 / (width * (a + b * width)))

    sizes = Sizes()
    for width in (40, 300):
        while sizes.limit(width) != fits(width):  # as a driver that looks for the edge
            own = sizes.known.get(width)
            if own is None or own.rows > fits(width):
                sizes.failed(width, own.rows if own is not None else 2 * fits(width))
            else:
                own.fits, own.rows = own.rows, own.rows + 1
    for width in (50, 80, 100, 150, 200, 250):
        limit = sizes.limit(width)
        assert limit is not None
        assert abs(limit - fits(width)) <= max(0.1 * fits(width), 1)
    assert sizes.limit(20) is not None


def test_a_narrower_batch_gets_more_rows_and_a_wider_one_fewer() -> None:
    model = Net()
    seen: list[tuple[int, int]] = []

    def loss_fn(data: Data) -> Tensor:
        rows, width = data["labels"].shape
        seen.append((rows, width))
        if rows * width > 100:
            raise memory_gone()
        return token_loss(model, data)

    driver = driver_of(model, loss_fn, BatchCutter(area="auto", weight=TOKENS))
    assert driver.step(batch_of(16, width=10)).retries == 1
    assert [driver.step(batch_of(16, width=w)).retries for w in (5, 20, 10, 40)] == [0, 0, 0, 0]
    assert seen[1:3] == [(8, 10)] * 2
    assert seen[3:] == [(16, 5)] + [(4, 20)] * 4 + [(8, 10)] * 2 + [(2, 40)] * 8


def test_batches_without_a_width_share_one_size() -> None:
    model = nn.Linear(3, 1)

    def loss_fn(data: Tensor) -> Tensor:
        if len(data) > 4:
            raise memory_gone()
        return model(data).square().mean()

    driver = driver_of(model, loss_fn, BatchCutter(rows="auto"))
    assert [driver.step(torch.randn(8, 3)).retries for _ in range(3)] == [1, 0, 0]
    with pytest.raises(CutError, match="no leaf says how wide a row is"):
        driver_of(model, loss_fn, BatchCutter(area="auto")).step(torch.randn(8, 3))


@pytest.mark.parametrize("through", ["json", "torch"])
def test_the_state_of_a_driver_holds_steps_and_sizes(through: str, tmp_path: Path) -> None:
    model = Net()
    loss_fn: Any = above(3, model)
    driver = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    driver.step(batch_of(16))
    if through == "json":
        state = json.loads(json.dumps(driver.state_dict()))
    else:
        torch.save(driver.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == driver.state_dict()
    assert resumed.steps == 1
    assert resumed.step(batch_of(16)).retries == 0


@pytest.mark.parametrize(
    "state", [None, {}, {"steps": 1}, {"steps": 1, "sizes": {}}, {"steps": 1, "sizes": {"widths": {3: {"x": 1}}}}]
)
def test_a_state_of_another_kind_is_refused(state: Any) -> None:
    with pytest.raises(CutError, match="no state of"):
        driver_of(Net(), token_loss, BatchCutter()).load_state_dict(state)


def test_a_loader_of_cuts_made_with_auto_is_split_too() -> None:
    model, batches = Net(), [batch_of(16) for _ in range(2)]
    loss_fn: Any = above(3, model)
    driver = driver_of(model, loss_fn, on_oom="raise")
    reports = list(driver.run(BatchCutter(rows="auto", weight=TOKENS).over(batches)))
    assert [report.retries for report in reports] == [3, 0]


def test_a_cutter_alone_does_not_know_what_fits() -> None:
    assert [sub.rows for sub in BatchCutter(rows="auto").cut(batch_of(16))] == [16]


def cutter_of(**arguments: Any) -> BatchCutter:
    return BatchCutter(**arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: driver_of(Net(), token_loss, on_oom="retry"), 'on_oom="raise" or on_oom="split"'),
        (lambda: BatchCutter(rows="auto", area=4), "two limits at once"),
        (lambda: cutter_of(rows="many"), "rows='many'"),
        (lambda: cutter_of(parts="auto"), "parts='auto'"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(CutError, match=words):
        make()


# The real thing

REAL = """
import resource, sys
import torch
from batchsplit import BatchCutter, CutError, StepDriver

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)]
model = torch.nn.Sequential(*layers).double()
x = torch.randn(16, 1024, 64, dtype=torch.float64)  # 8 MiB, and as much again after each operation


def loss_fn(data):
    return model(data["x"]).square().mean()


loss_fn({"x": x}).backward()
wanted = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
loss_fn({"x": x[:1]}).backward()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
driver = StepDriver(model, optimizer, loss_fn, BatchCutter(rows="auto"), progress=False)
pages = int(open("/proc/self/statm").read().split()[0])


def leave(mebibytes):
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


leave(20)
first = driver.step({"x": x})
assert all((p.grad - w).norm() <= 1e-12 * w.norm() for p, w in zip(model.parameters(), wanted))
for _ in range(3):
    later = driver.step({"x": x})
print(first.retries, later.retries, later.sub_batches)
leave(0)
try:
    driver.step({"x": x})
except CutError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's memory is Linux's")
def test_memory_that_really_runs_out() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, env=environment, check=False, cwd=root, timeout=99
    )
    assert result.returncode == 0, result.stderr[-2000:]
    counts, error = result.stdout.splitlines()
    first, later, parts = map(int, counts.split())
    assert first >= 1
    assert later == 0
    assert parts >= 2
    assert error.startswith("row 0 does not fit in memory by itself: it is 1024 wide; ")
    assert "bytes were asked for" in error
    assert "bytes are free on cpu" in error
