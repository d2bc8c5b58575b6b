"""CutForward: any loss of the joined outputs is exact, at the memory of one sub-batch; and it is still the module."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy, margin_ranking_loss, normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from batchsplit import SHARED, BatchCutter, CutError, CutForward, StepDriver, axis, label_weight, packed, run_step
from batchsplit.randomness import RandomnessError

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 6
SIZES = (1, 2, 3, ROWS - 1, ROWS, ROWS + 1)


def encoder(width: int = 4, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, out))


def cut_by(size: int, module: nn.Module, **options: Any) -> CutForward:
    return CutForward(module, BatchCutter(rows=size), **options)


def gradients(loss: Tensor, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The loss, then what it sends to every parameter and input; all of it is cleared again."""
    loss.backward()
    tensors = [*module.parameters(), *inputs]
    found = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    return [loss.detach(), *found]


def error(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative difference of a tensor; what is zero by rights is held against the largest of all."""
    largest = max(float(r.norm()) for r in right)
    return max(float((f - r).norm() / max(float(r.norm()), 1e-3 * largest)) for f, r in zip(found, right, strict=True))


# Losses of all rows.


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    return cross_entropy(normalize(a) @ normalize(b).T / 0.1, torch.arange(len(a)))


def symmetric(a: Tensor, b: Tensor) -> Tensor:
    return (info_nce(a, b) + info_nce(b, a)) / 2


def supervised_contrastive(z: Tensor) -> Tensor:
    """https://arxiv.org/abs/2004.11362, equation 2, with three classes."""
    labels = torch.arange(len(z)) % 3
    itself = torch.eye(len(z), dtype=torch.bool)
    logits = (normalize(z) @ normalize(z).T / 0.1).masked_fill(itself, -torch.inf)
    positive = (labels[:, None] == labels) & ~itself
    log_p = (logits - logits.logsumexp(1, keepdim=True)).masked_fill(~positive, 0)
    return -(log_p.sum(1) / positive.sum(1)).mean()


def ranking(z: Tensor) -> Tensor:
    """Every pair of rows, whose right order is that of their numbers."""
    score, i = z[:, 0], torch.triu_indices(len(z), len(z), 1)
    return margin_ranking_loss(score[i[0]], score[i[1]], torch.ones(i.shape[1]), margin=0.3)


def correlation(z: Tensor) -> Tensor:
    x, y = z[:, 0] - z[:, 0].mean(), z[:, 1] - z[:, 1].mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm())


def concordance(z: Tensor) -> Tensor:
    """Lin's concordance correlation coefficient."""
    x, y = z[:, 0], z[:, 1]
    covariance = ((x - x.mean()) * (y - y.mean())).mean()
    return 1 - 2 * covariance / (x.var(correction=0) + y.var(correction=0) + (x.mean() - y.mean()) ** 2)


def quantile(z: Tensor) -> Tensor:
    return (z[:, 0] - torch.quantile(z[:, 0], 0.7)).square().mean() + torch.quantile(z[:, 1], 0.3)


ONE_TOWER = [supervised_contrastive, ranking, correlation, concordance, quantile]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", ONE_TOWER, ids=lambda f: f.__name__)
def test_losses_of_all_rows_are_exact(loss: Callable[[Tensor], Tensor], size: int) -> None:
    model, x = encoder(), torch.randn(ROWS, 4, requires_grad=True)
    right = gradients(loss(model(x)), model, x)
    assert error(gradients(loss(cut_by(size, model)(x)), model, x), right) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", [info_nce, symmetric], ids=lambda f: f.__name__)
def test_two_towers_are_exact(loss: Callable[[Tensor, Tensor], Tensor], size: int) -> None:
    towers = nn.ModuleList([encoder(4), encoder(7)])
    x, y = torch.randn(ROWS, 4, requires_grad=True), torch.randn(ROWS, 7, requires_grad=True)
    right = gradients(loss(towers[0](x), towers[1](y)), towers, x, y)
    first, second = cut_by(size, towers[0]), cut_by(max(size - 1, 1), towers[1])
    assert error(gradients(loss(first(x), second(y)), towers, x, y), right) < 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_one_encoder_called_twice_is_exact(size: int) -> None:
    model = nn.Sequential(encoder(), nn.Dropout(0.3))
    x, y = torch.randn(ROWS, 4, requires_grad=True), torch.randn(ROWS - 1, 4, requires_grad=True)

    def loss(f: nn.Module) -> Tensor:
        torch.manual_seed(3)
        a, b = f(x), f(y)  # another number of rows, and dropout in both
        return (a @ b.T).logsumexp((0, 1)) + a.std()

    right = gradients(loss(model), model, x, y)
    assert error(gradients(loss(cut_by(size, model, randomness="whole")), model, x, y), right) < 1e-12


