"""Several ranks: the gradient and the loss of one process that has all their rows, one reduction a step, and no hang."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchsplit import BatchCutter, StepDriver, label_weight, row_weight, run_step
from ranked import PATIENCE, Failed, each_rank, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later, beside threads

Data = dict[str, Tensor]
Loss = Callable[[Data], Any]
TOKENS = label_weight("labels")
SORTS = 5


class Net(nn.Module):
    """Token classification with a second head that only one term of the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.labels, self.side = nn.Linear(3, 6), nn.Linear(6, SORTS), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.encoder(x))
        return self.labels(hidden), self.side(hidden)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows_of(seed: int, rows: int, ignored: bool = False) -> Data:
    """Ragged rows at a padding of 7, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 7, 3, generator=generator)
    labels = torch.randint(SORTS, (rows, 7), generator=generator)
    lengths = torch.randint(1, 8, (rows,), generator=generator)
    labels[torch.arange(7) >= lengths[:, None]] = -100
    if ignored:
        labels[:] = -100
    return {"x": x, "labels": labels, "y": torch.randn(rows, 7, 1, generator=generator)}


def batches_of(step: int, ranks: int) -> list[Data]:
    """What each rank has: rank 1 a single row, and in every second step the last rank has nothing to learn from."""
    rows = [5, 1, 3, 4][:ranks]
    return [rows_of(100 * step + rank, n, ignored=rank == ranks - 1 and step % 2 == 1) for rank, n in enumerate(rows)]


def union(batches: Sequence[Data]) -> Data:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def token_loss(model: Any) -> Loss:
    """A mean by hand: over no tokens it is NaN, and so is its gradient."""

    def loss_fn(data: Data) -> Tensor:
        scores, side = model(data["x"])
        known = (data["labels"] != -100).to(scores.dtype)
        each = nn.functional.cross_entropy(scores.transpose(1, 2), data["labels"].clamp(min=0), reduction="none")
        return ((each + 0.1 * (side.squeeze(2) - data["y"].squeeze(2)) ** 2) * known).sum() / known.sum()

    return loss_fn


def term_losses(model: Any) -> Callable[[Data], dict[str, Tensor]]:
    """One term by tokens, one by rows, a penalty; the head of the first is used by no other."""

    def loss_fn(data: Data) -> dict[str, Tensor]:
        scores, side = model(data["x"])
        known = (data["labels"] != -100).to(scores.dtype)
        each = nn.functional.cross_entropy(scores.transpose(1, 2), data["labels"].clamp(min=0), reduction="none")
        penalty = sum((p**2).sum() for p in model.parameters() if not hasattr(p, "device_mesh"))
        return {
            "ce": (each * known).sum() / known.sum(),
            "side": ((side - data["y"]) ** 2).mean(),
            "l2": 0.01 * penalty + 0 * side.sum(),
        }

    return loss_fn


TERMS = {"ce": TOKENS, "side": row_weight, "l2": "once"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def driver_of(model: nn.Module, loss_fn: Any = None, cutter: BatchCutter | None = None, **options: Any) -> StepDriver:
    cutter = BatchCutter(rows=2, weight=TOKENS) if cutter is None else cutter
    return StepDriver(model, sgd(model), loss_fn or token_loss(model), cutter, progress=False, **options)


def flat(tensors: Any) -> Tensor:
    return torch.cat([_whole(t).detach().flatten() for t in tensors])


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> Tensor:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def error(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def one_process(
    ranks: int, steps: int, loss: Any = token_loss, weight: Any = TOKENS
) -> tuple[Tensor, list[float], Tensor]:
    """Parameters, losses and the last gradients' norm of one process that has the rows of all ranks, unsplit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = net()
        driver = driver_of(model, loss(model), BatchCutter(weight=weight), clip_norm=0.5)
        reports = [driver.step(union(batches_of(step, ranks))) for step in range(steps)]
        return flat(model.parameters()), [report.loss.item() for report in reports], reports[-1].grad_norm  # type: ignore[return-value]
    finally:
        torch.set_default_dtype(before)


class Counted:
    """Counts what ranks send to each other: the reductions of a DistributedDataParallel, and our own small messages."""

    def __init__(self, model: Any) -> None:
        self.reductions, self.messages = [], 0

        def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch wants no other annotations than its own
            self.reductions.append(len(bucket.gradients()))
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())  # type: ignore[union-attr]

        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, hook)
        self.gather = dist.all_gather
        dist.all_gather = self._all_gather

    def _all_gather(self, *args: Any, **options: Any) -> Any:
        self.messages += 1
        return self.gather(*args, **options)


