from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from batchsplit import BatchCutter, CutError, StepDriver, group, mask_weight, run_step

pytestmark = pytest.mark.usefixtures("float64")


def batch(rows: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3), "y": torch.randn(rows, 1)}


def squares(model: nn.Module) -> Any:
    return lambda data: ((model(data["x"]) - data["y"]) ** 2).mean()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def state_of(*things: Any) -> Any:
    return copy.deepcopy([thing.state_dict() for thing in things])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_any_optimizer(make: Any) -> None:
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = copy.deepcopy(whole)
    optimizer = make(whole.parameters())
    driver = StepDriver(model, make(model.parameters()), squares(model), BatchCutter(rows=4))
    for data in [batch(), batch(7)]:

        def closure(data: Any = data) -> Tensor:
            optimizer.zero_grad()
            loss = squares(whole)(data)
            loss.backward()
            return loss

        first = squares(whole)(data).detach()
        optimizer.step(closure)
        assert float(driver.step(data).loss) == pytest.approx(float(first), rel=1e-11)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        # a line search works with differences of losses, so rounding comes out larger there
        torch.testing.assert_close(p, q, rtol=1e-12 if not isinstance(optimizer, torch.optim.LBFGS) else 1e-8, atol=1e-14)


def test_report() -> None:
    model = nn.Linear(3, 1)
    driver = StepDriver(model, sgd(model), squares(model), BatchCutter(rows=4))
    report = driver.step(batch(10))
    assert (report.rows, report.sub_batches, report.retries, report.skipped) == (10, 3, 0, False)
    assert report.outputs is None and report.grad_norm is None and report.terms == {} and report.seconds > 0
    assert not report.loss.requires_grad and repr(report).startswith("StepReport(loss=")