def test_more_targets_than_rows_are_exact() -> None:
    """Queries by one size, their positives and hard negatives by another; some rows meet no loss at all."""
    model = encoder()
    queries, documents = torch.randn(5, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)

    def loss(f: nn.Module, g: nn.Module) -> Tensor:
        return cross_entropy(f(queries) @ g(documents)[:9].T, torch.arange(5))

    right = gradients(loss(model, model), model, queries, documents)
    found = gradients(loss(cut_by(2, model), cut_by(3, model)), model, queries, documents)
    assert error(found, right) < 1e-12
    assert torch.equal(found[-1][9:], torch.zeros(2, 4))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_b35_one_pass_is_another_gradient(rows: int) -> None:
    model, x, y = encoder(), torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    right = gradients(info_nce(model(x), model(y)), model)
    forward = cut_by(rows, model)
    assert error(gradients(info_nce(forward(x), forward(y)), model), right) < 1e-12

    loss = run_step(BatchCutter(rows=rows).cut((x, y)), lambda data: info_nce(model(data[0]), model(data[1])))
    one_pass = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert error(one_pass, right) > 0.1


def test_b35_numbers() -> None:
    """The loss of four rows, and what its parts see of it: fewer negatives, or none."""

    def loss(z: Tensor) -> Tensor:
        return cross_entropy(z @ z.T, torch.arange(len(z)))

    table = nn.Embedding.from_pretrained(torch.eye(4), freeze=False)
    rows = torch.arange(4)
    whole = gradients(loss(table(rows)), table)
    assert whole[0].item() == pytest.approx(0.74367, abs=5e-6)
    for size, seen in ((2, 0.31326), (1, 0.0)):
        assert error(gradients(loss(cut_by(size, table)(rows)), table), whole) < 1e-12
        parts = torch.stack([loss(table(part)) for part in rows.split(size)]).mean()
        assert parts.item() == pytest.approx(seen, abs=5e-6)
    assert all(not g.any() for g in gradients(parts, table))


# Memory.


class LiveBytes(TorchDispatchMode):
    """The bytes in tensors that were made in here and are still alive, and the most that there ever were."""

    def __init__(self, *outside: Tensor) -> None:
        super().__init__()
        self.outside = {StorageWeakRef(t.untyped_storage()) for t in outside}
        self.live: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.live.update((ref, s.nbytes()) for s in storages if (ref := StorageWeakRef(s)) not in self.outside)
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def deep(width: int = 16, layers: int = 12) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def peak_of(module: nn.Module, x: Tensor) -> int:
    with LiveBytes(x, *module.parameters()) as bytes_:
        supervised_contrastive(module(x)).backward()
    module.zero_grad()
    return bytes_.peak


def test_peak_is_that_of_one_sub_batch() -> None:
    model, x = deep(), torch.randn(60, 16)
    fixed = peak_of(cut_by(1, model), x)  # outputs, loss of all rows, gradients
    one_sub_batch = peak_of(model, x[:10])
    assert peak_of(cut_by(10, model), x) < fixed + one_sub_batch
    assert peak_of(cut_by(60, model), x) > fixed + 2 * one_sub_batch


def test_nothing_but_the_outputs_is_kept() -> None:
    model, x = deep(), torch.randn(24, 16)
    with LiveBytes(x, *model.parameters()) as bytes_:
        out = cut_by(4, model)(x)
        made = torch.zeros(())  # one more operation, to look again at what is alive
    assert out.requires_grad
    random_states = 6 * torch.get_rng_state().nbytes
    assert sum(bytes_.live.values()) - out.nbytes - made.nbytes <= random_states
    with LiveBytes(x, *model.parameters()) as bytes_:
        whole = model(x)
    assert sum(bytes_.live.values()) >= 12 * whole.nbytes


