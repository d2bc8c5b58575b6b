from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchsplit import BatchCutter, CutError, label_weight, mask_weight, row_weight, run_step

pytestmark = pytest.mark.usefixtures("float64")


def batch(rows: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3), "y": torch.randn(rows, 1)}


def squares(model: nn.Module) -> Any:
    return lambda data: ((model(data["x"]) - data["y"]) ** 2).mean()


def test_the_loss_is_the_whole_batchs_and_detached() -> None:
    model, data = nn.Linear(3, 1), batch()
    whole = squares(model)(data).detach()
    loss = run_step(BatchCutter(rows=4).cut(data), squares(model), model=model)
    assert loss.dim() == 0 and not loss.requires_grad and loss.dtype == torch.float64
    assert float(loss) == pytest.approx(float(whole), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_reported_in_float32_at_least(dtype: torch.dtype) -> None:
    x = torch.rand(1000, dtype=dtype).requires_grad_()
    loss = run_step(BatchCutter(rows=1).cut({"x": x}), lambda data: data["x"].mean())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(x.detach().double().mean()), rel=1e-6)


def test_b41_losses_are_weighed_by_tokens() -> None:
    losses = {100: 2.0, 900: 0.5}
    scale = nn.Parameter(torch.ones(()))
    labels = torch.full((2, 900), -100)
    labels[0, :100] = labels[1] = 1
    cutter = BatchCutter(rows=1, weight=label_weight("labels"))
    loss = run_step(cutter.cut({"labels": labels}), lambda data: scale * losses[int((data["labels"] == 1).sum())])
    assert float(loss) == pytest.approx(0.65, rel=1e-15) and float(scale.grad) == pytest.approx(0.65, rel=1e-15)  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", [[0], [2], [3], [0, 1], [1, 3], [0, 1, 3]])
def test_b33_sub_batches_of_weight_0_harm_nothing(empty: list[int]) -> None:
    """A masked mean by hand: its loss and its gradient are NaN where the mask is empty, and so they are times 0."""
    model, data = nn.Linear(3, 1), batch(8)
    mask = torch.rand(8, 1)
    for part in empty:
        mask[2 * part : 2 * part + 2] = 0

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        return (model(data["x"]) ** 2 * data["mask"]).sum() / data["mask"].sum()

    whole = loss_fn(data | {"mask": mask})
    whole.backward()
    right = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    cut = BatchCutter(rows=2, weight=mask_weight("mask")).cut(data | {"mask": mask})
    assert [i for i, sub in enumerate(cut) if sub.share == 0] == empty
    assert torch.isnan(loss_fn(cut[empty[0]].data))
    loss = run_step(cut, loss_fn, model=model)
    torch.testing.assert_close(model.weight.grad, right, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)

    model.zero_grad()  # what multiplying by a share of 0 would do
    for sub in cut:
        (loss_fn(sub.data) * sub.share).backward()
    assert torch.isnan(model.weight.grad).all()  # type: ignore[arg-type]


def test_b33_a_whole_batch_of_weight_0() -> None:
    model, data = nn.Linear(3, 1), batch()
    cut = BatchCutter(rows=2, weight=mask_weight("mask")).cut(data | {"mask": torch.zeros(6, 1)})
    with pytest.raises(CutError, match="of the whole batch is 0"):
        run_step(cut, squares(model), model=model)
    assert model.weight.grad is None


def test_gradients_add_to_those_there_were() -> None:
    model, data = nn.Linear(3, 1), batch()
    before = torch.randn(1, 3)
    model.weight.grad = before.clone()
    run_step(BatchCutter(rows=4).cut(data), squares(model), model=model)
    found = model.weight.grad.clone()
    model.zero_grad()
    squares(model)(data).backward()
    torch.testing.assert_close(found, before + model.weight.grad, rtol=1e-12, atol=0)  # type: ignore[operator]


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_after_an_error_gradients_are_as_before(error: type[BaseException], with_gradients: bool) -> None:
    model, data, calls = nn.Linear(3, 1), batch(), []
    before = torch.randn(1, 3) if with_gradients else None
    model.weight.grad = None if before is None else before.clone()

    def loss_fn(data: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise error("no more")
        return squares(model)(data)

    with pytest.raises(error) as caught:
        run_step(BatchCutter(rows=2).cut(data), loss_fn, model=model)
    if error is Stop:
        assert caught.value.__notes__ == ["This came up in SubBatch(3 of 3, 2 rows, 4:6); nothing was stepped."]
    assert (model.weight.grad is None) if before is None else torch.equal(model.weight.grad, before)  # type: ignore[arg-type]
    assert model.bias.grad is None


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda data: (data["x"] * 2).mean(0), r"loss of sub-batch 0 has shape \(3,\): reduce it, with .mean\(\)"),
        (lambda data: data["x"].mean().detach(), "loss of sub-batch 0 has no gradient: was it detached"),
        (lambda data: 3.0, "loss of sub-batch 0 is a float: loss_fn has to return a scalar tensor"),
        (lambda data: None, "loss of sub-batch 0 is a NoneType"),
        (lambda data: {"ce": data["x"].mean(), "kl": data["x"]}, 'the term "kl" of sub-batch 0 has shape'),
        (lambda data: data["x"].mean() / 0, r"the loss is -?inf in SubBatch\(1 of 3"),
        (lambda data: data["x"].mean() * float("nan"), r"the loss is nan in SubBatch\(1 of 3, 2 rows, 0:2\); nothing was stepped"),
        (lambda data: {"a": data["x"].mean(), "b": data["x"].mean() / 0}, r'the term "b" is -?inf in SubBatch\(1 of 3'),
    ],
)
def test_losses_in_doubt(loss_fn: Any, says: str) -> None:
    x = nn.Parameter(torch.randn(6, 3))
    model = nn.ParameterList([x])
    with pytest.raises(CutError, match=says):
        run_step(BatchCutter(rows=2).cut({"x": x}), loss_fn, model=model)
    assert x.grad is None