def test_terms_and_outputs_are_joined() -> None:
    model, data = nn.Linear(3, 1), batch(7)

    def loss_fn(data: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        predicted = model(data["x"])
        terms = {"squares": ((predicted - data["y"]) ** 2).mean(), "penalty": model.weight.square().sum()}
        return terms, {"predicted": predicted, "rows": [str(len(predicted))] * len(predicted), "kind": "linear"}

    whole_terms, whole_outputs = loss_fn(data)
    report = StepDriver(model, sgd(model), loss_fn, BatchCutter(rows=3, weight={"squares": lambda d: len(d["x"]), "penalty": "once"})).step(data)
    for name, term in whole_terms.items():
        torch.testing.assert_close(report.terms[name], term.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(report.outputs["predicted"], whole_outputs["predicted"].detach(), rtol=1e-13, atol=0)
    assert not report.outputs["predicted"].requires_grad
    assert report.outputs["rows"] == ["3", "3", "3", "2", "2", "2", "2"][:3] + ["2"] * 4 and report.outputs["kind"] == "linear"


def test_b36_a_scheduler_counts_optimizer_steps() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    driver = StepDriver(model, optimizer, lambda data: squares(model)(data) * 1e-6, BatchCutter(parts=4), scheduler=scheduler)
    for _ in range(2):
        assert driver.step(batch(8)).sub_batches == 4
    assert optimizer.param_groups[0]["lr"] == 0.5 and scheduler.last_epoch == 2


def test_b36_a_scheduler_that_wants_a_metric() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    with pytest.raises(CutError, match=r"ReduceLROnPlateau wants a metric.*call scheduler.step\(metric\) yourself"):
        StepDriver(model, optimizer, squares(model), BatchCutter(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize("skip", [True, False])
def test_b36_b37_scaler_scheduler_and_clipping(skip: bool) -> None:
    """An overflow in the middle sub-batch: the step is skipped once, the scale halved once, the schedule stays."""
    model, data = nn.Linear(3, 1).float(), {k: v.float() for k, v in batch().items()}
    reference = copy.deepcopy(model)
    if skip:
        data["y"][2] = 3e38
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    unscaled: list[int] = []
    unscale = scaler.unscale_
    scaler.unscale_ = lambda optimizer: unscaled.append(1) or unscale(optimizer)  # type: ignore[method-assign]
    driver = StepDriver(model, optimizer, squares(model), BatchCutter(rows=2), scheduler=scheduler, scaler=scaler, clip_norm=0.5)
    report = driver.step(data)
    assert report.skipped == skip and unscaled == [1]
    assert scaler.get_scale() == (512 if skip else 1024) and scheduler.last_epoch == (0 if skip else 1)
    if skip:
        assert same(model.state_dict(), reference.state_dict()) and not torch.isfinite(report.loss)
        return
    plain = StepDriver(reference, sgd(reference), squares(reference), BatchCutter(), clip_norm=0.5)
    torch.testing.assert_close(report.grad_norm, plain.step(data).grad_norm)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_b37_clipping_is_of_the_whole_gradient() -> None:
    weight = nn.Parameter(torch.zeros(2))
    model = nn.ParameterList([weight])
    driver = StepDriver(model, sgd(model, lr=1.0), lambda g: (g * weight).sum(), BatchCutter(rows=1, weight=None), clip_norm=1.0)
    report = driver.step(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    assert report.grad_norm is not None and float(report.grad_norm) == pytest.approx(8**0.5)
    torch.testing.assert_close(-weight.detach(), torch.tensor([0.5**0.5, 0.5**0.5]), rtol=1e-6, atol=0)  # torch adds 1e-6


def test_gradients_of_before_are_cleared_and_those_of_the_step_stay() -> None:
    model, data = nn.Linear(3, 1), batch()
    reference = copy.deepcopy(model)
    model.weight.grad = torch.randn(1, 3)
    StepDriver(model, sgd(model), squares(model), BatchCutter(rows=4)).step(data)
    squares(reference)(data).backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=1e-12, atol=0)
    driver = StepDriver(model, sgd(model), squares(model), BatchCutter(rows=4))
    driver.step(data)
    second = model.weight.grad.clone()  # type: ignore[union-attr]
    torch.testing.assert_close(second, second)
    assert not torch.equal(second, reference.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["loss_fn", "nan", "weight", "cut"])
def test_after_an_error_nothing_has_changed(where: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    calls: list[int] = []
    broken = False

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        if broken and where == "loss_fn" and len(calls) % 3 == 2:
            raise CutError("no more")
        return squares(model)(data) * (float("nan") if broken and where == "nan" and len(calls) % 3 == 2 else 1)

    driver = StepDriver(model, optimizer, loss_fn, BatchCutter(rows=2, weight=mask_weight("mask")), scheduler=scheduler)
    good = batch() | {"mask": torch.ones(6, 1)}
    driver.step(good)
    before = state_of(model, optimizer, scheduler)
    broken = True
    bad = good | {"mask": torch.zeros(6, 1)} if where == "weight" else {k: v[:0] for k, v in good.items()} if where == "cut" else good
    with pytest.raises(CutError):
        driver.step(bad)
    assert same(before, state_of(model, optimizer, scheduler))
    if where in ("loss_fn", "nan"):
        assert all(p.grad is None for p in model.parameters())
    broken = False
    driver.step(good)  # and the driver goes on
    assert not same(before, state_of(model, optimizer, scheduler))


def test_a_closure_that_fails_puts_parameters_back() -> None:
    model, data, calls = nn.Linear(3, 1), batch(), []

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("no more")
        return squares(model)(data)

    before = state_of(model)
    driver = StepDriver(model, torch.optim.LBFGS(model.parameters()), loss_fn, BatchCutter(rows=3))
    with pytest.raises(RuntimeError, match="no more"):
        driver.step(data)
    assert same(before, state_of(model))


def test_autocast_is_around_the_forward_only() -> None:
    model, data = nn.Linear(3, 1).float(), {k: v.float() for k, v in batch().items()}
    seen: list[Any] = []

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        out = model(data["x"])
        seen.append(out.dtype)
        return ((out.float() - data["y"]) ** 2).mean()

    ways: list[Any] = [torch.bfloat16, True, torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
    reports = [StepDriver(model, sgd(model, 0.0), loss_fn, BatchCutter(rows=4), autocast=way).step(data) for way in ways]
    assert set(seen) == {torch.bfloat16} and len({float(r.loss) for r in reports}) == 1
    seen.clear()
    StepDriver(model, sgd(model, 0.0), loss_fn, BatchCutter(rows=4), autocast=False).step(data)
    assert set(seen) == {torch.float32}
    with pytest.raises(CutError, match=r"autocast=16: write a dtype like torch.bfloat16"):
        StepDriver(model, sgd(model), loss_fn, BatchCutter(), autocast=16)


def test_device_moves_one_sub_batch_at_a_time() -> None:
    model = nn.Linear(3, 1, device="meta")
    data, seen = batch(), []

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        seen.append((data["x"].device.type, len(data["x"])))
        return torch.ones((), requires_grad=True) * 1.0

    StepDriver(model, sgd(model), loss_fn, BatchCutter(rows=4), device="meta").step(data)
    assert seen == [("meta", 3), ("meta", 3)] and data["x"].device.type == "cpu"


def test_run_over_loaders_cuts_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
    loader = DataLoader(data, batch_size=8)
    cutter = BatchCutter(rows=3)
    model = nn.Linear(3, 1)
    loss_fn = lambda pair: ((model(pair[0]) - pair[1]) ** 2).mean()  # noqa: E731
    driver = StepDriver(model, sgd(model, 1e-9), loss_fn, cutter)
    ways = [loader, cutter.over(loader), [cutter.cut(b) for b in loader]]
    runs = [[(r.rows, r.sub_batches, round(float(r.loss), 6)) for r in driver.run(way)] for way in ways]
    assert runs[0] == runs[1] == runs[2] and [(rows, subs) for rows, subs, _ in runs[0]] == [(8, 3), (8, 3), (4, 2)]
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "sub_batches=2" in shown.err and "loss=" in shown.err and shown.out == ""
    grouped = list(driver.run(group(loader, batches=2)))
    assert [(r.rows, r.sub_batches) for r in grouped] == [(16, 6), (4, 2)]
    capsys.readouterr()
    list(StepDriver(model, sgd(model), loss_fn, cutter, progress=False).run(loader))
    assert capsys.readouterr().err == ""


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(14.0).view(7, 2))


def test_b43_a_loader_without_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    driver = StepDriver(model, sgd(model, 1e-9), lambda x: model(x).mean(), BatchCutter(rows=1))
    assert [r.rows for r in driver.run(DataLoader(Stream(), batch_size=2))] == [2, 2, 2, 1]
    assert "4step" in capsys.readouterr().err
    for _ in driver.run(DataLoader(Stream(), batch_size=2)):
        break  # and the bar is closed
    assert [r.rows for r in driver.run(DataLoader(Stream(), batch_size=2))] == [2, 2, 2, 1]


def test_a_driver_without_a_cutter() -> None:
    model = nn.Linear(3, 1)
    driver = StepDriver(model, sgd(model), squares(model))
    assert driver.step(BatchCutter(rows=4).cut(batch())).sub_batches == 2
    with pytest.raises(CutError, match="no cutter: give it one, or batches that are cut already"):
        driver.step(batch())


def test_b30_the_last_group_is_divided_by_what_it_holds() -> None:
    model = nn.Linear(3, 1)
    loader = [batch(5), batch(5), batch(5), batch(2)]
    cutter = BatchCutter(rows=3)
    for window, expected in ((4, [17]), (3, [15, 2]), (5, [17])):
        groups = list(group(loader, batches=window))
        assert len(groups) == len(group(loader, batches=window)) == len(expected)
        for i, one in enumerate(groups):
            cut = cutter.cut(one)
            assert cut.rows == expected[i]
            model.zero_grad()
            members = loader[i * window : (i + 1) * window]
            joined = {k: torch.cat([m[k] for m in members]) for k in ("x", "y")}
            whole = squares(model)(joined)
            whole.backward()
            right = model.weight.grad.clone()  # type: ignore[union-attr]
            model.zero_grad()
            loss = run_step(cut, squares(model), model=model)
            torch.testing.assert_close(model.weight.grad, right, rtol=1e-12, atol=0)
            torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)


def test_b30_an_epoch_leaves_nothing_for_the_next() -> None:
    loader = [batch(5), batch(5), batch(2)]
    model = nn.Linear(3, 1)
    driver = StepDriver(model, sgd(model), squares(model), BatchCutter(rows=2))
    list(driver.run(group(loader, batches=2)))
    fresh = copy.deepcopy(model)
    driver.step(loader[0])
    StepDriver(fresh, sgd(fresh), squares(fresh), BatchCutter(rows=2)).step(loader[0])
    assert same(model.state_dict(), fresh.state_dict())


def test_coupled_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    says = r"1 \(BatchNorm1d\) normalises over the rows of a sub-batch"
    driver = StepDriver(model, sgd(model), squares(model), BatchCutter(rows=3))
    with pytest.warns(UserWarning, match=says) as caught:
        driver.step(batch())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.step(batch())  # once
        StepDriver(model, sgd(model), squares(model), BatchCutter(rows=3), coupled="allow").step(batch())
        StepDriver(model, sgd(model), squares(model), BatchCutter(rows=6), coupled="raise").step(batch())  # not cut
    before = state_of(model)
    with pytest.raises(CutError, match=says):
        StepDriver(model, sgd(model), squares(model), BatchCutter(rows=3), coupled="raise").step(batch())
    assert same(before, state_of(model))
    StepDriver(model.eval(), sgd(model), squares(model), BatchCutter(rows=3), coupled="raise").step(batch())
    with pytest.raises(CutError, match="coupled='never'"):
        StepDriver(model, sgd(model), squares(model), BatchCutter(), coupled="never")


@pytest.mark.parametrize("clip", [0, -1, "1", float("nan")])
def test_wrong_clip_norm(clip: Any) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(CutError, match="clip_norm="):
        StepDriver(model, sgd(model), squares(model), BatchCutter(), clip_norm=clip)


def test_closures_and_scalers() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(CutError, match="LBFGS evaluates the loss several times a step"):
        StepDriver(model, torch.optim.LBFGS(model.parameters()), squares(model), BatchCutter(), scaler=torch.amp.GradScaler("cpu"))


def test_parameters_of_the_loss_are_trained_too() -> None:
    model, scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    driver = StepDriver(model, optimizer, lambda data: squares(model)(data) * scale, BatchCutter(rows=2))
    data = batch()
    with torch.no_grad():
        right = squares(model)(data)
    driver.step(data)
    torch.testing.assert_close(scale.grad, right, rtol=1e-12, atol=0)
    driver.step(data)
    assert float(scale.grad) < float(right)  # type: ignore[arg-type]