def runs(module: nn.Module) -> list[int]:
    """How many rows each run of a module gets."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def test_runs_once_without_gradients_and_twice_with_them() -> None:
    model, x = encoder(), torch.randn(5, 4)
    forward, seen = cut_by(2, model), runs(model)
    with torch.no_grad():
        assert torch.equal(forward(x), model(x))
    assert seen == [2, 2, 1, 5]
    with torch.inference_mode():
        assert forward(x).is_inference()
    assert seen[4:] == [2, 2, 1]
    out = forward(x)
    assert seen[7:] == [2, 2, 1]
    out.sum().backward()
    assert seen[10:] == [1, 2, 2]  # backward goes from the last to the first


def test_a_batch_that_fits_is_a_plain_call() -> None:
    model, x = encoder(), torch.randn(5, 4)
    forward, seen = cut_by(5, model), runs(model)
    out = forward(x)
    assert "Addmm" in type(out.grad_fn).__name__
    out.sum().backward()
    assert seen == [5]


def test_graphs_can_be_used_twice_and_through_grad() -> None:
    model, x = encoder(), torch.randn(ROWS, 4, requires_grad=True)
    forward = cut_by(2, model)
    right = torch.autograd.grad(correlation(model(x)), [x, *model.parameters()])
    loss = correlation(forward(x))
    for _ in range(2):
        found = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        assert error(list(found), list(right)) < 1e-12


# Arguments and outputs.


class Output(NamedTuple):
    pooled: Tensor
    states: dict[str, Tensor]
    names: list[str]
    nothing: None
    scale: Tensor
    layers: int


class Reader(nn.Module):
    """Takes and returns a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.log_scale = nn.Embedding(9, 3), nn.Parameter(torch.randn(()))

    def forward(self, ids: Tensor, *, mask: Tensor, bias: Any = None, names: list[str], loud: bool = False) -> Output:
        h = self.embed(ids) + (0 if bias is None else bias)
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        names = [n.upper() if loud else n for n in names]
        return Output(pooled, {"h": h, "t": h.mT}, names, None, self.log_scale.exp(), 2)


@pytest.mark.parametrize("size", SIZES)
def test_nested_arguments_and_outputs(size: int) -> None:
    model, bias = Reader(), torch.randn(1, 3, requires_grad=True)
    ids, mask = torch.randint(9, (ROWS, 4)), torch.rand(ROWS, 4)

    def run(f: nn.Module) -> tuple[Output, list[Tensor]]:
        out = f(ids, mask=mask, bias=bias, names=list("abcdef"), loud=True)
        loss = (out.pooled @ out.states["h"].sum(1).T * out.scale).logsumexp(1).mean()
        return out, gradients(loss, model, bias)

    (right, grads), (found, cut_grads) = run(model), run(cut_by(size, model))
    assert error(cut_grads, grads) < 1e-12
    assert type(found) is Output
    assert (found.names, found.nothing, found.layers) == (right.names, None, 2)
    torch.testing.assert_close(found[:2], right[:2], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.scale, right.scale, rtol=1e-12, atol=0)


def test_layout_goes_by_name_and_position() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor, hidden: Tensor, positions: Tensor, images: Tensor, counts: Tensor) -> Tensor:
            assert len(positions) == 4
            assert len(images) == counts.sum()
            seen = torch.stack([own.sum(0) for own in images.split(counts.tolist())])
            return x.sum(0) + hidden[0] + positions.sum() + seen

    layout = {"0": axis(1), 1: axis(1), "positions": SHARED, "images": packed("counts")}
    x, hidden, counts = torch.randn(3, 4, 2), torch.randn(2, 4, 2), torch.tensor([1, 3, 0, 2])
    arguments = {"positions": torch.randn(4), "images": torch.randn(6, 2), "counts": counts}
    forward = CutForward(Attend(), BatchCutter(rows=3, layout=layout))
    torch.testing.assert_close(forward(x, hidden, **arguments), Attend()(x, hidden, **arguments), rtol=1e-12, atol=0)
    with pytest.raises(CutError, match=r"disagree .*: batch\[0\] has 3 .*batch\['positions'\] has 4"):
        CutForward(Attend(), BatchCutter(rows=3))(x, hidden, **arguments)
    with pytest.raises(CutError, match=r'layout=\{"position": ...\} matches nothing.* did you mean "positions"'):
        CutForward(Attend(), BatchCutter(rows=3, layout={"position": SHARED}))(x, hidden, **arguments)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_output_layout(size: int) -> None:
    rnn = nn.LSTM(3, 4, num_layers=2)
    x = torch.randn(7, 5, 3)
    layout = {"0": axis(1), "1.0": axis(1), "1.1": axis(1)}
    forward = CutForward(rnn, BatchCutter(rows=size, layout={"0": axis(1)}), output_layout=layout)

    def loss(out: Any) -> Tensor:
        sequence, (h, c) = out
        return correlation(sequence[-1]) + concordance(h[0]) + quantile(c[1])

    right = gradients(loss(rnn(x)), rnn)
    assert error(gradients(loss(forward(x)), rnn), right) < 1e-12


