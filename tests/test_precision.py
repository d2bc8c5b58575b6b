"""16-bit parameters: sub-batches add up in float32, and nothing is left behind (B38)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from batchsplit import BatchCutter, CutError, StepDriver, precision, row_weight, run_step
from batchsplit.precision import Sums, SumsByDtype, SumsByHook, summed

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=["by dtype", "by hook"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of adding up in float32; the second is forced, as torch would before 2.10."""
    monkeypatch.setattr(precision, "HAS_GRAD_DTYPE", request.param == "by dtype")
    return request.param


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[None]:
    """A process group of one, for the hooks of DistributedDataParallel."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scale(nn.Module):
    """One weight, whose gradient is what goes in."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def b38() -> Tensor:
    """Gradients 1, then 256 × 2⁻⁹: 1.5, or 1.0 where they are added up in bfloat16."""
    return torch.tensor([1.0] + [2.0**-9] * 256, dtype=BF16)


ONE_BY_ONE = BatchCutter(rows=1, weight=None)


def driver_of(model: nn.Module, loss_fn: Any, cutter: BatchCutter, **options: Any) -> StepDriver:
    trained = [p for p in model.parameters() if p.requires_grad]
    return StepDriver(model, torch.optim.SGD(trained, lr=0.1), loss_fn, cutter, progress=False, **options)


def grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def only(one: Any) -> float:
    """The gradient of a `Scale`."""
    return one.w.grad.item()


@pytest.fixture(autouse=True)
def tensors_of_others() -> Iterator[None]:
    """What other tests have left in memory is not this one's: frozen objects are not listed."""
    gc.freeze()
    yield
    gc.unfreeze()


def nothing_left(model: nn.Module) -> bool:
    """No hook, no dtype of gradients other than before, no float32 copy."""
    parameters = list(model.parameters())
    shapes = {p.shape for p in parameters if p.dtype in (BF16, FP16)}
    gc.collect()
    copies = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.float32 and t.shape in shapes]
    hooks = [h for p in parameters for h in (p._post_accumulate_grad_hooks, p._backward_hooks) if h]
    dtypes = {p.grad_dtype for p in parameters if p.grad_dtype != p.dtype}
    return not copies and not hooks and not dtypes


def test_b38_small_gradients_of_many_sub_batches_count(way: str) -> None:
    model = Scale()
    run_step(ONE_BY_ONE.cut(b38()), model, model=model)
    assert model.w.grad is not None and model.w.grad.dtype == BF16
    assert model.w.grad.item() == 1.5
    assert nothing_left(model)


def test_b38_in_the_driver_and_without(way: str) -> None:
    for accumulate, expected in (("float32", 1.5), ("parameter", 1.0)):
        model = Scale()
        driver_of(model, model, ONE_BY_ONE, accumulate=accumulate).step(b38())
        assert grads(model).item() == expected
    assert grads(model).item() == 1.0  # what torch does by itself


def test_b38_in_float16(way: str) -> None:
    model = Scale(FP16)
    x = torch.tensor([1.0] + [2.0**-12] * 1024, dtype=FP16)
    run_step(ONE_BY_ONE.cut(x), model, model=model)
    assert grads(model).item() == 1.25


def test_b38_tied_weights(way: str) -> None:
    model = nn.ModuleList([Scale(), Scale()])
    model[1].w = model[0].w
    run_step(ONE_BY_ONE.cut(b38()), lambda x: model[0](x) + model[1](x), model=model)
    assert grads(model).item() == 3.0
    assert nothing_left(model)


def test_frozen_and_unused_parameters(way: str) -> None:
    model = nn.ModuleDict({"all": Scale(), "some": Scale(), "never": Scale(), "frozen": Scale()})
    frozen = model["frozen"].requires_grad_(False)
    seen: list[int] = []

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        some = model["some"](x) if len(seen) <= 257 and len(seen) != 1 else 0.0
        return model["all"](x) + some + frozen(x)

    run_step(ONE_BY_ONE.cut(b38()), loss_fn, model=model)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found["never.w"] is None and found["frozen.w"] is None
    assert only(model["all"]) == 1.5 and only(model["some"]) == 0.5  # all but the first
    assert nothing_left(model)


def test_gradients_from_before_are_added_to_in_place(way: str) -> None:
    model = Scale()
    model.w.grad = before = torch.tensor([2.0], dtype=BF16)
    run_step(ONE_BY_ONE.cut(b38()), model, model=model)
    assert model.w.grad is before  # it may be a view of a bucket
    assert before.item() == 3.5
    assert nothing_left(model)