# The gradient of one process on the union.

OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def replicated(rank: int, ranks: int, steps: int) -> list[Any]:
    found = []
    for options in OPTIONS:
        model = DistributedDataParallel(net(), **options)
        counted = Counted(None if "static_graph" in options else model)
        driver = driver_of(model, clip_norm=0.5)
        reports = [driver.step(batches_of(step, ranks)[rank]) for step in range(steps)]
        if counted.reductions:
            assert sum(counted.reductions) == steps * len(list(model.parameters()))
        assert counted.messages == 2 * steps
        dist.all_gather = counted.gather
        found.append((flat(model.parameters()), [r.loss.item() for r in reports], reports[-1].grad_norm))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_equal_one_process_on_the_union(ranks: int) -> None:
    parameters, losses, norm = one_process(ranks, 4)
    results = on_ranks(ranks, replicated, ranks, 4)
    for found in results:
        for (own, own_losses, own_norm), (first, *_), options in zip(found, results[0], OPTIONS, strict=True):
            assert error(own, parameters) < 1e-12, options
            assert own_losses == pytest.approx(losses, rel=1e-12)
            assert own_norm.item() == pytest.approx(norm.item(), rel=1e-12)
            assert torch.equal(own, first)


def naive(rank: int) -> tuple[Tensor, Tensor]:
    """Planted: each rank's own mean, averaged, with and without the right number of tokens."""
    found = []
    for whole in (None, "given"):
        model = DistributedDataParallel(net())
        batch = batches_of(0, 2)[rank]
        cutter = BatchCutter(rows=2, weight=TOKENS)
        run_step(
            cutter.cut(batch, whole_weight=None if whole is None else TOKENS(batch)), token_loss(model), model=model
        )
        found.append(gradients(model))
    return found[0], found[1]


def test_means_of_ranks_are_not_the_mean_of_the_union(float64: None) -> None:
    model = net()
    token_loss(model)(union(batches_of(0, 2))).backward()
    for right, wrong in on_ranks(2, naive):
        assert error(right, gradients(model)) < 1e-12
        assert error(wrong, gradients(model)) > 0.05


def with_terms(rank: int, kind: str) -> tuple[Tensor, list[float], dict[str, float]]:
    model = wrapped(kind)
    counted = Counted(None)
    loss = (
        term_losses(model)
        if kind == "ddp"
        else lambda data: {k: v for k, v in term_losses(model)(data).items() if k != "l2"}
    )
    weight = TERMS if kind == "ddp" else {"ce": TOKENS, "side": row_weight}
    driver = driver_of(model, loss, BatchCutter(rows=2, weight=weight), clip_norm=0.5)
    reports = [driver.step(batches_of(step, 2)[rank]) for step in range(4)]
    assert counted.messages == 8  # one for all the weights, one for all the losses
    terms = {name: value.item() for name, value in reports[-1].terms.items()}
    return flat(model.parameters()), [r.loss.item() for r in reports], terms


def wrapped(kind: str, mesh: Any = None) -> nn.Module:
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sizes = mesh or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    for layer in (model.encoder, model.labels):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_terms_have_the_denominators_of_all_ranks(kind: str) -> None:
    """A rank may have no weight for a term whose parameters no other term uses."""
    if kind == "ddp":
        parameters, losses, _ = one_process(2, 4, term_losses, TERMS)
    else:
        some = {"ce": TOKENS, "side": row_weight}
        only = lambda model: lambda data: {k: v for k, v in term_losses(model)(data).items() if k in some}  # noqa: E731
        parameters, losses, _ = one_process(2, 4, only, some)
    for own, own_losses, terms in on_ranks(2, with_terms, kind):
        assert error(own, parameters) < 1e-12
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert sum(terms.values()) == pytest.approx(losses[-1], rel=1e-12)


def sharded(rank: int, ranks: int, mesh: Any) -> tuple[Tensor, list[float], Any]:
    model = wrapped("fsdp", mesh)
    counted = Counted(None)
    driver = driver_of(model, clip_norm=0.5)
    reports = [driver.step(batches_of(step, ranks)[rank]) for step in range(4)]
    assert counted.messages <= 2 * 4 * (1 if mesh is None else 2)
    return flat(model.parameters()), [r.loss.item() for r in reports], reports[-1].grad_norm