def test_outputs_in_doubt_say_what_to_write() -> None:
    rnn, x = nn.LSTM(3, 4, num_layers=2, batch_first=True), torch.randn(8, 7, 3)
    with pytest.raises(CutError, match=r'outputs\[1\]\[0\] \(shape \(2, 3, 4\)\) .* output_layout=\{"1\.0": axis\(1\)'):
        CutForward(rnn, BatchCutter(rows=3))(x)
    forward = CutForward(encoder(), BatchCutter(rows=3), output_layout={"pooled": SHARED})
    with pytest.raises(CutError, match=r'output_layout=\{"pooled": ...\} matches nothing in the outputs'):
        forward(torch.randn(8, 4))


def test_time_first_tensor_as_the_only_output() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1)

    x = torch.randn(5, 3, 2)
    forward = CutForward(First(), BatchCutter(rows=2), output_layout={"": axis(1)})
    assert torch.equal(forward(x), x.transpose(0, 1))


class WithLoss(nn.Module):
    """Returns its mean loss over targets beside the logits, and how it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("size", SIZES)
def test_a_mean_loss_among_the_outputs_goes_by_the_weight(size: int) -> None:
    model, x, labels = WithLoss(), torch.randn(ROWS, 3, 4), torch.randint(5, (ROWS, 3))
    labels[:2] = -100  # a sub-batch of weight 0, whose mean is NaN
    labels[3, 1:] = -100

    def loss(out: dict[str, Any]) -> Tensor:
        return out["loss"] + correlation(out["logits"][:, 0])

    right = gradients(loss(model(x, labels=labels)), model)
    forward = CutForward(model, BatchCutter(rows=size, weight=label_weight("labels")))
    assert error(gradients(loss(forward(x, labels=labels)), model), right) < 1e-12
    if size < ROWS:
        wrong = gradients(loss(cut_by(size, model)(x, labels=labels)), model)
        assert not error(wrong, right) < 1e-3  # a mean over rows is another one, or NaN


def test_scalars_that_differ_are_an_error() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x, len(x)

    with pytest.raises(CutError, match=r"outputs\[1\] is a int without rows and differs between sub-batches"):
        cut_by(2, Rows())(torch.randn(5, 2))
    assert cut_by(2, Rows())(torch.randn(4, 2))[1] == 2  # what all agree on


def test_arguments_without_rows_are_an_error() -> None:
    with pytest.raises(CutError, match="carries rows"):
        cut_by(2, encoder())()


def test_an_error_names_its_sub_batch() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.now = nn.Parameter(torch.ones(())), True

        def forward(self, x: Tensor) -> Tensor:
            if self.now and (x > 3).any():
                raise RuntimeError("too large")
            return (x * self.w).sin()

    forward, x = cut_by(2, Fails()), torch.arange(5.0)[:, None]
    with pytest.raises(RuntimeError, match="too large") as caught:
        forward(x)
    assert "SubBatch(3 of 3, 1 row, 4:5)" in caught.value.__notes__[0]
    forward.now = False
    out = forward(x)
    forward.now = True
    with pytest.raises(RuntimeError, match="too large") as caught:
        out.sum().backward()
    assert "SubBatch(3 of 3, 1 row, 4:5), which CutForward ran again in backward" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda x: x, BatchCutter(rows=2)), "wants a module, not a function"),
        ((encoder(), 2), r"wants a BatchCutter, not a int: write CutForward\(model, BatchCutter\(rows=8\)\)"),
        ((encoder(), BatchCutter(rows="auto")), r'only a StepDriver finds out what "auto" is; give a number'),
        ((nn.DataParallel(encoder()), BatchCutter(rows=2)), r"DataParallel belongs around CutForward"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(CutError, match=message):
        CutForward(*arguments)


def test_wrong_options() -> None:
    with pytest.raises(CutError, match=r'randomness=\'same\': write randomness="fresh" or "whole"'):
        cut_by(2, encoder(), randomness="same")
    with pytest.raises(CutError, match=r'coupled=\'ok\': write coupled="raise"'):
        cut_by(2, encoder(), coupled="ok")
    with pytest.raises(CutError, match="DistributedDataParallel around it"):
        cut_by(2, encoder())._replicate_for_data_parallel()


# What the second run sees.


class Noisy(nn.Module):
    """Draws from everything that there is to draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 3), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.layer(x), 0.4, self.training)
        h = nn.functional.dropout(h, 0.4, self.training) * random.random() + np.random.rand()
        return h.sin() * torch.rand(h.shape, generator=self.generator)


