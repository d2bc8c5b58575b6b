"""Accelerate: three optimizer steps, cut and uncut, end at the same parameters; nobody divides twice."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from batchsplit import BatchCutter, CutError, label_weight, run_step
from ranked import on_ranks

pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradientAccumulationPlugin

from batchsplit.trainers.accelerate import cut_step, over

pytestmark = pytest.mark.usefixtures("float64")

VOCABULARY = 11


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Accelerate keeps one state a process."""
    yield
    forget()


def forget() -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(ids)).cumsum(1))


def rows_of_tokens(count: int) -> list[dict[str, Tensor]]:
    """Rows whose number of labels differs a lot."""
    ids = torch.randint(VOCABULARY, (count, 7))
    kept = torch.arange(7) < torch.randint(1, 8, (count, 1))
    return [{"ids": row, "labels": row.where(keep, -100)} for row, keep in zip(ids, kept, strict=True)]


def mean_over_labels(model: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda data: F.cross_entropy(model(data["ids"]).flatten(0, 1), data["labels"].flatten())


def cutter_of(rows: int | None) -> BatchCutter:
    return BatchCutter(rows=rows, weight=label_weight("labels"))


def trained(rows: int | None, data: Any, start: nn.Module, steps: int = 1, naive: bool = False) -> tuple[Any, ...]:
    """Losses, learning rates and parameters of a run; uncut, and without batchsplit, for `rows=None`."""
    forget()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, batch_size=6)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loss_fn, losses, rates, taken = mean_over_labels(model), [], [], 0
    for batch in loader if rows is None else over(cutter_of(rows), loader):
        if rows is None:
            with accelerator.accumulate(model):
                loss = loss_fn(batch)
                accelerator.backward(loss)
        elif naive:  # each sub-batch counts the same
            with accelerator.accumulate(model):
                loss = torch.stack([loss_fn(sub.data) for sub in batch]).mean()
                accelerator.backward(loss)
        else:
            loss = cut_step(accelerator, model, batch, loss_fn, batches_per_step=steps)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            taken += 1
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    return losses, rates, taken, torch.cat([p.detach().flatten() for p in model.parameters()])


def far(one: Tensor, other: Tensor, start: nn.Module) -> float:
    """How far apart two runs ended, relative to the way that they went."""
    begun = torch.cat([p.detach().flatten() for p in start.parameters()])
    return float((one - other).norm() / (other - begun).norm())


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_three_steps_as_uncut(rows: int) -> None:
    data, start = rows_of_tokens(16), Tagger()  # batches of 6, 6 and 4
    losses, rates, taken, parameters = trained(rows, data, start)
    uncut = trained(None, data, start)
    assert taken == uncut[2] == 3
    assert rates == uncut[1]
    assert losses == pytest.approx(uncut[0], rel=1e-12)
    assert far(parameters, uncut[3], start) < 1e-12


def test_a_wrong_share_would_be_seen() -> None:
    data, start = rows_of_tokens(16), Tagger()
    assert far(trained(2, data, start, naive=True)[3], trained(None, data, start)[3], start) > 1e-3


@pytest.mark.parametrize("steps", [2, 3])
def test_several_batches_a_step_as_uncut(steps: int) -> None:
    """Accelerate divides by the number of batches, short last window or not, and so it does here."""
    data, start = rows_of_tokens(28), Tagger()  # five batches
    losses, rates, taken, parameters = trained(2, data, start, steps)
    uncut = trained(None, data, start, steps)
    assert taken == uncut[2] == -(-5 // steps)
    assert rates == uncut[1]
    assert losses == pytest.approx(uncut[0], rel=1e-12)
    assert far(parameters, uncut[3], start) < 1e-12


def test_b29_accelerate_would_divide_twice() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(Tagger())
    batch = torch.utils.data.default_collate(rows_of_tokens(8))
    cut = cutter_of(2).cut(batch)
    with pytest.raises(CutError, match=r"gradient_accumulation_steps=4, and .* write Accelerator\(gradient_acc.*=1\)"):
        cut_step(accelerator, model, cut, mean_over_labels(model))
    with pytest.raises(CutError, match=r"divides the loss by 4 on top of the shares.*group\(loader, batches=4\)"):
        run_step(cut, mean_over_labels(model), model=model, backward=accelerator.backward)
    assert all(p.grad is None for p in model.parameters()) and accelerator.step == 0


@pytest.mark.parametrize("rows", [2, None])
def test_b29_an_engine_that_divides(rows: int | None) -> None:
    model = Tagger()
    cut = cutter_of(rows).cut(torch.utils.data.default_collate(rows_of_tokens(8)))
    before = [torch.rand_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad = grad.clone()
    with pytest.raises(CutError, match=r"backward multiplies the loss by 0\.25, on top of the shares"):
        run_step(cut, mean_over_labels(model), model=model, backward=lambda loss: (loss / 4).backward())
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True) if p.grad is not None
    )
    scaler = torch.amp.GradScaler("cpu")  # makes losses larger, and takes that out again
    run_step(cut, mean_over_labels(model), model=model, backward=lambda loss: scaler.scale(loss).backward())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_b29_the_reported_loss_is_neither_divided_nor_multiplied(parts: int) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tagger())
    batch = torch.utils.data.default_collate(rows_of_tokens(10))
    cut = BatchCutter(parts=parts, weight=label_weight("labels")).cut(batch)
    loss = cut_step(accelerator, model, cut, mean_over_labels(model))
    assert loss.item() == pytest.approx(mean_over_labels(model)(batch).item(), rel=1e-12)