@pytest.mark.parametrize(("ranks", "mesh"), [(2, None), (4, None), (4, (2, 2))])
def test_shards_equal_one_process_on_the_union(ranks: int, mesh: Any) -> None:
    """With 3, 1, 2 and 2 sub-batches, one rank now and then without a label."""
    parameters, losses, norm = one_process(ranks, 4)
    for own, own_losses, own_norm in on_ranks(ranks, sharded, ranks, mesh):
        assert error(own, parameters) < 1e-12
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert own_norm.item() == pytest.approx(norm.item(), rel=1e-12)


# What goes wrong on one rank is told on all, before a parameter changes, and the next step is right again.


class Trap:
    """A loss that fails at chosen calls."""

    def __init__(
        self, loss_fn: Loss, error: Callable[[], BaseException], calls: Sequence[int], where: str = "forward"
    ) -> None:
        self.loss_fn, self.error, self.calls, self.where, self.count = loss_fn, error, calls, where, 0

    def __call__(self, data: Data) -> Any:
        self.count += 1
        if self.count - 1 not in self.calls:
            return self.loss_fn(data)
        if self.where == "before":
            raise self.error()
        loss = self.loss_fn(data)
        if self.where == "loss":
            return loss * torch.nan
        if self.where == "forward":
            raise self.error()
        loss.register_hook(self._fail)  # before anything has gone back
        return loss

    def _fail(self, grad: Tensor) -> None:
        raise self.error()


def memory_gone() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def poisoned(rank: int, kind: str, at: int, where: str) -> tuple[str, str, float, bool]:
    """What rank 1 does wrong in its first step, what each rank says, and how far the next step is from the right one."""
    model = wrapped(kind)
    batch = batches_of(0, 2)[1 - rank]  # rank 1 has five rows
    weight: Any = TOKENS
    loss_fn: Any = token_loss(model)
    if rank == 1 and where == "weight":
        weight = lambda data: torch.tensor(float("nan"))  # noqa: E731
    elif rank == 1 and where == "cut":
        batch = {**batch, "y": batch["y"][:-1]}
    elif rank == 1:
        loss_fn = Trap(loss_fn, lambda: KeyError("a bug of the user's"), [at], where)
    before = flat(model.parameters()).clone()
    said = said_by(lambda: driver_of(model, loss_fn, BatchCutter(rows=2, weight=weight)).step(batch))
    unchanged = torch.equal(before, flat(model.parameters()))
    restored = getattr(model, "require_backward_grad_sync", True)
    driver_of(model, clip_norm=0.5).step(batches_of(0, 2)[rank])
    return said.kinds[0], said.text, error(flat(model.parameters()), one_process(2, 1)[0]), unchanged and restored


def said_by(act: Callable[[], Any]) -> Failed:
    try:
        act()
    except Exception as error:
        return Failed(error)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize(
    ("at", "where", "own", "other"),
    [
        (0, "before", 'KeyError: "a bug of the user\'s" This came up in SubBatch(1 of 3', "rank 1 failed in this step"),
        (1, "forward", "KeyError", "rank 1 failed in this step"),
        (2, "forward", "KeyError", "rank 1 failed in this step"),
        (1, "backward", "KeyError", "rank 1 failed in this step"),
        (1, "loss", "LossError: the loss is nan in SubBatch(2 of 3", "the loss is nan in sub-batch 1 of rank 1"),
        (0, "weight", "WeightError: the weight <lambda> of sub-batch 0 is nan", "rank 1 failed in this step"),
        (0, "cut", "LeafError", "rank 1 failed in this step"),
    ],
)
def test_an_error_on_one_rank_is_an_error_on_all(at: int, where: str, own: str, other: str) -> None:
    (_, said0, off0, kept0), (_, said1, off1, kept1) = on_ranks(2, poisoned, "ddp", at, where)
    assert own in said1
    assert other in said0
    assert kept0 and kept1
    assert max(off0, off1) < 1e-12


@pytest.mark.parametrize(("at", "where"), [(1, "loss"), (0, "weight"), (0, "cut")])
def test_an_error_outside_of_a_sharded_forward_is_one_on_all(at: int, where: str) -> None:
    (_, said0, off0, kept0), (_, _, off1, kept1) = on_ranks(2, poisoned, "fsdp", at, where)
    assert "rank 1" in said0
    assert kept0 and kept1
    assert max(off0, off1) < 1e-12