def states(model: Noisy) -> list[Any]:
    torchs = [torch.get_rng_state().tolist(), model.generator.get_state().tolist()]
    return [*torchs, random.getstate(), str(np.random.get_state())]


def test_the_second_run_sees_the_same_random_numbers() -> None:
    model, x = Noisy(), torch.randn(ROWS, 4)

    def by_hand(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.split(2)])

    def run(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for seed in (torch.manual_seed, random.seed, np.random.seed, model.generator.manual_seed):
            seed(2)
        loss = correlation(f(x))
        Noisy.forward(model, x)  # something else draws before backward does
        before = states(model)
        found = gradients(loss, model)
        assert states(model) == before
        return found

    assert error(run(cut_by(2, model)), run(by_hand)) < 1e-12


class Stochastic(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.start, self.layer, self.drop, self.reentrant = nn.Linear(4, 8), layer, nn.Dropout(0.4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.start(x))
        h = self.layer(h) if self.reentrant is None else checkpoint(self.layer, h, use_reentrant=self.reentrant)
        return self.drop(h.mean(1))


def draw(loss: Callable[[Tensor], Tensor], f: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(4)
    return gradients(loss(f(x)), f)


@pytest.mark.parametrize("size", SIZES)
def test_whole_randomness(size: int) -> None:
    model, x = Stochastic(), torch.randn(ROWS, 5, 4)
    right, end = draw(concordance, model, x), torch.get_rng_state()
    assert error(draw(concordance, cut_by(size, model, randomness="whole"), x), right) < 1e-12
    assert torch.equal(torch.get_rng_state(), end)
    if size < ROWS:
        assert error(draw(concordance, cut_by(size, model), x), right) > 1e-2


def test_whole_randomness_without_gradients() -> None:
    model, x = Stochastic(), torch.randn(ROWS, 5, 4)
    with torch.no_grad():
        torch.manual_seed(4)
        right = model(x)
        torch.manual_seed(4)
        torch.testing.assert_close(cut_by(2, model, randomness="whole")(x), right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    model, x = Stochastic(reentrant), torch.randn(ROWS, 5, 4)

    def by_hand(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.split(2)])

    torch.manual_seed(4)
    right = gradients(concordance(by_hand(x)), model)
    assert error(draw(concordance, cut_by(2, model), x), right) < 1e-12
    with pytest.raises(RandomnessError, match="turn the checkpointing inside off"):
        cut_by(2, model, randomness="whole")(x)


class Counting(nn.Module):
    """Adds up what it has seen in a buffer, and its output hangs on that."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.total += h.detach().sum(0)
        return (h * self.total.clone()).sin()


def test_buffers_are_updated_once_and_seen_as_they_were() -> None:
    model, x = Counting(), torch.randn(ROWS, 4)
    twin = copy.deepcopy(model)
    right = gradients(correlation(torch.cat([twin(part) for part in x.split(2)])), twin)
    loss = correlation(cut_by(2, model)(x))
    total = model.total.clone()
    assert error(gradients(loss, model), right) < 1e-12
    assert torch.equal(model.total, total)
    assert torch.equal(model.total, twin.total)


def test_batch_norm_updates_once_and_is_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(ROWS, 4)
    twin = copy.deepcopy(model)
    for part in x.split(3):
        twin(part)
    forward = cut_by(3, model)
    with pytest.warns(UserWarning, match=r"1 \(BatchNorm1d\) normalises over the rows of a sub-batch") as caught:
        out = forward(x)
    assert caught[0].filename == __file__
    out.square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    forward(x)  # it warns once
    with pytest.raises(CutError, match=r'accept it with coupled="allow"'):
        cut_by(3, model, coupled="raise")(x)
    cut_by(3, model, coupled="allow")(x)
    model.eval()
    model.zero_grad()
    right = gradients(concordance(model(x)), model)
    assert error(gradients(concordance(cut_by(3, model, coupled="raise")(x)), model), right) < 1e-12


def test_the_second_run_is_in_the_mode_of_the_first() -> None:
    model, x = Stochastic(), torch.randn(ROWS, 5, 4)
    forward = cut_by(2, model)
    right = draw(concordance, forward, x)
    torch.manual_seed(4)
    loss = concordance(forward(x))
    forward.eval()
    model.layer.train()
    assert error(gradients(loss, model), right) < 1e-12
    assert [model.training, model.layer.training, model.drop.training] == [False, True, False]


def test_what_was_written_to_in_between_is_an_error() -> None:
    model, x = encoder(), torch.randn(ROWS, 4, requires_grad=True)
    forward = cut_by(2, model)
    out = forward(x)
    with torch.no_grad():
        model[2].bias.add_(1)  # type: ignore[index]
    with pytest.raises(CutError, match=r'the parameter "2.bias" was written to between forward and backward'):
        out.sum().backward()
    out = forward(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(CutError, match=r"an input of shape \(6, 4\) was written to"):
        out.sum().backward()


def test_a_forward_that_writes_to_its_inputs_is_an_error() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(0.5))

    with pytest.raises(CutError, match=r"forward writes to an input of shape \(6, 4\)"):
        cut_by(2, Masks())(torch.randn(ROWS, 4))
    with torch.no_grad():  # one run only, as unsplit
        x = torch.randn(ROWS, 4)
        expected = x / 2
        cut_by(2, Masks())(x)
        assert torch.equal(x, expected)


def test_gradients_of_gradients() -> None:
    model, x = encoder(), torch.randn(ROWS, 4, requires_grad=True)

    def penalised(f: nn.Module) -> list[Tensor]:
        loss = concordance(f(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return gradients(loss + grad.square().sum(), model)

    right = penalised(model)
    x.grad = None
    assert error(penalised(cut_by(2, model)), right) < 1e-12


# Precision.


def short_gradients(model: nn.Module, f: Callable[[Tensor], Tensor], x: Tensor, autocast: bool) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = f(x)
    out.to(torch.promote_types(out.dtype, torch.float32)).logsumexp(0).mean().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bits_are_no_worse_than_unsplit(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    x = torch.randn(512, 16, dtype=dtype)
    exact = copy.deepcopy(model).double()
    right = short_gradients(exact, exact, x.double(), autocast=False)

    def off(f: nn.Module) -> float:
        return float((short_gradients(model, f, x, autocast) - right).norm() / right.norm())

    def by_hand(x: Tensor) -> Tensor:
        return torch.cat([model(row) for row in x.split(1)])

    unsplit = off(model)
    assert off(cut_by(1, model)) < 1.25 * unsplit
    assert off(by_hand) > 10 * unsplit  # type: ignore[arg-type]
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("sparse", [False, True])
def test_recurrent_and_sparse_sixteen_bit_parameters(sparse: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(7, 4, sparse=sparse), nn.LSTM(4, 3, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rnn(self.embed(ids))[0][:, -1]

    model, ids = Reads().bfloat16(), torch.randint(7, (ROWS, 3))

    def found(f: nn.Module) -> list[Tensor]:
        grads = gradients(f(ids).float().logsumexp(0).sum(), model)
        assert grads[1].is_sparse == sparse
        return [g.to_dense().double() if g.is_sparse else g.double() for g in grads]

    assert error(found(cut_by(2, model)), found(model)) < 4e-2


def test_tied_and_frozen_sixteen_bit_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.mid.bias.requires_grad_(False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mid(self.embed(ids))))

    model, ids = Tied().bfloat16(), torch.randint(7, (ROWS, 3))
    right = gradients(model(ids).float().logsumexp((0, 1)).sum(), model)
    found = gradients(cut_by(2, model)(ids).float().logsumexp((0, 1)).sum(), model)
    assert model.head.weight is model.embed.weight
    assert error([f.double() for f in found], [r.double() for r in right]) < 2e-2
    assert not found[-1].any()


# The wrapper is the module.


class Config(NamedTuple):
    width: int


class Owner(nn.Module):
    """A module with ways of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer, self.norm = Config(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.extra = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def generate(self, x: Tensor) -> int:
        return len(self(x))

    def train(self, mode: bool = True) -> Owner:
        super().train(mode)
        self.norm.eval()  # frozen statistics
        return self

    def get_extra_state(self) -> dict[str, float]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.extra = state["extra"]


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a)


def test_state_dicts_load_both_ways() -> None:
    plain, wrapped = Owner(), cut_by(2, Owner())
    plain.extra = 2.5
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert wrapped.load_state_dict(plain.state_dict(), strict=True) is not None
    assert same(wrapped.state_dict(), plain.state_dict())
    assert wrapped.module.extra == 2.5
    other = Owner()
    other.load_state_dict(wrapped.state_dict(), strict=True)
    assert same(other.state_dict(), plain.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"layer.weight\""):
        wrapped.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "layer.weight"})


def test_state_dicts_inside_another_module() -> None:
    plain, nested = nn.ModuleDict({"tower": Owner()}), nn.ModuleDict({"tower": cut_by(2, Owner())})
    assert list(nested.state_dict()) == list(plain.state_dict())
    nested.load_state_dict(plain.state_dict(), strict=True)
    assert same(nested.state_dict(), plain.state_dict())
    other = nn.ModuleDict({"tower": Owner()})
    other.load_state_dict(nested.state_dict(), strict=True, assign=True)
    assert same(other.state_dict(), plain.state_dict())
    nested.load_state_dict(Owner().state_dict(prefix="tower."), assign=True)
    assert nested["tower"].layer.weight is nested["tower"].module.layer.weight  # type: ignore[union-attr]


def test_parameters_and_modules_keep_their_names() -> None:
    plain = Owner()
    wrapped = cut_by(2, plain)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in plain.named_modules()]
    assert dict(wrapped.named_parameters())["layer.weight"] is plain.layer.weight
    assert wrapped.get_submodule("layer") is plain.layer


