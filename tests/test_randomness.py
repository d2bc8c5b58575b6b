"""randomness="whole": sub-batches draw what the unsplit batch draws, for every kind of random operation and cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from batchsplit.errors import CutError
from batchsplit.randomness import WholeRandomness
from batchsplit.randomness.operations import BY_VALUE, DRAWS, FUSED, FUSED_RNN, RRELU, RandomnessError, seeded

ROWS, STEPS, WIDTH = 6, 5, 8
SIZES = (1, 2, 3, ROWS - 1, ROWS)
pytestmark = pytest.mark.usefixtures("float64")

Loss = Callable[[nn.Module, Tensor], Tensor]
drop = F.dropout


def states() -> tuple[Tensor, Any, str]:
    return torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False))


def gradients(model: nn.Module) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def start() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


def unsplit(model: nn.Module, loss: Loss, x: Tensor) -> tuple[float, Tensor, Any]:
    model.zero_grad(set_to_none=True)
    start()
    value = loss(model, x)
    value.backward()
    return value.item(), gradients(model), states()


def split(model: nn.Module, loss: Loss, x: Tensor, wheres: list[Any], plans: Any = None) -> tuple[float, Tensor, Any]:
    model.zero_grad(set_to_none=True)
    start()
    whole = WholeRandomness(lambda x: loss(model, x), lambda rows: x[rows], len(x), model=model, plans=plans)
    total = 0.0
    for where in wheres:
        with whole.rows(where):
            value = loss(model, x[where]) * (len(x[where]) / len(x))
            value.backward()
        total += value.item()
    whole.finish()
    return total, gradients(model), states()


def slices(rows: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def error(got: Any, want: Any) -> float:
    """The larger of the relative errors of loss and gradient."""
    return max(abs(got[0] - want[0]) / abs(want[0]), float((got[1] - want[1]).norm() / want[1].norm()))


def same(model: nn.Module, loss: Loss, x: Tensor, wheres: list[Any], plans: Any = None, within: float = 1e-12) -> None:
    want, got = unsplit(model, loss, x), split(model, loss, x, wheres, plans)
    assert error(got, want) <= within
    assert torch.equal(got[2][0], want[2][0]), "the generator is not where the unsplit run leaves it"
    assert got[2][1:] == want[2][1:]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def flat_rows_outer(model: nn.Module, x: Tensor) -> Tensor:
    return drop(drop(model(drop(x, 0.2)).reshape(-1, WIDTH), 0.3), 0.3).exp().mean()


def flat_rows_inner(model: nn.Module, x: Tensor) -> Tensor:
    return drop(drop(model(drop(x, 0.2)).transpose(0, 1).reshape(-1, WIDTH), 0.3), 0.3).exp().mean()


def noise_flat(model: nn.Module, x: Tensor) -> Tensor:
    flat, entries = model(x).reshape(-1, WIDTH), len(x) * STEPS
    return ((flat + torch.randn(entries, WIDTH)) * torch.rand(entries, 1)).exp().mean()


def noise_flat_rows_inner(model: nn.Module, x: Tensor) -> Tensor:
    flat, entries = model(x).transpose(0, 1).reshape(-1, WIDTH), len(x) * STEPS
    return ((flat + torch.randn(entries, WIDTH)) * torch.rand(entries, 1)).exp().mean()


def noise_viewed(model: nn.Module, x: Tensor) -> Tensor:
    first = torch.randn(len(x) * STEPS, WIDTH).view(-1, STEPS, WIDTH)
    second = torch.randn(len(x) * STEPS, WIDTH).view(STEPS, -1, WIDTH).transpose(0, 1)
    return (model(x) + first * second).exp().mean()


def heads(model: nn.Module, x: Tensor) -> Tensor:
    query = model(x).view(-1, STEPS, 2, 4).transpose(1, 2)
    four = drop(query @ query.transpose(2, 3), 0.3)
    flat = query.reshape(-1, STEPS, 4)
    return four.exp().mean() + drop(drop(flat @ flat.transpose(1, 2), 0.3), 0.2).tanh().exp().mean()


def two_views(model: nn.Module, x: Tensor) -> Tensor:
    both = drop(drop(model(torch.cat([x, x])), 0.3), 0.3)
    first, second = both.chunk(2)
    return (drop(first, 0.3) * second).exp().mean() + drop(both.view(2, -1, STEPS, WIDTH), 0.2).prod(0).mean()


def interleaved(model: nn.Module, x: Tensor) -> Tensor:
    return (
        drop(drop(model(x.repeat_interleave(2, 0)), 0.3)).exp().mean()
        + drop(drop(model(x.repeat(2, 1, 1)))).sin().mean()
    )


def gumbel(model: nn.Module, x: Tensor) -> Tensor:
    return (F.gumbel_softmax(model(x)) * F.gumbel_softmax(model(x), hard=True)).exp().mean()


def reparametrised(model: nn.Module, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(model(x), model(x).exp())
    return (normal.rsample() + torch.randn_like(x) * torch.normal(x, x.abs())).sin().mean() + 2


def normals(model: nn.Module, x: Tensor) -> Tensor:
    return (
        model(x) * torch.normal(x, 2.0) * torch.normal(0.5, x.abs()) * torch.normal(1.0, 2.0, x.shape)
    ).sin().mean() + 2


def stochastic_depth(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        keep = torch.empty(len(x), 1, 1).bernoulli_(0.6) * (torch.rand(len(x)) < 0.8)[:, None, None]
        x = x + model(x) * keep
    return x.tanh().exp().mean()


def augmented(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.rand(x.shape[:2]) < 0.2
    x = x.masked_fill(hidden[..., None], 0.0) + 0.1 * torch.randn_like(x)
    x = torch.where(torch.rand(len(x), 1, 1) < 0.5, x.flip(2), x)
    return model(x * torch.empty(len(x), 1, 1).uniform_(0.5, 1.5)).exp().mean()


def shared(model: nn.Module, x: Tensor) -> Tensor:
    return drop(x[:, torch.randperm(STEPS)] + model(torch.randn(STEPS, WIDTH)) * torch.rand(()), 0.2).exp().mean()


def integers(model: nn.Module, x: Tensor) -> Tensor:
    factor = torch.randint(0, 5, (len(x), STEPS, 1)) * torch.randint_like(x, 3) + torch.empty_like(x).random_(4)
    return (model(x) * factor).sin().mean() + 2


def picked(model: nn.Module, x: Tensor) -> Tensor:
    index = torch.multinomial(x[:, 0].abs(), 5) + 0 * torch.multinomial(x[:, 0].abs(), 5, replacement=True)
    return drop(model(drop(x)).gather(2, index[:, :, None])).exp().mean()


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    new = torch.empty_like(x)
    total = model(x)
    for noise in (new.exponential_(2.0), new.clone().geometric_(0.4), new.clone().cauchy_(), new.clone().log_normal_()):
        total = total + noise.clamp(-1, 1)
    return (
        total * torch.bernoulli(x.sigmoid()) * torch.bernoulli(x, 0.6) * new.bernoulli_(x.sigmoid())
    ).sin().mean() + 2


def feature_dropouts(model: nn.Module, x: Tensor) -> Tensor:
    x = F.alpha_dropout(F.feature_alpha_dropout(F.dropout1d(model(x), 0.3, True), 0.3, True), 0.3, True)
    return F.dropout3d(F.dropout2d(x[:, None], 0.2, True)[:, None], 0.2, True).exp().mean()


def own_generator(model: nn.Module, x: Tensor) -> Tensor:
    inside = torch.Generator().manual_seed(3)
    return (
        drop(drop(model(x)) * torch.rand(x.shape, generator=inside) + torch.randn(x.shape, generator=inside))
        .exp()
        .mean()
    )


def forked(model: nn.Module, x: Tensor) -> Tensor:
    x = drop(model(x))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        x = drop(x, 0.2)
    return drop(x, 0.3).exp().mean()


def recomputed(reentrant: bool) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = drop(x.clone().requires_grad_(), 0.3)
        for _ in range(2):
            x = checkpoint(lambda x: drop(model(drop(x, 0.4)), 0.3), x, use_reentrant=reentrant)
        return drop(x, 0.2).exp().mean()

    return loss


def with_item(model: nn.Module, x: Tensor) -> Tensor:
    x = drop(drop(model(x)), 0.3)
    return x.exp().mean() if x.detach().sum().item() < 1e9 else x.sum()


def with_mask(model: nn.Module, x: Tensor) -> Tensor:
    return drop(drop(model(x)), 0.3).exp()[x[:, :, 0] < 1e9].mean()


def layer_drop(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(6):
        if torch.rand([]) < 0.5:
            continue
        x = drop(model(x), 0.3) + x
    return model(x).tanh().exp().mean()


def python_layer_drop(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(6):
        if random.random() < 0.5 and np.random.rand() < 0.9:
            x = drop(model(x), 0.3) + x
    return drop(model(x)).tanh().exp().mean()


def rows_by_number(model: nn.Module, x: Tensor) -> Tensor:
    last = model(drop(x))[torch.arange(len(x)), x[:, :, 0].argmax(1)]
    return drop(drop(last), 0.3).exp().mean()


def written_by_parts(model: nn.Module, x: Tensor) -> Tensor:
    noise = torch.zeros(len(x), STEPS, WIDTH)
    for step in range(STEPS):
        noise[:, step] = torch.randn(len(x), WIDTH)
    rows = torch.stack([row.exp().mean() for row in drop(drop(model(x) + noise))])
    return rows.mean()


def nothing(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).exp().mean()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).tanh().exp().mean()


def turned(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.transpose(0, 1)).tanh().exp().mean()


def time_first(model: nn.Module, x: Tensor) -> Tensor:
    return drop(model(drop(x, 0.2).transpose(0, 1))[0], 0.3).exp().mean()


def batch_first(model: nn.Module, x: Tensor) -> Tensor:
    return drop(model(x)[0], 0.2).exp().mean()


def attention(model: nn.Module, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return drop(model(x, x, x)[0] + model(x, x, x, need_weights=False)[0]).exp().mean()


def causal(model: nn.Module, x: Tensor) -> Tensor:
    query = model(x)[:, None]
    return drop(F.scaled_dot_product_attention(query, query, query, dropout_p=0.2, is_causal=True)).exp().mean()


def from_image(model: nn.Module, x: Tensor) -> Tensor:
    return model(x[:, None]).exp().mean()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), layer)


def images() -> nn.Module:
    norm = nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU(), nn.Dropout2d(0.3))
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.Conv2d(3, 3, 2), nn.Flatten(), nn.Dropout(0.3))


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "encoder": (encoder, plain),
    "encoder time first": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3), turned),
    "lstm batch first": (lambda: nn.LSTM(WIDTH, 7, 3, dropout=0.4, batch_first=True), batch_first),
    "lstm time first": (lambda: nn.LSTM(WIDTH, 7, 2, dropout=0.4), time_first),
    "gru both ways": (lambda: nn.GRU(WIDTH, 7, 2, dropout=0.4, bidirectional=True), time_first),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3), attention),
    "images": (images, from_image),
    **{loss.__name__: (linear, loss) for loss in (
        flat_rows_outer, flat_rows_inner, noise_flat, noise_flat_rows_inner, noise_viewed, heads, two_views,
        interleaved, gumbel, reparametrised, normals, stochastic_depth, augmented, shared, integers, picked, in_place,
        feature_dropouts, own_generator, forked, with_item, with_mask, layer_drop, python_layer_drop, rows_by_number,
        written_by_parts, nothing, causal,
    )},
    "checkpoint": (linear, recomputed(False)),
    "checkpoint reentrant": (linear, recomputed(True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsplit_batch(name: str) -> None:
    make, loss = CASES[name]
    model, x, plans = make(), torch.randn(ROWS, STEPS, WIDTH), {}
    for size in SIZES:
        same(model, loss, x, slices(ROWS, size), plans)
    same(model, loss, x, [torch.tensor([4, 0, 5]), np.array([1, 3, 2])], plans)
    same(model, loss, x, [slice(0, 1), slice(1, 6)], plans)


@pytest.mark.parametrize("name", ["flat_rows_outer", "encoder", "lstm time first", "reparametrised", "in_place"])
def test_fresh_randomness_differs(name: str) -> None:
    """The planted wrong case: without `whole` the tests above would fail by far."""
    make, loss = CASES[name]
    model, x = make(), torch.randn(ROWS, STEPS, WIDTH)
    want = unsplit(model, loss, x)
    model.zero_grad()
    start()
    total = 0.0
    for where in slices(ROWS, 2):
        value = loss(model, x[where]) / 3
        value.backward()
        total += value.item()
    assert error((total, gradients(model)), want) > 1e-3


def test_two_rows() -> None:
    """The smallest batch that can be cut: the comparison is with one row."""
    for name in ("encoder", "lstm time first", "flat_rows_inner", "heads", "with_item"):
        make, loss = CASES[name]
        same(make(), loss, torch.randn(2, STEPS, WIDTH), slices(2, 1))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision(dtype: torch.dtype, within: float) -> None:
    for name in ("encoder", "flat_rows_inner"):
        make, loss = CASES[name]
        same(make().to(dtype), loss, torch.randn(ROWS, STEPS, WIDTH, dtype=dtype), slices(ROWS, 2), within=within)


def test_autocast_around_the_step() -> None:
    """The forward that is run ahead leaves no cast of a parameter behind in autocast's cache."""
    model, x = encoder().float(), torch.randn(ROWS, STEPS, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        same(model, plain, x, slices(ROWS, 4), within=0.05)


def test_generator_of_the_user() -> None:
    generator, model, x = torch.Generator(), linear(), torch.randn(ROWS, STEPS, WIDTH)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = (
            model(x)
            * torch.rand(x.shape, generator=generator)
            * torch.empty_like(x).bernoulli_(0.5, generator=generator)
        )
        return drop(x).exp().mean()

    generator.manual_seed(5)
    want, end = unsplit(model, loss, x), generator.get_state()
    for size in SIZES:
        generator.manual_seed(5)
        assert error(split(model, loss, x, slices(ROWS, size)), want) <= 1e-12
        assert torch.equal(generator.get_state(), end)


def test_nested_batch_and_replay() -> None:
    """A batch of several leaves; a second pass over a sub-batch draws the same and leaves the generator alone."""
    batch = {"x": torch.randn(ROWS, WIDTH), "y": [torch.randn(STEPS, ROWS, WIDTH)]}
    data_for = lambda rows: {"x": batch["x"][rows], "y": [batch["y"][0][:, rows]]}  # noqa: E731

    def forward(data: Any) -> Tensor:
        return drop(drop(data["x"])) + drop(drop(data["y"][0], 0.2), 0.3).sum(0)

    torch.manual_seed(2)
    want, after = forward(batch), torch.rand(3)
    torch.manual_seed(2)
    whole = WholeRandomness(forward, data_for, ROWS)
    parts = []
    for rows in slices(ROWS, 4):
        with whole.rows(rows):
            parts.append(forward(data_for(rows)))
    whole.finish()
    state = torch.get_rng_state()
    with whole.replay(slice(2, 5)):
        again = forward(data_for(slice(2, 5)))
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-12, atol=0)
    torch.testing.assert_close(again, want[2:5], rtol=1e-12, atol=0)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(torch.rand(3), after)