def nothing_at_all(rank: int, kind: str) -> tuple[list[str], str]:
    model = wrapped(kind)
    before = flat(model.parameters()).clone()
    batch = rows_of(rank, 3, ignored=True)
    said = said_by(lambda: driver_of(model).step(batch))
    assert torch.equal(before, flat(model.parameters()))
    return said.kinds, said.text


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_no_weight_on_any_rank(kind: str) -> None:
    for kinds, text in on_ranks(2, nothing_at_all, kind):
        assert kinds[0] == "WeightError" and "CutError" in kinds
        assert "of the whole batch is 0" in text


# Cases from bug reports.


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def b50(rank: int) -> list[Any]:
    found: list[Any] = []
    for parts in (2, 1):
        model = DistributedDataParallel(Scale())
        held = []
        no_sync = model.no_sync
        model.no_sync = lambda: held.append(1) or no_sync()  # noqa: B023
        x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])[rank]
        loss = run_step(BatchCutter(parts=parts, weight=None).cut(x), lambda x: model(x).sum(), model=model)  # noqa: B023
        found.append((gradients(model).item(), loss.item(), len(held)))
    model = DistributedDataParallel(net())
    driver = driver_of(model)
    for step in range(20):
        driver.step(batches_of(step, 2)[rank])
    return [*found, flat(model.parameters())]


def test_b50_the_sub_batch_that_runs_last_reduces() -> None:
    first, second = on_ranks(2, b50)
    assert first[:2] == second[:2] == [(6.0, 6.0, 1), (6.0, 6.0, 0)]  # sums: the mean of 3 and 9
    assert torch.equal(first[2], second[2])


def b51(rank: int, how: str) -> Any:
    model = DistributedDataParallel(net())
    counted = Counted(model)
    batch = batches_of(0, 2)[rank]
    if how == "module":
        said = said_by(
            lambda: run_step(BatchCutter(rows=1, weight=TOKENS).cut(batch), token_loss(model.module), model=model)
        )
        driver = said_by(lambda: driver_of(model, token_loss(model.module)).step(batch))
        return said.text, driver.text
    sync = {"found": None, "given": model.no_sync, "each": False}[how]
    run_step(BatchCutter(rows=1, weight=TOKENS).cut(batch), token_loss(model), model=model, sync=sync)
    return sum(counted.reductions), gradients(model)


@pytest.mark.parametrize(("how", "times"), [("found", 1), ("given", 1), ("each", 5)])
def test_b51_one_reduction_a_step(how: str, times: int, float64: None) -> None:
    model = net()
    token_loss(model)(union(batches_of(0, 2))).backward()
    for reductions, found in on_ranks(2, b51, how):
        assert reductions == times * len(list(model.parameters()))
        assert error(found, gradients(model)) < 1e-12


def test_b51_a_forward_past_the_wrapper_is_named() -> None:
    for said in on_ranks(2, b51, "module"):
        for text in said:
            assert (
                "loss_fn never calls the DistributedDataParallel model, so its gradients are not synchronised" in text
            )
            assert "not model.module" in text


def b53(rank: int, kind: str, empty: Sequence[int], how: str) -> tuple[Tensor, float]:
    """Rank 1 has three sub-batches of two rows, some of them with nothing to learn from."""
    model = wrapped(kind)
    batch = rows_of(7 + rank, 6)
    if rank == 1:
        for sub in empty:
            batch["labels"][2 * sub : 2 * sub + 2] = -100
    right = token_loss(model)

    def loss_fn(data: Data) -> Tensor:
        if (data["labels"] != -100).any():
            return right(data)
        if how == "graphless":
            return torch.zeros(())
        return right(data) if how == "nan" else torch.zeros((), requires_grad=True)

    loss = run_step(BatchCutter(rows=2, weight=TOKENS).cut(batch), loss_fn, model=model)
    return gradients(model), loss.item()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_b53_a_rank_with_nothing_to_learn_from_its_last_part(kind: str, float64: None) -> None:
    for empty, how in [
        ([2], "nan"),
        ([1, 2], "graphless"),
        ([2], "fresh"),
        ([0, 1, 2], "nan"),
        ([0, 1, 2], "graphless"),
    ]:
        if kind == "fsdp" and (how, len(empty)) == ("graphless", 3):
            continue  # its model is called in no sub-batch at all: see below
        model, other = net(), rows_of(8, 6)
        for sub in empty:
            other["labels"][2 * sub : 2 * sub + 2] = -100
        loss = token_loss(model)(union([rows_of(7, 6), other]))
        loss.backward()
        for found, own in on_ranks(2, b53, kind, empty, how):
            assert error(found, gradients(model)) < 1e-12, (empty, how)
            assert own == pytest.approx(loss.item(), rel=1e-12)