def test_an_error_in_the_middle_leaves_nothing_behind(way: str) -> None:
    model = Scale()
    model.w.grad = torch.tensor([2.0], dtype=BF16)
    calls = 0

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt
        return model(x)

    with pytest.raises(KeyboardInterrupt):
        run_step(ONE_BY_ONE.cut(b38()), loss_fn, model=model)
    assert model.w.grad.item() == 2.0
    assert nothing_left(model)

    driver = driver_of(model, loss_fn, ONE_BY_ONE)
    calls = 50
    with pytest.raises(KeyboardInterrupt):
        driver.step(b38())
    assert model.w.grad is None and model.w.item() == 1.0
    assert nothing_left(model)
    driver.step(b38())
    assert grads(model).item() == 1.5


def test_a_loss_that_is_not_finite_leaves_nothing_behind(way: str) -> None:
    model = Scale()
    driver = driver_of(model, model, ONE_BY_ONE)
    with pytest.raises(CutError, match="the loss is nan"):
        driver.step(torch.tensor([1.0, torch.nan, 1.0], dtype=BF16))
    assert model.w.grad is None and nothing_left(model)


@pytest.mark.parametrize("old", [None, "sparse", "dense"])
def test_sparse_gradients(way: str, old: str | None) -> None:
    table = nn.Embedding(4, 1, sparse=True, dtype=BF16)
    if old:
        grad = torch.zeros(4, 1, dtype=BF16)
        grad[3] = 4
        table.weight.grad = grad.to_sparse(1) if old == "sparse" else grad
    batch = (torch.tensor([2] + [1] * 257), torch.cat([b38()[:1], b38()]))
    run_step(ONE_BY_ONE.cut(batch), lambda data: (table(data[0])[:, 0] * data[1]).sum(), model=table)
    found = table.weight.grad
    assert found is not None and found.dtype == BF16 and found.is_sparse == (old != "dense")
    dense = found.to_dense() if found.is_sparse else found
    assert dense.flatten().tolist() == [0.0, 1.5, 1.0, 4.0 if old else 0.0]
    assert nothing_left(table)


def test_mixed_dtypes(way: str) -> None:
    model = nn.ModuleList([Scale(BF16), Scale(torch.float32), Scale(torch.float64)])
    run_step(ONE_BY_ONE.cut(b38()), lambda x: model[0](x).double() + model[1](x) + model[2](x), model=model)
    assert [(p.grad.item(), p.grad.dtype) for p in model.parameters() if p.grad is not None] == [
        (1.5, BF16),
        (1.5, torch.float32),
        (1.5, torch.float64),
    ]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch before 2.10")
def test_gradients_that_were_float32_stay_so_for_the_optimizer() -> None:
    model = Scale()
    model.w.grad_dtype = torch.float32
    x = torch.tensor([1.0] + [2.0**-14] * 64, dtype=BF16)
    driver_of(model, model, ONE_BY_ONE).step(x)
    assert model.w.grad is not None and model.w.grad.dtype == torch.float32
    assert model.w.grad.item() == 1 + 2**-8 and model.w.grad_dtype == torch.float32