def test_attributes_are_the_modules() -> None:
    plain = Owner()
    wrapped = cut_by(2, plain)
    assert wrapped.config is plain.config
    assert wrapped.generate(torch.randn(5, 4)) == 5
    wrapped.extra = 3.0
    assert plain.extra == 3.0
    wrapped.layer = nn.Linear(4, 2)
    assert plain.layer.out_features == 2
    plain.added = nn.Parameter(torch.randn(2))
    assert wrapped.added is plain.added
    assert "added" in dict(wrapped.named_parameters())
    del wrapped.extra
    assert not hasattr(plain, "extra")
    wrapped.cutter = BatchCutter(rows=3)
    assert not hasattr(plain, "cutter")
    assert "generate" in dir(wrapped)
    with pytest.raises(AttributeError, match="'Owner' object has no attribute 'nonsense'"):
        _ = wrapped.nonsense
    with pytest.raises(AttributeError, match="make a new CutForward"):
        wrapped.module = Owner()


def test_modes_dtypes_and_functions_reach_the_module() -> None:
    plain = Owner()
    wrapped = cut_by(2, plain)
    assert wrapped.train() is wrapped
    assert plain.training
    assert not plain.norm.training
    wrapped.eval()
    assert not plain.training
    assert not wrapped.training
    assert wrapped.to(torch.float32) is wrapped
    assert plain.layer.weight.dtype == torch.float32
    assert wrapped.half().layer.weight.dtype == torch.float16
    seen: list[str] = []
    wrapped.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["Linear", "BatchNorm1d", "Owner"]
    wrapped.requires_grad_(False)
    assert not plain.layer.weight.requires_grad
    assert not cut_by(2, plain).training  # begins in the module's mode


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_stand_alone(again: Callable[[Any], Any]) -> None:
    wrapped, x = cut_by(2, encoder(), randomness="whole"), torch.randn(ROWS, 4)
    wrapped(x)
    twin = again(wrapped)
    assert same(twin.state_dict(), wrapped.state_dict())
    right = gradients(correlation(wrapped(x)), wrapped)
    assert error(gradients(correlation(twin(x)), twin), right) < 1e-12
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not twin.get_parameter("0.weight").any()
    assert wrapped.get_parameter("0.weight").any()