def test_several_models() -> None:
    accelerator = Accelerator(cpu=True)
    one, two = accelerator.prepare(nn.Linear(3, 4), nn.Linear(4, 1))
    x = torch.rand(5, 3)
    (two(one(x)) ** 2).mean().backward()
    expected = [p.grad for p in (*one.parameters(), *two.parameters())]
    for model in (one, two):
        model.zero_grad()
    cut_step(accelerator, [one, two], BatchCutter(rows=2).cut(x), lambda x: (two(one(x)) ** 2).mean())
    torch.testing.assert_close([p.grad for p in (*one.parameters(), *two.parameters())], expected, rtol=1e-12, atol=0)


def test_after_an_error_all_is_as_before() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(3, 1))
    cut = BatchCutter(rows=2).cut(torch.rand(5, 3))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).mean()

    def failing(x: Tensor) -> Tensor:
        return model(x).mean() if len(x) == 2 else model(x.T)

    cut_step(accelerator, model, cut, loss_fn, batches_per_step=2)
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        cut_step(accelerator, model, cut, failing, batches_per_step=2)
    assert "nothing was stepped" in caught.value.__notes__[0]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    assert accelerator.step == 1 and not accelerator.sync_gradients
    cut_step(accelerator, model, cut, loss_fn, batches_per_step=2)
    assert accelerator.sync_gradients


def test_loaders_are_prepared_first() -> None:
    loader = DataLoader(torch.rand(20, 3), batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(CutError, match=r"not a DataLoader: write loader = accelerator\.prepare\(loader\) first"):
        over(BatchCutter(rows=4), loader)
    prepared = Accelerator(cpu=True).prepare(loader)
    assert len(over(BatchCutter(rows=4), prepared)) == 3


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    x = torch.rand(4, 3)
    with pytest.raises(CutError, match=r"wants a Cut, not a Tensor: iterate over\(cutter, loader\)"):
        cut_step(accelerator, model, x, lambda x: model(x).mean())  # type: ignore[arg-type]
    cut = BatchCutter(rows=2).cut(x)
    with pytest.raises(CutError, match="write randomness="):
        cut_step(accelerator, model, cut, lambda x: model(x).mean(), randomness="old")
    accelerator.has_lomo_optimizer = True
    with pytest.raises(CutError, match="LOMO steps inside the backward"):
        cut_step(accelerator, model, cut, lambda x: model(x).mean())
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(CutError, match="DeepSpeed steps inside its backward"):
        cut_step(accelerator, model, cut, lambda x: model(x).mean())
    assert all(p.grad is None for p in model.parameters())


def _environment(rank: int, **more: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **more)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")


def _union(batches: list[Any], start: nn.Module) -> list[Tensor]:
    """The gradient of one process, for the mean over steps of the mean over all ranks' labels."""
    model = copy.deepcopy(start)
    for batch in batches:
        (mean_over_labels(model)(batch) / len(batches)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _replicas(rank: int, start: nn.Module, batches: list[list[Any]], plugin: dict[str, Any]) -> Any:
    _environment(rank)
    plan = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, **plugin)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plan)
    model = accelerator.prepare(start)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU and isinstance(
        model, nn.parallel.DistributedDataParallel
    )
    reduced = [0]

    def counted(state: Any, bucket: Any) -> Any:
        reduced[0] += 1
        return allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]

    counted.__annotations__ = {}  # torch looks at them

    model.register_comm_hook(None, counted)
    for step in batches:
        cut_step(accelerator, model, cutter_of(2).cut(step[rank]), mean_over_labels(model), batches_per_step=2)
    return [p.grad for p in model.parameters()], reduced[0], accelerator.sync_gradients


def _two_ranks() -> tuple[nn.Module, list[list[Any]], list[Any]]:
    """Two steps; on rank 0 five rows, on rank 1 three, and the batches of both together."""
    steps = [rows_of_tokens(8) for _ in range(2)]
    collate = torch.utils.data.default_collate
    return Tagger(), [[collate(rows[:5]), collate(rows[5:])] for rows in steps], [collate(rows) for rows in steps]


@pytest.mark.parametrize("plugin", [{}, {"sync_each_batch": True}], ids=["held", "each"])
def test_two_ranks_give_the_gradient_of_their_union(plugin: dict[str, Any]) -> None:
    start, batches, union = _two_ranks()
    for grads, reduced, synced in on_ranks(2, _replicas, start, batches, plugin):
        torch.testing.assert_close(grads, _union(union, start), rtol=1e-12, atol=1e-15)
        assert synced
        assert reduced == 1 or (plugin and reduced > 2)  # one reduction for two batches of 3 and 2 sub-batches


def _sharded(rank: int, start: nn.Module, batches: list[list[Any]], trap: bool) -> Any:
    _environment(rank)
    plan = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plan)
    Accelerator.is_fsdp2 = property(lambda self: True)  # type: ignore[assignment]  # which it is on GPUs only
    model: Any = fully_shard(start)
    states = []
    hold = model.set_requires_gradient_sync
    model.set_requires_gradient_sync = lambda value, **more: (states.append(value), hold(value, **more))
    for step in batches:
        cut = cutter_of(2).cut(step[rank])
        if trap:  # what nesting Accelerate's own contexts does
            with accelerator.accumulate(model):
                for sub in cut:
                    with nullcontext() if sub.is_last else accelerator.no_sync(model):
                        pass
                states.append("backward of the last")
        else:
            cut_step(accelerator, model, cut, mean_over_labels(model), batches_per_step=2)
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None], states


def test_fsdp2_no_sync_is_not_turned_on_again_early() -> None:
    start, batches, union = _two_ranks()
    for grads, _ in on_ranks(2, _sharded, start, batches, False):
        torch.testing.assert_close(grads, _union(union, start), rtol=1e-12, atol=1e-15)
    for _, states in on_ranks(2, _sharded, start, batches, True):  # the trap is there
        assert states[states.index("backward of the last") - 1] is True