def test_b53_a_rank_that_never_calls_a_sharded_model() -> None:
    first, second = each_rank(2, b53, "fsdp", [0, 1, 2], "graphless", backend=5)
    assert "did not call the sharded model for any sub-batch" in second.text
    assert isinstance(first, Failed)  # the backend's own error


class WithNorm(Net):
    """Buffers that DistributedDataParallel broadcasts in the first forward of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.norm(x.flatten(0, 1))  # its output is not used, so it mixes no rows
        return super().forward(x)


ANYWHERE = [(call, where) for where in ("before", "forward", "backward") for call in range(3)]


def b54_out_of_memory(
    rank: int, failing: Sequence[int], net_type: type[Net], at: Sequence[tuple[int, str]]
) -> list[Any]:
    """On `failing` ranks memory runs out in the first, middle or last sub-batch, before, in or after the forward."""
    found: list[Any] = []
    for call, where in at:
        torch.manual_seed(0)
        model = DistributedDataParallel(net_type(), find_unused_parameters=net_type is WithNorm)
        loss_fn = Trap(token_loss(model), memory_gone, [call, call + 1] if rank in failing else [], where)
        driver = driver_of(model, loss_fn, BatchCutter(rows=4, weight=TOKENS), on_oom="split", coupled="allow")
        batch = rows_of(70 + rank, 12)
        retries = driver.step(batch).retries
        driver.step(batch)
        used = [p for name, p in model.module.named_parameters() if not name.startswith("norm")]
        found.append((retries, flat(used), [buffer.double() for buffer in model.buffers()]))
    return found


@pytest.mark.parametrize(("failing", "net_type"), [((1,), Net), ((0, 1), Net), ((0,), WithNorm), ((1,), WithNorm)])
def test_b54_out_of_memory_on_one_rank(failing: Sequence[int], net_type: type[Net], float64: None) -> None:
    model = net()
    driver = driver_of(model, cutter=BatchCutter(weight=TOKENS))
    for _ in range(2):
        driver.step(union([rows_of(70 + rank, 12) for rank in range(2)]))
    results = on_ranks(2, b54_out_of_memory, failing, net_type, ANYWHERE)
    for rank, found in enumerate(results):
        for (retries, parameters, _), (_, first, _) in zip(found, results[0], strict=True):
            assert retries == (2 if rank in failing else 0)
            assert error(parameters, flat(model.parameters())) < 1e-12
            assert torch.equal(parameters, first)


def auto(rank: int) -> tuple[list[int], list[int], Tensor]:
    """Ranks with room for 4 and for 2 rows."""
    model = DistributedDataParallel(net())
    right, room = token_loss(model), 4 - 2 * rank

    def loss_fn(data: Data) -> Tensor:
        if len(data["x"]) > room:
            raise memory_gone()
        return right(data)

    driver = driver_of(model, loss_fn, BatchCutter(rows="auto", weight=TOKENS))
    reports = [driver.step(rows_of(10 * step + rank, 8)) for step in range(4)]
    return [r.sub_batches for r in reports], [r.retries for r in reports], flat(model.parameters())


def test_each_rank_finds_its_own_size(float64: None) -> None:
    model = net()
    driver = driver_of(model, cutter=BatchCutter(weight=TOKENS))
    for step in range(4):
        driver.step(union([rows_of(10 * step + rank, 8) for rank in range(2)]))
    results = on_ranks(2, auto)
    for _, retries, parameters in results:
        assert retries[1:] == [0, 0, 0] and retries[0] > 0
        assert error(parameters, flat(model.parameters())) < 1e-12
    assert results[0][0][-1] < results[1][0][-1]


def too_large(rank: int, net_type: type[Net], where: str) -> tuple[str, str]:
    model = DistributedDataParallel(net_type(), find_unused_parameters=net_type is WithNorm)
    loss_fn = Trap(token_loss(model), memory_gone, range(20) if rank == 1 else [], where)
    before = flat(model.parameters()).clone()
    said = said_by(lambda: driver_of(model, loss_fn, on_oom="split", coupled="allow").step(rows_of(rank, 4)))
    assert torch.equal(before, flat(model.parameters()))
    return said.kinds[0], said.text


@pytest.mark.parametrize(("net_type", "where"), [(Net, "forward"), (WithNorm, "before"), (WithNorm, "forward")])
def test_a_row_that_fits_nowhere(net_type: type[Net], where: str) -> None:
    (other, text), (own, _) = on_ranks(2, too_large, net_type, where)
    assert (other, own) == ("OtherRankError", "OutOfMemory")
    assert "rank 1 failed in this step" in text


def refused(rank: int) -> list[str]:
    sharded, static = wrapped("fsdp"), DistributedDataParallel(net(), static_graph=True)
    batch = rows_of(rank, 4)
    from torch.distributed.fsdp import FullyShardedDataParallel

    other = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    return [
        said_by(lambda: driver_of(sharded, on_oom="split").step(batch)).text,
        said_by(lambda: driver_of(sharded, cutter=BatchCutter(rows="auto")).step(batch)).text,
        said_by(lambda: driver_of(sharded, randomness="whole").step(batch)).text,
        said_by(lambda: driver_of(static, on_oom="split").step(batch)).text,
        said_by(lambda: run_step(BatchCutter(rows=2).cut(batch), token_loss(other), model=other)).text,
    ]


def test_what_ranks_can_not_do_together_is_refused() -> None:
    for texts in on_ranks(2, refused):
        assert all(text.startswith("CutError") for text in texts)
        assert "none can run its own again" in texts[0] and texts[0] == texts[1]
        assert 'Write randomness="fresh"' in texts[2]
        assert "Leave static_graph out" in texts[3]
        assert "fully_shard(model) instead" in texts[4]


def b54_loaders(rank: int, kind: str, how: str) -> Any:
    """Rank 1 has three batches, the other four; or its loader fails then."""

    def loader() -> Any:
        for step in range(3 + (rank == 0)):
            yield batches_of(step, 2)[rank]
        if how == "fails" and rank == 1:
            raise OSError("the disk is gone")

    model = wrapped(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reports = list(driver_of(model, clip_norm=0.5).run(loader()))
        except Exception as error:
            return Failed(error).text, flat(model.parameters())
    ours = [warning for warning in caught if "rank" in str(warning.message)]  # torch has some of its own
    said = [(str(warning.message), warning.filename == __file__) for warning in ours]
    return len(reports), flat(model.parameters()), said


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_b54_a_loader_that_ends_early_ends_the_loop_of_all(kind: str) -> None:
    parameters, *_ = one_process(2, 3)
    (many, first, said), (few, second, nothing) = on_ranks(2, b54_loaders, kind, "ends")
    assert many == few == 3
    assert torch.equal(first, second) and error(first, parameters) < 1e-12
    assert len(said) == 1 and not nothing
    assert "rank 1 has no batch left" in said[0][0] and "left out" in said[0][0] and said[0][1]


def test_b54_a_loader_that_fails() -> None:
    (said, first), (own, second) = on_ranks(2, b54_loaders, "ddp", "fails")
    assert own == "OSError: the disk is gone "
    assert "OtherRankError: rank 1 failed in this step" in said
    assert torch.equal(first, second)


def gone(rank: int, where: str) -> Any:
    """Rank 1 dies (or fails in the backward that is being reduced), and does not come back."""
    model = DistributedDataParallel(net())
    right = token_loss(model)
    driver_of(model, right).step(rows_of(rank, 4))

    def loss_fn(data: Data) -> Tensor:
        if rank == 1 and where == "loss":
            os._exit(1)
        return right(data)

    trapped = Trap(right, lambda: KeyError("late"), [1] if rank == 1 else [], "backward")
    driver_of(model, trapped if where == "backward" else loss_fn).step(rows_of(rank, 4))


def test_a_rank_that_dies_leaves_the_others_with_the_backends_error() -> None:
    for where in ("loss", "backward"):
        first, second = each_rank(2, gone, where, backend=5)
        assert second is None if where == "loss" else "late" in second.text
        assert first.kinds[0] in ("RuntimeError", "DistBackendError")


# Sums in other precisions, scalers, random numbers, users' own reductions.


def scaled(rank: int) -> list[Any]:
    """A loss that overflows on rank 1 in the second step."""
    model = DistributedDataParallel(net().float())
    right = token_loss(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    calls = []

    def loss_fn(data: Data) -> Tensor:
        calls.append(1)
        return right(data) * (torch.inf if rank == 1 and len(calls) == 2 else 1.0)

    driver = driver_of(model, loss_fn, scaler=scaler, clip_norm=0.5)
    found = []
    for step in range(3):
        batch = rows_of(10 * step + rank, 2)
        batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
        report = driver.step(batch)
        found.append((report.skipped, scaler.get_scale(), flat(model.parameters())))
    return found


def test_a_scaler_skips_the_step_of_all() -> None:
    first, second = on_ranks(2, scaled)
    assert [(skipped, scale) for skipped, scale, _ in first] == [(False, 4.0), (True, 2.0), (False, 2.0)]
    assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0][2], first[1][2])


def short(rank: int, parameters: torch.dtype) -> Tensor:
    """The loss is bfloat16, so shares have to be rounded, on each rank in another way."""
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(parameters))
    with torch.no_grad():
        model.module.weight.fill_(0.5)
    x = torch.linspace(0.5, 1.5, 40).reshape(10, 4)[: 3 if rank == 0 else 10]
    cut = BatchCutter(rows=2).cut(x.to(parameters))
    run_step(cut, lambda x: model(x).mean().bfloat16(), model=model)
    return gradients(model)


def test_ranks_reduce_gradients_and_not_parts_of_them(float64: None) -> None:
    x = torch.linspace(0.5, 1.5, 40).reshape(10, 4)
    right = torch.cat([x[:3], x]).mean(0)
    first, second = on_ranks(2, short, torch.float32)
    assert torch.equal(first, second)
    assert error(first.double(), right) < 1e-6
    first, second = on_ranks(2, short, torch.bfloat16)
    assert torch.equal(first, second)
    assert error(first.double(), right) < 2**-8


class WithDropout(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.dropout(torch.tanh(self.encoder(x)), 0.5)
        return self.labels(hidden), self.side(hidden)


def drawn(rank: int) -> tuple[Tensor, Tensor]:
    """The same random numbers for each rank's whole batch, cut and not."""
    found = []
    for rows in (None, 2):
        torch.manual_seed(0)
        model = DistributedDataParallel(WithDropout())
        torch.manual_seed(10 + rank)
        driver = driver_of(model, cutter=BatchCutter(rows=rows, weight=TOKENS), randomness="whole")
        for step in range(3):
            driver.step(batches_of(step, 2)[rank])
        found.append(flat(model.parameters()))
    return found[0], found[1]