def test_repr_names_cutter_and_module() -> None:
    assert repr(cut_by(2, nn.Linear(1, 2))) == (
        "CutForward(\n  BatchCutter(rows=2),\n  Linear(in_features=1, out_features=2, bias=True)\n)"
    )


def test_hooks() -> None:
    """Tensor hooks see the whole gradient once; forward hooks of the wrapper the whole batch."""
    model, x = encoder(), torch.randn(ROWS, 4)
    wrapped, seen = cut_by(2, model), []
    wrapped.register_forward_hook(lambda m, args, out: seen.append((len(args[0]), len(out))))
    weight = wrapped.get_parameter("0.weight")
    weight.register_hook(lambda grad: seen.append("grad") or grad * 2)  # type: ignore[func-returns-value]
    right = gradients(correlation(model(x)), model)
    seen.clear()
    assert error(gradients(correlation(wrapped(x)), model), right) < 1e-12
    assert seen == [(6, 6), "grad"]


def test_in_a_step_driver() -> None:
    model, twin, x = (m := encoder()), copy.deepcopy(m), torch.randn(ROWS, 4)
    wrapped = cut_by(2, model)
    for module, f in ((model, wrapped), (twin, twin)):
        optimizer = torch.optim.AdamW(module.parameters())
        driver = StepDriver(f, optimizer, lambda data, f=f: correlation(f(data)), BatchCutter(), clip_norm=0.1)
        driver.step(x)
    assert error([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()]) < 1e-12


