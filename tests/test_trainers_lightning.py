"""Lightning and Fabric: three optimizer steps, cut and uncut, end at the same parameters."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from batchsplit import BatchCutter, CutError, label_weight
from ranked import on_ranks

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from batchsplit.trainers.lightning import CutStepMixin, fabric_step

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

VOCABULARY = 11
CLIP = 0.3


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def forward(self, data: Any) -> Tensor:
        logits = self.out(torch.tanh(self.embed(data["ids"])).cumsum(1))
        return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())


def rows_of_tokens(count: int) -> list[dict[str, Tensor]]:
    """Rows whose number of labels differs a lot."""
    ids = torch.randint(VOCABULARY, (count, 7))
    kept = torch.arange(7) < torch.randint(1, 8, (count, 1))
    return [{"ids": row, "labels": row.where(keep, -100)} for row, keep in zip(ids, kept, strict=True)]


def cutter_of(rows: int | None) -> BatchCutter:
    return BatchCutter(rows=rows, weight=label_weight("labels"))


class Uncut(LightningModule):
    """What a user has before: automatic optimization."""

    def __init__(self, net: nn.Module, interval: str = "step", frequency: int = 1) -> None:
        super().__init__()
        self.net, self.interval, self.frequency = copy.deepcopy(net), interval, frequency
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch)
        self.log("train_loss", loss, batch_size=len(batch["ids"]), on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.counts.append(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        plan = {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class Cuts(CutStepMixin, Uncut):
    clip_norm = CLIP

    def __init__(self, net: nn.Module, rows: int | None = 2, **more: Any) -> None:
        super().__init__(net, **more)
        self.cutter = cutter_of(rows)

    def cut_loss(self, data: Any) -> Any:
        return self.net(data)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.cut_step(batch)


def trainer_of(**more: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(accelerator="cpu", enable_model_summary=False, **{"max_epochs": 1, "devices": 1, **quiet, **more})


def fitted(module: Any, data: Any, **more: Any) -> Trainer:
    trainer = trainer_of(**more)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(module, DataLoader(data, batch_size=6))
    return trainer


def ended(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def far(one: nn.Module, other: nn.Module, start: nn.Module) -> float:
    """How far apart two runs ended, relative to the way that they went."""
    return float((ended(one) - ended(other)).norm() / (ended(other) - ended(start)).norm())


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_three_steps_as_uncut(rows: int) -> None:
    data, start = rows_of_tokens(16), Tagger()  # batches of 6, 6 and 4
    uncut, module = Uncut(start), Cuts(start, rows)
    expected, trainer = fitted(uncut, data, gradient_clip_val=CLIP), fitted(module, data)
    assert module.counts == uncut.counts == [1, 2, 3] and trainer.global_step == expected.global_step == 3
    assert module.rates == uncut.rates
    assert module.losses == pytest.approx(uncut.losses, rel=1e-12)
    logged, wanted = trainer.callback_metrics["train_loss"], expected.callback_metrics["train_loss_step"]
    assert logged.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert far(module, uncut, start) < 1e-12


@pytest.mark.parametrize(("interval", "frequency"), [("epoch", 1), ("epoch", 2), ("step", 2)])
def test_schedulers_are_stepped_as_uncut(interval: str, frequency: int) -> None:
    data, start = rows_of_tokens(16), Tagger()
    uncut, module = (kind(start, interval=interval, frequency=frequency) for kind in (Uncut, Cuts))
    fitted(uncut, data, gradient_clip_val=CLIP, max_epochs=3)
    fitted(module, data, max_epochs=3)
    assert module.rates == uncut.rates and len(set(module.rates)) > 1
    assert far(module, uncut, start) < 1e-12


class Epochs(Cuts):
    log_as = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.cut_step(batch)
        self.log("train_loss", loss, batch_size=len(batch["ids"]), on_step=False, on_epoch=True)
        return loss


def test_the_logged_mean_of_an_epoch_is_the_uncuts() -> None:
    data, start = rows_of_tokens(16), Tagger()
    uncut, module = fitted(Uncut(start), data, gradient_clip_val=CLIP), fitted(Epochs(start), data)
    expected = uncut.callback_metrics["train_loss_epoch"].item()
    assert module.callback_metrics["train_loss"].item() == pytest.approx(expected, rel=1e-12)


class Naive(Uncut):
    """The usual loop, in which each sub-batch counts the same."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        cut = cutter_of(2).cut(batch)
        for sub in cut:
            self.manual_backward(self.net(sub.data) / len(cut))
        self.clip_gradients(optimizer, CLIP, "norm")
        optimizer.step()
        schedule: Any = self.lr_schedulers()
        schedule.step()
        return {"loss": torch.zeros(())}


def test_a_wrong_share_would_be_seen() -> None:
    data, start = rows_of_tokens(16), Tagger()
    uncut, naive = Uncut(start), Naive(start)
    fitted(uncut, data, gradient_clip_val=CLIP)
    fitted(naive, data)
    assert far(naive, uncut, start) > 1e-3


def test_a_scaler_is_taken_out_before_clipping() -> None:
    """Lightning clips before it unscales in manual optimization: the limit has to be scaled too."""
    data, start = rows_of_tokens(16), Tagger()
    uncut, module = Uncut(start), Cuts(start)
    fitted(uncut, data, gradient_clip_val=CLIP)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)  # type: ignore[method-assign]
    fitted(module, data, plugins=[plugin])
    assert far(module, uncut, start) < 1e-5  # torch adds 1e-6 to the norm that it divides by


class Automatic(Cuts):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = True


class Two(Cuts):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(p.parameters(), lr=0.1) for p in (self.net.embed, self.net.out)]  # type: ignore[arg-type]