def test_one_sub_batch_is_the_unsplit_batch(way: str) -> None:
    model, unsplit = (mlp(BF16) for _ in range(2))
    x, y = batch_of(16, BF16)
    driver_of(model, squares(model), BatchCutter(), clip_norm=0.01).step((x, y))
    squares(unsplit)((x, y)).backward()
    nn.utils.clip_grad_norm_(unsplit.parameters(), 0.01)
    assert torch.equal(grads(model), grads(unsplit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_models_are_bitwise_the_same_with_and_without(dtype: torch.dtype) -> None:
    models = [mlp(dtype) for _ in range(3)]
    batch = batch_of(10, dtype)
    for model, accumulate in zip(models[:2], ("float32", "parameter")):
        driver_of(model, squares(model), BatchCutter(rows=3), accumulate=accumulate).step(batch)
    run_step(BatchCutter(rows=3).cut(batch), squares(models[2]), model=models[2])
    assert torch.equal(grads(models[0]), grads(models[1])) and torch.equal(grads(models[0]), grads(models[2]))


def test_wider_models_cost_nothing() -> None:
    model = mlp(torch.float32)
    with summed(list(model.parameters())) as sums:
        assert type(sums) is Sums
        assert all(p.grad_dtype == torch.float32 and not p._post_accumulate_grad_hooks for p in model.parameters())
        squares(model)(batch_of(4, torch.float32)).backward()
        before = [p.grad for p in model.parameters()]
        sums.weigh(1.0)
        sums.settle()
    assert all(p.grad is grad and grad._version == 0 for p, grad in zip(model.parameters(), before) if grad is not None)


def test_which_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = list(mlp(BF16).parameters())
    with summed(parameters) as sums:
        assert type(sums) is SumsByDtype
    monkeypatch.setattr(precision, "HAS_GRAD_DTYPE", False)
    with summed(parameters) as sums:
        assert type(sums) is SumsByHook
    with summed(parameters, accumulate="parameter") as sums:
        assert sums is None
    with summed(parameters, whole=True) as sums:
        assert sums is None


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(CutError, match=r'accumulate=.bf16.: write accumulate="float32", or "parameter"'):
        driver_of(Scale(), None, ONE_BY_ONE, accumulate="bf16")


def test_sharded_models_are_left_to_their_framework() -> None:
    class Sharded(Scale):
        def set_requires_gradient_sync(self, on: bool) -> None:
            self.reduces = on

    model = Sharded()
    with pytest.warns(UserWarning, match="FSDP model's 16-bit parameters add up as FSDP has them"):
        driver_of(model, model, ONE_BY_ONE).step(b38())
    driver_of(model, model, ONE_BY_ONE, accumulate="parameter").step(b38())  # no warning


# Clipping and scaling


def test_clipping_sees_the_float32_sums() -> None:
    model = Scale()
    report = driver_of(model, model, ONE_BY_ONE, clip_norm=1.0).step(torch.cat([b38(), b38()[1:2]]))
    assert report.grad_norm is not None and report.grad_norm.dtype == torch.float32
    assert report.grad_norm.item() == pytest.approx(1.5 + 2**-9, rel=1e-6)  # bfloat16 would have 1.5
    assert grads(model).item() == 1.0 and model.w.grad is not None and model.w.grad.dtype == BF16
    assert nothing_left(model)


def test_clipping_by_hook_sees_the_rounded_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "HAS_GRAD_DTYPE", False)
    model = Scale()
    report = driver_of(model, model, ONE_BY_ONE, clip_norm=1.0).step(b38())
    assert report.grad_norm is not None and report.grad_norm.item() == 1.5 and grads(model).item() == 1.0


def test_a_scaler_takes_float16_parameters() -> None:
    """By itself it refuses float16 gradients; the float32 sums it unscales before they are rounded."""
    x = torch.tensor([1.0] + [2.0**-12] * 1024, dtype=FP16)
    for cutter in (ONE_BY_ONE, BatchCutter(weight=None)):
        model = Scale(FP16)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        report = driver_of(model, model, cutter, scaler=scaler).step(x)
        assert not report.skipped and grads(model).item() == 1.25
        assert model.w.item() == pytest.approx(1 - 0.1 * 1.25, abs=2**-11)
        assert nothing_left(model)


def test_an_overflow_is_skipped() -> None:
    model = Scale(FP16)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    report = driver_of(model, model, ONE_BY_ONE, scaler=scaler).step(torch.tensor([1.0, 60000.0, 1.0], dtype=FP16))
    assert report.skipped and model.w.item() == 1.0 and scaler.get_scale() == 32.0
    assert nothing_left(model)


def test_a_scaler_with_bfloat16(way: str) -> None:
    model = Scale()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    driver_of(model, model, ONE_BY_ONE, scaler=scaler, clip_norm=10.0).step(b38())
    assert grads(model).item() == 1.5 and nothing_left(model)


# Losses of 16 bits, which round their own share


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_loss_of_16_bits_keeps_its_share(way: str, dtype: torch.dtype) -> None:
    """A third in bfloat16 is 0.33398; three of them are 1.002."""

    def loss_fn(x: Tensor) -> Tensor:
        return model.w.bfloat16().sum() * x.new_ones(())

    cutter = BatchCutter(parts=3, weight=row_weight)
    model = Scale(dtype)
    model.w.grad = torch.ones_like(model.w)
    run_step(cutter.cut(torch.rand(9).bfloat16()), loss_fn, model=model)
    assert grads(model).item() == pytest.approx(2.0, rel=1e-6)

    model = Scale(torch.float32)
    run_step(cutter.cut(torch.rand(9).bfloat16()), loss_fn)  # no model, so nothing can be done
    assert grads(model).item() == pytest.approx(3 * 0.333984375, rel=1e-6)


def test_shares_of_unequal_sub_batches(way: str) -> None:
    model = Scale()
    x = torch.arange(10).bfloat16()
    run_step(BatchCutter(rows=3, sizes="full").cut(x), lambda x: model.w.sum() * x[:1].sum(), model=model)
    assert grads(model).item() == torch.tensor(0.3 * (0 + 3 + 6) + 0.1 * 9, dtype=BF16).item()


# No further from the truth than the unsplit batch


def mlp(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)


def batch_of(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16).to(BF16).to(dtype), torch.randn(rows, 4).to(BF16).to(dtype)


def squares(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda data: F.mse_loss(model(data[0]), data[1])


def wide_squares(model: nn.Module) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """As losses are computed beside a 16-bit model: a mean in 16 bits divides by its number of rows, rounded."""
    return lambda data: F.mse_loss(model(data[0]).float(), data[1].float())


def error(
    model: nn.Module, loss: Callable[..., Any], batch: tuple[Tensor, Tensor], cutter: BatchCutter, **options: Any
) -> float:
    """Of the gradient, against float64."""
    truth = copy.deepcopy(model).double()
    squares(truth)((batch[0].double(), batch[1].double())).backward()
    model = copy.deepcopy(model)
    driver_of(model, loss(model), cutter, **options).step(batch)
    return ((grads(model) - grads(truth)).norm() / grads(truth).norm()).item()


@pytest.mark.parametrize(
    ("loss", "rows"),
    [(squares, 1), (squares, 4), (squares, 16), (wide_squares, 1), (wide_squares, 5), (wide_squares, 24)],
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_the_error_is_no_larger_than_unsplit(dtype: torch.dtype, loss: Callable[..., Any], rows: int) -> None:
    def scaler() -> Any:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)} if dtype == FP16 else {}

    model, cutters = mlp(dtype), (BatchCutter(rows=rows), BatchCutter())
    ratios = []
    for _ in range(8):  # both errors are random: a single pair of them says little
        batch = batch_of(64, dtype)
        cut, unsplit = (error(model, loss, batch, cutter, **scaler()) for cutter in cutters)
        ratios.append(cut / unsplit)
    assert sum(ratios) / len(ratios) <= 1.25, ratios


def test_512_sub_batches_in_bfloat16(way: str) -> None:
    model, batch, cutter = mlp(BF16), batch_of(512, BF16), BatchCutter(rows=1)
    unsplit = error(model, squares, batch, BatchCutter())
    assert error(model, squares, batch, cutter) <= 1.25 * unsplit
    assert error(model, squares, batch, cutter, accumulate="parameter") > 5 * unsplit  # so the test can tell


# Together with others that have a hand in the gradients


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_a_sub_batch_that_runs_out_of_memory(way: str, broken: str) -> None:
    """The sums so far are kept, and those of a backward that broke off are not."""
    model, plain, batch = mlp(BF16), mlp(BF16), batch_of(12, BF16)
    first, act, second = model.children()
    calls = failures = 0

    def give_up(*_: Any) -> None:
        nonlocal failures
        if calls == 3 and not failures:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def loss_fn(data: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if broken == "forward":
            give_up()
        hidden = act(first(data[0]))
        if broken == "backward":
            hidden.register_hook(give_up)
        return F.mse_loss(second(hidden), data[1])

    report = driver_of(model, loss_fn, BatchCutter(rows=4), on_oom="split").step(batch)
    assert report.retries == failures == 1
    driver_of(plain, squares(plain), BatchCutter()).step(batch)
    assert (grads(model) - grads(plain)).norm() < 0.01 * grads(plain).norm()
    assert nothing_left(model)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_distributed_data_parallel(ranks: None, options: dict[str, Any]) -> None:
    model = nn.ModuleDict({"all": Scale(), "some": Scale()})
    skips = "find_unused_parameters" in options
    calls = 0

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return model["all"](x) if skips and calls % 257 == 0 else model["all"](x) + model["some"](x)

    parallel = nn.parallel.DistributedDataParallel(Both(), **options)
    driver = driver_of(parallel, parallel, ONE_BY_ONE)
    for _ in range(2):
        driver.step(b38())
        last = 2**-9 if skips else 0
        assert only(model["all"]) == 1.5
        assert only(model["some"]) == torch.tensor(1.5 - last, dtype=BF16).item()
        assert nothing_left(model)
    driver_of(parallel, parallel, ONE_BY_ONE, accumulate="parameter").step(b38())
    assert only(model["all"]) == 1.0


def test_distributed_data_parallel_with_a_loss_of_16_bits(ranks: None) -> None:
    model = nn.ModuleList([Scale(), Scale(torch.float32)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            first, second = model.parameters()
            return first.sum() + second.bfloat16().sum() + 0 * x.sum()

    parallel = nn.parallel.DistributedDataParallel(Both())
    run_step(BatchCutter(parts=3).cut(torch.rand(10).bfloat16()), parallel, model=parallel)
    assert [p.grad.item() for p in model.parameters() if p.grad is not None] == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later warn of forking beside threads
def test_two_ranks(tmp_path: Path) -> None:
    """Each rank's sum is rounded once, then reduced in bfloat16, as an unsplit batch's gradient is."""
    start_processes(_rank, args=(str(tmp_path / "store"),), nprocs=2, start_method="fork")
    assert (tmp_path / "store0").read_text() == (tmp_path / "store1").read_text() == "2.25"


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Scale())
    driver_of(model, model, ONE_BY_ONE).step(b38() * (rank + 1))
    Path(f"{store}{rank}").write_text(str(grads(model).item()))
    dist.destroy_process_group()