def test_whole_randomness_on_each_rank() -> None:
    for unsplit, cut in on_ranks(2, drawn):
        assert error(cut, unsplit) < 1e-12


def by_hand(rank: int) -> tuple[Tensor, Tensor]:
    """The recipe for gradients that are reduced by the user: sums over ranks, then averages."""
    found = []
    batch = batches_of(1, 2)[rank]
    for average in (False, True):
        model = net()
        tokens = TOKENS(batch).double()
        dist.all_reduce(tokens)
        whole = tokens / 2 if average else tokens
        run_step(BatchCutter(rows=2, weight=TOKENS).cut(batch, whole_weight=whole), token_loss(model), model=model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= 2 if average else 1
        found.append(gradients(model))
    return found[0], found[1]


def test_reductions_by_hand(float64: None) -> None:
    model = net()
    token_loss(model)(union(batches_of(1, 2))).backward()
    for found in on_ranks(2, by_hand):
        for one in found:
            assert error(one, gradients(model)) < 1e-12


def held_outside(rank: int, kind: str) -> Tensor:
    """Two batches accumulated by the user, each a step of its own: the outer context stays in force."""
    model = wrapped(kind)
    first, second = [rows_of(10 * step + rank, 4) for step in range(2)]
    run = lambda batch: run_step(BatchCutter(rows=2, weight=TOKENS).cut(batch), token_loss(model), model=model)  # noqa: E731
    if kind == "ddp":
        with model.no_sync():  # type: ignore[operator]
            run(first)
        assert model.require_backward_grad_sync
    else:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        run(first)
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
    run(second)
    return gradients(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_users_own_hold_stays(kind: str, float64: None) -> None:
    model = net()
    for step in range(2):
        token_loss(model)(union([rows_of(10 * step + rank, 4) for rank in range(2)])).backward()
    for found in on_ranks(2, held_outside, kind):
        assert error(found, gradients(model)) < 1e-12


class Towers(nn.Module):
    """Two replicated modules in one model that is not itself replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = DistributedDataParallel(nn.Linear(3, 4)), DistributedDataParallel(nn.Linear(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x)


def towers(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = Towers()
    x = torch.randn(6, 3)
    own = x[:4] if rank == 0 else x[4:]
    run_step(BatchCutter(rows=1).cut(own), lambda x: model(x).mean(), model=model)
    found = gradients(model)
    grads = torch.autograd.grad((model.one.module(x) * model.two.module(x)).mean(), list(model.parameters()))
    return found, flat(grads)


def test_several_replicated_modules_in_one_model() -> None:
    for found, right in on_ranks(2, towers):
        assert error(found, right) < 1e-12


def many_terms(rank: int) -> tuple[float, list[float]]:
    """More terms than a message has room for."""
    model = DistributedDataParallel(Scale())
    names = [f"t{i}" for i in range(100)]
    weight = dict.fromkeys(names, row_weight)
    batch = torch.full((2 + rank,), float(rank))
    driver = driver_of(
        model,
        lambda x: {name: (i + model(x)).mean() for i, name in enumerate(names)},
        BatchCutter(rows=1, weight=weight),
    )
    report = driver.step(batch)
    return report.loss.item(), [value.item() for value in report.terms.values()]


def test_more_terms_than_a_message_holds() -> None:
    for loss, terms in on_ranks(2, many_terms):
        assert terms == pytest.approx([i + 0.6 for i in range(100)], rel=1e-12)
        assert loss == pytest.approx(sum(terms), rel=1e-12)


def differing(rank: int) -> str:
    model = DistributedDataParallel(net())
    cutter = BatchCutter(rows=2, weight=TOKENS)
    batch = rows_of(rank, 4)
    return said_by(
        lambda: run_step(cutter.cut(batch, whole_weight=5 if rank else None), token_loss(model), model=model)
    ).text


def test_ranks_that_count_different_things() -> None:
    for text in on_ranks(2, differing):
        assert text.startswith("CutError: ranks have weights for different terms")


def sharded_each(rank: int) -> Tensor:
    """Three sub-batches and one, all of which reduce."""
    model = wrapped("fsdp")
    batch = batches_of(0, 2)[rank]
    run_step(BatchCutter(rows=2, weight=TOKENS).cut(batch), token_loss(model), model=model, sync=False)
    return gradients(model)


def test_every_sub_batch_of_a_sharded_model_may_reduce(float64: None) -> None:
    model = net()
    token_loss(model)(union(batches_of(0, 2))).backward()
    for found in on_ranks(2, sharded_each):
        assert error(found, gradients(model)) < 1e-12


def failing_together(rank: int) -> tuple[str, Tensor]:
    """An error in the second sub-batch of all ranks, with gradients of the first one held back."""
    model = wrapped("fsdp")
    batch = rows_of(rank, 6)
    loss_fn = Trap(token_loss(model), lambda: KeyError("a bug"), [1])
    said = said_by(lambda: driver_of(model, loss_fn).step(batch))
    run_step(BatchCutter(rows=2, weight=TOKENS).cut(batch), token_loss(model), model=model)
    return said.kinds[0], gradients(model)


def test_gradients_held_back_by_a_sharded_model_are_forgotten_after_an_error(float64: None) -> None:
    model = net()
    token_loss(model)(union([rows_of(rank, 6) for rank in range(2)])).backward()
    for kind, found in on_ranks(2, failing_together):
        assert kind == "KeyError"
        assert error(found, gradients(model)) < 1e-12


# The example of the documentation.

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "ranks.py"


def test_the_example_gives_the_losses_of_one_process() -> None:
    right = runpy.run_path(str(EXAMPLE))["train"]("one process", 0, 1, "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[2])}
    started = [
        subprocess.Popen([*command, kind], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for kind in ("ddp", "fsdp2")
    ]
    for process in started:
        try:
            said, complaints = process.communicate(timeout=2 * PATIENCE)
        finally:
            process.kill()
        assert process.returncode == 0, complaints
        losses = [float(line.rsplit(" ", 1)[1]) for line in said.splitlines() if line.startswith("step")]
        assert losses == pytest.approx(right, abs=2e-12)