class Plateau(Cuts):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


class Line(Cuts):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoCutter(Cuts):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.cutter = None


class Auto(Cuts):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.cutter = BatchCutter(rows="auto")


class NoLoss(Cuts):
    def cut_loss(self, data: Any) -> Any:
        return CutStepMixin.cut_loss(self, data)


class Breaks(Cuts):
    """Its second sub-batch has an infinite loss."""

    def cut_loss(self, data: Any) -> Any:
        first = self.net.embed.weight.grad is None  # type: ignore[union-attr]
        return self.net(data) / (1 if first else 0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Automatic, r"automatic optimization clears gradients before its backward, .* leave self\.automatic_optimization = Fa"),
        (Two, r"2 optimizers: write cut_step\(batch, loss_fn, optimizer=self\.optimizers\(\)\[0\]\)"),
        (Plateau, "ReduceLROnPlateau wants a metric, which a step does not have"),
        (Line, "LBFGS evaluates the loss several times a step"),
        (NoCutter, r"NoCutter has no cutter: write self\.cutter = BatchCutter\(rows=8\)"),
        (Auto, 'only a StepDriver finds out what "auto" is'),
        (NoLoss, r"NoLoss has no cut_loss\(self, data\): define it"),
        (Breaks, "the loss is inf in SubBatch"),
    ],
)  # fmt: skip
def test_what_is_refused(kind: type[Cuts], text: str) -> None:
    start = Tagger()
    module = kind(start)
    with pytest.raises(CutError, match=text):
        fitted(module, rows_of_tokens(6))
    assert torch.equal(ended(module), ended(start))
    assert all(p.grad is None for p in module.parameters())


class Adversary(Two):
    """Two optimizers, each with a loss of its own."""

    log_as = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self.optimizers()  # type: ignore[misc]
        first = self.cut_step(batch, self.net, optimizer=one)
        return first + self.cut_step(batch, lambda data: -self.net(data), optimizer=two)


def test_several_optimizers() -> None:
    data, start = rows_of_tokens(6), Tagger()
    expected = copy.deepcopy(start)
    batch = default_collate(data)
    for part, sign in ((expected.embed, 1.0), (expected.out, -1.0)):
        expected.zero_grad()
        (expected(batch) * sign).backward()
        nn.utils.clip_grad_norm_(part.parameters(), CLIP)
        torch.optim.SGD(part.parameters(), lr=0.1).step()
    module = Adversary(start)
    trainer = fitted(module, data)
    assert far(module, expected, start) < 1e-12
    assert trainer.global_step == 2  # optimizer steps, as Lightning counts them


def fabric_trained(rows: int | None, data: Any, start: nn.Module, divide: bool = False) -> tuple[list[float], nn.Module]:
    fabric = Fabric(accelerator="cpu", devices=1)
    net = copy.deepcopy(start)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=6))
    losses = []
    for batch in loader:
        if rows is None:
            loss = model(batch)
            fabric.backward(loss)
        elif divide:
            cut = cutter_of(rows).cut(batch)
            for sub in cut:
                loss = model(sub.data) / len(cut)
                fabric.backward(loss)
        else:
            loss = fabric_step(fabric, model, cutter_of(rows).cut(batch), model)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_fabric_as_uncut(rows: int) -> None:
    data, start = rows_of_tokens(16), Tagger()
    (losses, net), (expected, uncut) = fabric_trained(rows, data, start), fabric_trained(None, data, start)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert far(net, uncut, start) < 1e-12
    if rows < 6:
        assert far(fabric_trained(rows, data, start, divide=True)[1], uncut, start) > 1e-3


def test_what_fabric_refuses() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    cut = cutter_of(2).cut(default_collate(rows_of_tokens(4)))
    with pytest.raises(CutError, match=r"wants a model from fabric\.setup, not a Tagger"):
        fabric_step(fabric, Tagger(), cut, lambda data: data)
    module = Cuts(Tagger())
    fabric.setup(module)
    with pytest.raises(CutError, match="this module is set up by Fabric: write fabric_step"):
        module.cut_step(cut)


def _environment(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="1")


def _lightning_rank(rank: int, start: nn.Module, batches: list[Any]) -> list[Tensor]:
    _environment(rank)
    module = Cuts(start)
    trainer = trainer_of(devices=2, strategy="ddp", use_distributed_sampler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader([batches[rank]], batch_size=None))  # type: ignore[arg-type]
    return [ended(module), torch.tensor(module.losses)]


def _fabric_rank(rank: int, start: nn.Module, batches: list[Any]) -> list[Tensor]:
    _environment(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = copy.deepcopy(start)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    loss = fabric_step(fabric, model, cutter_of(2).cut(batches[rank]), model)
    fabric.clip_gradients(model, optimizer, max_norm=CLIP)
    optimizer.step()
    return [ended(net), loss[None]]


@pytest.mark.parametrize("function", [_lightning_rank, _fabric_rank])
def test_two_ranks_step_as_one_process_on_their_union(function: Any) -> None:
    data, start = rows_of_tokens(8), Tagger()
    ours = on_ranks(2, function, start, [default_collate(data[:5]), default_collate(data[5:])])  # 3 and 2 sub-batches
    uncut = copy.deepcopy(start)
    loss = uncut(default_collate(data))
    loss.backward()
    nn.utils.clip_grad_norm_(uncut.parameters(), CLIP)
    torch.optim.AdamW(uncut.parameters(), lr=0.1).step()
    for parameters, losses in ours:
        assert losses.tolist() == pytest.approx([loss.item()], rel=1e-12)
        assert float((parameters - ended(uncut)).norm() / (ended(uncut) - ended(start)).norm()) < 1e-12
