"""Lightning's Trainer (manual optimization) and Fabric, with batches that are cut inside the training step.

Written against lightning 2.6. Automatic optimization can't be cut: it clears gradients before its one backward.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.ranks import Ranks, Reduction
from batchsplit.step import LossFn, check_randomness, gradients_of, run_step

_Base = LightningModule if TYPE_CHECKING else object


class CutStepMixin(_Base):
    """Gives a LightningModule `cut_step(batch)`: `class Mine(CutStepMixin, LightningModule)`.

    Say what is to be done in attributes: `cutter` (needed), `clip_norm` (the largest norm of the whole gradient), `log_as`
    (the name that the batch's loss is logged under, None for not at all), `randomness`. Define `cut_loss(data)`, which
    gives the loss of one sub-batch as `loss_fn` does for a `StepDriver`, and call `cut_step` in `training_step`.

    The mixin turns manual optimization on. The optimizer steps once a batch, so `trainer.global_step`, and what depends
    on it, means what it meant; schedulers are stepped as automatic optimization steps them. Hooks around the backward
    run once for each sub-batch.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule
        >>> from batchsplit import BatchCutter
        >>> class Mine(CutStepMixin, LightningModule):
        ...     cutter = BatchCutter(rows=4)
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 1)
        ...     def cut_loss(self, data):
        ...         return self.layer(data).mean()
        ...     def training_step(self, batch, batch_idx):
        ...         return self.cut_step(batch)
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> Mine().automatic_optimization
        False
    """

    cutter: BatchCutter | None = None
    clip_norm: float | None = None
    log_as: str | None = "train_loss"
    randomness: str = "fresh"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def cut_loss(self, data: Any) -> Any:
        """The loss of one sub-batch: a scalar tensor, or a mapping of named terms. Yours to define."""
        raise CutError(
            f"{type(self).__name__} has no cut_loss(self, data): define it, or write cut_step(batch, loss_fn)."
        )

    def cut_step(self, batch: Any, loss_fn: LossFn | None = None, *, optimizer: Any = None) -> Tensor:
        """One optimizer step on a batch (or a Cut): zero gradients, run its sub-batches, clip, step, schedule, log.

        `loss_fn` stands in for `cut_loss`; `optimizer` is needed where there are several (then schedulers are yours to
        step). Returns the whole batch's loss, detached: a mean over all ranks' rows. After an error gradients are cleared and nothing was stepped.

        Raises:
            CutError: automatic optimization, no cutter, a strategy, optimizer or scheduler that this can't serve, or
                whatever `run_step` raises.
        """
        reduction = self._cut_reduction()
        own = optimizer is None
        opt: Any = self._cut_optimizer(optimizer)
        check_randomness(self.randomness)
        cut = batch if isinstance(batch, Cut) else self._cut_cutter().cut(batch)
        opt.zero_grad()
        loss = gradients_of(cut, loss_fn or self.cut_loss, reduction, self.manual_backward, self.randomness)
        if self.clip_norm is not None:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()  # the optimizer's step is yet to take it out
            self.clip_gradients(opt, gradient_clip_val=self.clip_norm * scale, gradient_clip_algorithm="norm")
        opt.step()
        if own:
            self._cut_schedule()
        if self.log_as is not None:
            self.log(self.log_as, loss, batch_size=cut.rows, prog_bar=True)
        return loss

    def _cut_reduction(self) -> Reduction:
        """How gradients get to other ranks: Lightning runs the training step inside of DistributedDataParallel's forward."""
        if self.automatic_optimization:
            raise CutError(
                "automatic optimization clears gradients before its backward, so only the last sub-batch would count: leave "
                "self.automatic_optimization = False, as CutStepMixin sets it."
            )
        if self.fabric is not None:
            raise CutError("this module is set up by Fabric: write fabric_step(fabric, model, cut, loss_fn).")
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            ranks = Ranks([torch.distributed.group.WORLD], self.device) if self.trainer.world_size > 1 else None
            return Reduction(strategy.model, None, strategy.block_backward_sync, ranks)
        if isinstance(strategy, SingleDeviceStrategy):
            return Reduction(self)
        raise CutError(
            f"{type(strategy).__name__}: a training step is cut on a single device or under DDP; "
            "with FSDP use Fabric and fabric_step."
        )

    def _cut_cutter(self) -> BatchCutter:
        if not isinstance(self.cutter, BatchCutter):
            raise CutError(f"{type(self).__name__} has no cutter: write self.cutter = BatchCutter(rows=8).")
        if self.cutter.auto:
            raise CutError(f'{self.cutter!r}: only a StepDriver finds out what "auto" is; give a number.')
        return self.cutter

    def _cut_optimizer(self, optimizer: Any) -> Any:
        if optimizer is None:
            optimizer = self.optimizers()
            if isinstance(optimizer, list):
                raise CutError(
                    f"{len(optimizer)} optimizers: write cut_step(batch, loss_fn, optimizer=self.optimizers()[0])."
                )
            for config in self.trainer.lr_scheduler_configs:
                if isinstance(config.scheduler, ReduceLROnPlateau):
                    raise CutError(
                        "ReduceLROnPlateau wants a metric, which a step does not have: pass optimizer=self.optimizers() "
                        "to cut_step and step the scheduler yourself, in on_validation_epoch_end."
                    )
        plain = getattr(optimizer, "optimizer", optimizer)
        if inspect.signature(plain.step).parameters["closure"].default is inspect.Parameter.empty:
            raise CutError(f"{type(plain).__name__} evaluates the loss several times a step: use a StepDriver with it.")
        return optimizer

    def _cut_schedule(self) -> None:
        """What automatic optimization does after a step, and after the last one of an epoch."""
        trainer = self.trainer
        done = {"step": trainer.fit_loop.epoch_loop.batch_idx + 1}
        if trainer.is_last_batch:
            done["epoch"] = trainer.current_epoch + 1
        for config in trainer.lr_scheduler_configs:
            count = done.get(config.interval)
            if count is not None and count % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)


def fabric_step(
    fabric: Any, model: Any, cut: Cut, loss_fn: LossFn, *, sync: Any = None, randomness: str = "fresh"
) -> Tensor:
    """Forward and backward of one mathematical batch by `fabric.backward`; returns the batch's loss.

    `model` is what `fabric.setup` returned. Gradients are reduced among ranks with the last sub-batch only. Clip, step
    and zero gradients after it, as without a cut. Other arguments and errors are as for `run_step`.

    Raises:
        CutError: the model is not set up by Fabric, DeepSpeed, or whatever `run_step` raises.

    Example:
        >>> import torch
        >>> from lightning.fabric import Fabric
        >>> from batchsplit import BatchCutter
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> model = fabric.setup(torch.nn.Linear(3, 1))
        >>> cut = BatchCutter(rows=2).cut(torch.rand(5, 3))
        >>> fabric_step(fabric, model, cut, lambda x: model(x).mean()).shape
        torch.Size([])
    """
    if not isinstance(getattr(model, "_orig_mod", model), _FabricModule):
        raise CutError(f"fabric_step wants a model from fabric.setup, not a {type(model).__name__}.")
    if isinstance(fabric.strategy, FabricDeepSpeed):
        raise CutError(
            "DeepSpeed steps inside its backward, so sub-batches can't be parts of one step there: use DDP or FSDP2."
        )
    if sync is None and fabric.world_size > 1:
        sync = partial(fabric.no_backward_sync, model)
    return run_step(cut, loss_fn, model=model, backward=fabric.backward, sync=sync, randomness=randomness)