def test_lazy_modules_find_their_sizes() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(ROWS, 4)
    wrapped = cut_by(3, model, coupled="allow")
    wrapped(x).sum().backward()
    assert wrapped.get_parameter("0.weight").shape == (4, 4)
    assert model[1].num_batches_tracked == 2
    model.eval()
    model.zero_grad()
    right = gradients(concordance(model(x)), model)
    assert error(gradients(concordance(wrapped(x)), model), right) < 1e-12


def test_compiled_inside() -> None:
    model, x = encoder(), torch.randn(ROWS, 4)
    right = gradients(correlation(model(x)), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        wrapped = cut_by(3, torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
        assert error(gradients(correlation(wrapped(x)), model), right) < 1e-12


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3,
        attn_implementation="eager",
    )  # fmt: skip
    mask = torch.ones(ROWS, 7, dtype=torch.long)
    mask[1, 4:] = mask[4, 2:] = 0
    ids, labels = torch.randint(1, 30, (ROWS, 7)) * mask, torch.randint(3, (ROWS,))
    model = transformers.BertForSequenceClassification(config).double()
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_transformers_model(size: int, checkpointing: bool) -> None:
    model, batch = bert()
    if checkpointing:
        model.eval()
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()

    def loss(out: Any) -> Tensor:
        states = out.hidden_states[-1][:, 0]
        return out.loss + info_nce(states, out.hidden_states[1][:, 1])

    def run(f: nn.Module) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        out = f(**batch, output_hidden_states=True, return_dict=True)
        return out, gradients(loss(out), model)

    wrapped = cut_by(size, model, randomness="fresh" if checkpointing else "whole")
    (right, grads), (found, cut_grads) = run(model), run(wrapped)
    assert type(found) is type(right)
    assert list(found) == list(right)
    assert error(cut_grads, grads) < 1e-12


# Several ranks.


def replicated(rank: int, store: str, folder: str) -> None:
    """One rank: what the gradients are and how often they were reduced, for the plain module and the cut one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = Unused(), torch.randn(2, ROWS, 4)[rank]
    right: list[Tensor] = []
    for module in (model, cut_by(2, model)):
        ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        reduced: list[int] = []

        def hook(state, bucket, reduced=reduced):  # torch wants no other annotations than its own
            reduced.append(len(bucket.gradients()))
            work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda f: f.value()[0] / 2)  # type: ignore[union-attr]

        ddp.register_comm_hook(None, hook)
        for _ in range(2):  # the reducer is to be ready for a second step
            reduced.clear()
            found = gradients(correlation(ddp(x)), ddp)
        assert sum(reduced) == len(list(model.parameters())), reduced
        assert list(ddp.state_dict()) == [f"module.{k}" for k in model.state_dict()]
        right = right or found
        assert error(found[1:], right[1:]) < 1e-12
    gathered = [torch.zeros_like(right[1]) for _ in range(2)]
    torch.distributed.all_gather(gathered, right[1])
    assert torch.equal(*gathered)
    within: Any = fully_shard(copy.deepcopy(model))
    around: Any = fully_shard(cut_by(2, copy.deepcopy(model)))
    for sharded in (cut_by(2, within), around):
        shards = gradients(correlation(sharded(x)), sharded)[1:]
        assert error([shard.full_tensor() for shard in shards if isinstance(shard, DTensor)], right[1:]) < 1e-12
    torch.distributed.destroy_process_group()
    Path(folder, f"{rank}").touch()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = encoder(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_ddp_reduces_once(tmp_path: Path) -> None:
    spawn(replicated, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


def test_ddp_inside_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(CutError, match=r"write DistributedDataParallel\(CutForward\(model, cutter\)\)"):
            cut_by(2, nn.parallel.DistributedDataParallel(encoder()))
    finally:
        torch.distributed.destroy_process_group()