def test_a_loss_that_is_not_finite_names_its_own_sub_batch() -> None:
    x = torch.ones(6)
    x[4] = torch.inf
    weight = nn.Parameter(torch.ones(()))
    with pytest.raises(CutError, match=r"inf in SubBatch\(3 of 3, 2 rows, 4:6\)"):
        run_step(BatchCutter(rows=2).cut(x), lambda x: (x * weight).mean())


def test_wrong_arguments() -> None:
    with pytest.raises(CutError, match=r"wants a Cut, not a dict: write run_step\(cutter.cut\(batch\), loss_fn\)"):
        run_step(batch(), squares(nn.Linear(3, 1)))  # type: ignore[arg-type]
    with pytest.raises(CutError, match="randomness='same'"):
        run_step(BatchCutter(rows=2).cut(batch()), squares(nn.Linear(3, 1)), randomness="same")
    with pytest.raises(CutError, match="sync='no': write None, False"):
        run_step(BatchCutter(rows=2).cut(batch()), squares(nn.Linear(3, 1)), model=nn.Linear(3, 1), sync="no")


def test_named_terms_under_one_weight() -> None:
    model, data = nn.Linear(3, 1), batch()

    def loss_fn(data: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"squares": squares(model)(data), "abs": (model(data["x"]) - data["y"]).abs().mean()}

    whole = loss_fn(data)
    sum(whole.values(), torch.zeros(())).backward()
    right = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    loss = run_step(BatchCutter(rows=4).cut(data), loss_fn, model=model)
    torch.testing.assert_close(model.weight.grad, right, rtol=1e-12, atol=0)
    assert float(loss) == pytest.approx(float(sum(whole.values(), torch.zeros(())).detach()), rel=1e-13)


def test_terms_and_weights_must_match() -> None:
    model, data = nn.Linear(3, 1), batch()
    cut = BatchCutter(rows=2, weight={"a": row_weight, "b": None}).cut(data)
    a = squares(model)
    with pytest.raises(CutError, match='the loss term "c" has no weight: add it to weight='):
        run_step(cut, lambda data: {"a": a(data), "b": a(data), "c": a(data)}, model=model)
    with pytest.raises(CutError, match='weight names a term "b" that loss_fn did not return'):
        run_step(cut, lambda data: {"a": a(data)}, model=model)
    with pytest.raises(CutError, match=r"weight names the terms \['a', 'b'\], but loss_fn returned one loss"):
        run_step(cut, a, model=model)
    assert model.weight.grad is None


def test_backward_of_your_own() -> None:
    model, data, sent = nn.Linear(3, 1), batch(), []

    def backward(loss: Tensor) -> None:
        sent.append(loss.item())
        (loss * 2).backward()

    loss = run_step(BatchCutter(rows=2).cut(data), squares(model), model=model, backward=backward)
    found = model.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    squares(model)(data).backward()
    torch.testing.assert_close(found, 2 * model.weight.grad, rtol=1e-12, atol=0)  # type: ignore[operator]
    assert sum(sent) == pytest.approx(float(loss), rel=1e-14)


def test_b41_memory_does_not_grow_with_the_sub_batches() -> None:
    """Live bytes saved for backward: those of one sub-batch, however many there are."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def peak(parts: int) -> int:
        live = peak = 0

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal live, peak
                self.tensor = tensor
                live += tensor.nbytes
                peak = max(peak, live)

            def __del__(self) -> None:
                nonlocal live
                live -= self.tensor.nbytes

        x = torch.randn(4 * parts, 8)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            run_step(BatchCutter(rows=4).cut(x), lambda x: model(x).mean(), model=model)
        return peak

    assert peak(1) == peak(8) == peak(64)


def test_loss_fn_may_take_labels_out_of_its_dict() -> None:
    model, data = nn.Linear(3, 1), batch()
    cut = BatchCutter(rows=2).cut(data)
    losses = [run_step(cut, lambda data: ((model(data["x"]) - data.pop("y")) ** 2).mean()) for _ in range(2)]
    assert losses[0] == losses[1] and "y" in data