def test_running_ahead_leaves_no_trace() -> None:
    """Buffers, attributes, gradients and generators are as before, on fake tensors and on real rows."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv1d(STEPS, 3, 1), nn.BatchNorm1d(3), nn.Dropout(), nn.Dropout())
            self.register_buffer("mean", torch.zeros(()))
            self.calls, self.last = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.net(x)
            self.mean = 0.9 * self.mean + 0.1 * self.last.detach().mean()
            x[:, 0] = 0.0
            return self.last

    for read in (lambda y: y.sum(), lambda y: y.sum() if y.sum().item() < 1e9 else y.mean()):
        model, x = Counting(), torch.randn(ROWS, STEPS, WIDTH)
        kept, data, state = {k: v.clone() for k, v in model.state_dict().items()}, x.clone(), torch.get_rng_state()
        whole = WholeRandomness(lambda x, read=read, model=model: read(model(x)), lambda rows, x=x: x[rows], ROWS)
        with whole.rows(slice(0, 2)):
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(x, data)
            assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
            assert (model.calls, model.last, type(model.mean)) == (0, None, Tensor)
            assert all(p.grad is None for p in model.parameters())
            read(model(x[:2]))
        assert model.calls == 1


def test_after_an_exception_the_generator_is_at_the_start() -> None:
    x = torch.randn(ROWS, WIDTH)
    whole, state = WholeRandomness(lambda x: drop(drop(x)), lambda rows: x[rows], ROWS), torch.get_rng_state()
    with whole.rows(slice(0, 2)):
        drop(drop(x[:2]))

    def failing() -> None:
        with whole.rows(slice(2, 6)):
            raise KeyError(drop(x[2:]))

    with pytest.raises(KeyError):
        failing()
    assert torch.equal(torch.get_rng_state(), state)


def test_plans_are_learned_once_per_shape() -> None:
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return drop(drop(x))

    plans: Any = {}
    for steps in (5, 5, 4):
        x = torch.randn(ROWS, steps)
        whole = WholeRandomness(forward, lambda rows, x=x: x[rows], ROWS, plans=plans)
        with whole.rows(slice(0, 3)):
            forward(x[:3])
    assert calls == [(5, 5), (6, 5), (3, 5), (3, 5), (5, 4), (6, 4), (3, 4)]


def test_unsplit_batch_is_not_intercepted() -> None:
    x, calls = torch.randn(ROWS, WIDTH), []
    whole = WholeRandomness(lambda x: calls.append(1) or drop(x), lambda rows: x[rows], ROWS)
    with whole.rows(slice(0, ROWS)):
        assert not _get_current_dispatch_mode_stack()
    assert not calls


def flash(model: nn.Module, x: Tensor) -> Tensor:
    query = model(x)[:, None]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, query, query, dropout_p=0.2)[0].sum()


def row_loop(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([drop(model(row)) for row in x]).mean()


def routed(model: nn.Module, x: Tensor) -> Tensor:
    return drop(model(drop(x)[x[:, 0, 0] < 1e9])).sum()


def without_state(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: drop(drop(model(x))), x, use_reentrant=False, preserve_rng_state=False).sum()


class Compiled(nn.Linear):
    """As `module.compile()` leaves a module, without the cost of compiling."""

    _compiled_call_impl = staticmethod(lambda x: x)


compiled, lazy = nn.Sequential(Compiled(WIDTH, WIDTH)), nn.LazyLinear(3)

REFUSED: dict[str, tuple[Loss, str]] = {
    "fused attention": (flash, r"flash_attention_for_cpu.*sdpa_kernel\(SDPBackend.MATH\)"),
    "flipped noise": (
        lambda m, x: (m(x) + torch.randn(x.shape).flip(0)).mean(),
        r"aten.randn.*flip.default reorders the rows",
    ),
    "noise viewed across": (
        lambda m, x: (m(x) + torch.randn(len(x), STEPS, WIDTH).view(STEPS, -1, WIDTH).transpose(0, 1)).mean(),
        r"aten.randn.* a view mixes its rows",
    ),
    "sorted rows": (
        lambda m, x: drop(m(x)[x[:, 0, 0].argsort()]).mean(),
        r"bernoulli_.*index.Tensor picks among the rows",
    ),
    "written out of order": (
        lambda m, x: drop(torch.empty_like(x).index_copy_(0, x[:, 0, 0].argsort(), m(x))).mean(),
        r"index_copy_.default reorders the rows",
    ),
    "permuted rows": (lambda m, x: drop(m(x)[torch.randperm(len(x))]).mean(), r"randperm.*couples its rows"),
    "row loop": (row_loop, r"runs other operations at 5 rows than at 6"),
    "rows picked by value": (routed, r"bernoulli_.*shape depends on values"),
    "pairs of rows": (lambda m, x: drop(m(x)[:, 0] @ m(x)[:, 0].T).mean(), r"two of its axes grow with the batch"),
    "one row more": (lambda m, x: drop(m(torch.cat([x, x[:1]]))).mean(), r"no multiple"),
    "high = rows": (
        lambda m, x: (m(x) * torch.randint(len(x), x.shape)).mean(),
        r"arguments change.*'high': 5.*'high': 6",
    ),
    "order never shown": (
        lambda m, x: m(x).mean() + torch.rand(len(x) * STEPS).sum(),
        r"nothing shows which rows its 5 entries",
    ),
    "poisson": (lambda m, x: (m(x) * torch.poisson(x.abs())).mean(), r"aten.poisson.*values of the rows before it"),
    "gamma": (
        lambda m, x: (m(x) * torch.ops.aten._standard_gamma(x.abs() + 1)).mean(),
        r"_standard_gamma.*collate function",
    ),
    "rrelu": (lambda m, x: F.rrelu(m(x), training=True).mean(), r"rrelu_with_noise.*LeakyReLU"),
    "rows drawn": (lambda m, x: m(x[torch.multinomial(x[:, 0, 0].abs(), 2)]).mean(), r"multinomial.*all rows at once"),
    "numpy by rows": (
        lambda m, x: (m(x) * torch.from_numpy(np.random.rand(len(x), 1, 1))).mean(),
        r"numpy's generator",
    ),
    "recompute without state": (without_state, r"preserve_rng_state=False; leave that on"),
    "compiled": (lambda m, x: compiled(drop(x)).mean(), r"Compiled is compiled by torch.compile"),
    "lazy": (lambda m, x: lazy(drop(x)).mean(), r"LazyLinear has parameters without a shape"),
    "broken forward": (lambda m, x: m(x).view(7, 11), r"neither without values .* nor on a few rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_what_instead(name: str) -> None:
    loss, message = REFUSED[name]
    model, x = linear(), torch.randn(ROWS, STEPS, WIDTH)
    state = torch.get_rng_state()
    whole = WholeRandomness(lambda x: loss(model, x), lambda rows: x[rows], ROWS)
    with pytest.raises(RandomnessError, match=message) as info, whole.rows(slice(0, 2)):
        loss(model, x[:2]).backward()
    assert isinstance(info.value, CutError) and "randomness='whole'" in str(info.value)
    if name != "lazy":
        assert torch.equal(torch.get_rng_state(), state)


def test_a_refusal_names_the_module() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()), torch.randn(ROWS, WIDTH)
    whole = WholeRandomness(lambda x: model(x.flip(0)), lambda rows: x[rows], ROWS)
    message = r"of shape \(6, 8\) in Sequential > Dropout \(random operation 1 of the forward"
    with pytest.raises(CutError, match=message), whole.rows(slice(0, 2)):
        raise AssertionError("refused before anything runs")


def test_another_course_than_learned_is_noticed() -> None:
    x, more = torch.randn(ROWS, WIDTH), []

    def forward(x: Tensor) -> Tensor:
        return torch.randn_like(drop(x)) if more else drop(drop(x))

    whole = WholeRandomness(forward, lambda rows: x[rows], ROWS)
    with whole.rows(slice(0, 2)):
        forward(x[:2])
    more.append(1)
    message = r"randn_like.default is not what the forward drew when it was learned"
    with pytest.raises(CutError, match=message), whole.rows(slice(2, 4)):
        forward(x[2:4])
    with pytest.raises(CutError, match="draws more often than when it was learned"), whole.rows(slice(2, 4)):
        drop(drop(drop(x[2:4])))


def test_every_seeded_operation_is_sorted() -> None:
    """An operation that torch tags as random and that no table names would be refused as unknown: know which."""
    unknown = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None and seeded(op) and not op._can_decompose():
                unknown.add(packet)
    sorted_ones = DRAWS | FUSED | FUSED_RNN | BY_VALUE | RRELU | {"randperm"}
    assert unknown - sorted_ones <= {"_fill_mem_eff_dropout_mask_"}
    assert {"bernoulli_", "native_dropout", "randperm", "poisson"} <= unknown
