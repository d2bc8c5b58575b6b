"""Hugging Face's Trainer, with `per_device_train_batch_size` as the mathematical batch and its steps cut to fit.

Written against transformers 5.24: `training_step` runs forward and backward of one batch, everything else (gradient
accumulation, clipping, logging, checkpoints) happens around it and sees the uncut batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import Trainer

from batchsplit.coupling import Coupled
from batchsplit.cuts import Cut, SubBatch
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError, WeightError
from batchsplit.precision import Sums, summed
from batchsplit.trainers.hf_limits import check_cutter, check_ranks, check_trainer, shards
from batchsplit.trainers.hf_losses import Asked, changed, countable, counted, default_weight
from batchsplit.weights import name_of, row_weight, wide

_Base = Trainer if TYPE_CHECKING else object


class CutTrainerMixin(_Base):
    """Cuts the batches of any subclass of Trainer: `class MyTrainer(CutTrainerMixin, SFTTrainer)`.

    It takes `cutter=BatchCutter(...)` and `coupled="warn"`, and passes all other arguments on. A training or prediction
    step runs the sub-batches of its batch one after another through the Trainer's own step; gradients, logged losses,
    predictions and metrics are those of the uncut batch. A loss that is divided by `num_items_in_batch` is added up as
    it is; any other counts by its share. Which of the two it is, and whether it adds up over rows at all, is seen on
    the first batch that is cut, in a few forwards without gradient. A weight of the cutter other than `row_weight` is
    taken for yours; else labels are counted as the loss counts them. `coupled` says what losses and layers that mix the
    rows of a batch get: "raise", "warn" (once) or "allow". After an error in a training step gradients are cleared.

    Raises:
        CutError: the cutter has named weights or a limit that is to be found by memory; DataParallel, SageMaker's model
            parallelism, DeepSpeed, context parallelism, an optimizer that steps inside the backward,
            `auto_find_batch_size`. In a step: whatever `BatchCutter.cut` raises, a weight that contradicts
            `num_items_in_batch`, a batch of weight 0, under FSDP another number of sub-batches than other ranks have.
    """

    def __init__(self, *args: Any, cutter: BatchCutter, coupled: str = "warn", **kwargs: Any) -> None:
        check_cutter(cutter)
        super().__init__(*args, **kwargs)
        check_trainer(self)
        self.cutter, self.coupled = cutter, coupled
        self._weighted: dict[str, BatchCutter] = {}
        self._learn_anew()

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:  # type: ignore[override]
        """Forward and backward of every sub-batch; the loss of the whole batch, detached."""
        step = super().training_step
        whole = self.cutter.cut(inputs)
        check_ranks(self, whole)
        if len(whole) == 1:
            return step(model, inputs, num_items_in_batch)
        if self._learned_of is not self.model:  # model_init has made another one
            self._learn_anew()
        model.train()  # as the step is about to do
        self._watched.look(stacklevel=3)
        takes = self._ask(model, inputs, num_items_in_batch)
        cut = self._weighed(inputs, takes)
        if takes and num_items_in_batch is not None and not num_items_in_batch > 0:
            raise WeightError("num_items_in_batch is 0: every label is ignored, so there is nothing to step on.")
        factors = [self._factor(sub, takes) for sub in cut]
        losses = []
        with _cleared_on_error(model), summed(list(model.parameters()), model) as sums:
            runs = self._runs(factors)
            for i, (index, factor) in enumerate(runs):
                sub, last = cut[index], i == len(runs) - 1
                if last and sums is not None:
                    sums.last()
                with _named(sub), nullcontext() if last else self._hold(model), self._scaled(factor, sums):
                    losses.append(step(model, sub.data, num_items_in_batch))
            if sums is not None:
                sums.settle()
        return _total(losses, torch.promote_types(losses[0].dtype, torch.float32))

    def prediction_step(  # type: ignore[override]
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Loss, outputs and labels of a batch, its sub-batches run one after another and joined in its order."""
        kwargs.update(prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys)
        predict = partial(super().prediction_step, **kwargs)
        whole = self.cutter.cut(inputs)
        check_ranks(self, whole)
        if len(whole) == 1:
            return predict(model, inputs)
        takes = False
        if self._has_loss(inputs):
            takes = self._ask(model, inputs, counted(self, inputs) if countable(self, inputs) else None)
        cut = self._weighed(inputs, takes)
        parts = []
        with self._counting(inputs):
            for sub in cut:
                with _named(sub), self._scaled(partial(self._eval_factor, sub, takes)):
                    parts.append(predict(model, sub.data))
        losses, logits, labels = zip(*parts, strict=True)
        loss = None if losses[0] is None else _total(losses, losses[0].dtype)
        return loss, _joined(cut, logits), _joined(cut, labels)

    def _learn_anew(self) -> None:
        self._learned_of = self.model
        self._watched = Coupled(cast(torch.nn.Module, self.model), self.coupled)
        self._asked: dict[bool, bool] = {}  # with a count and without: does the loss divide by it?

    def _weighed(self, inputs: Any, takes: bool) -> Cut:
        """The cut of a batch by your weight, or by the one that fits its labels where you gave none."""
        if self.cutter.weight is not row_weight:
            return self.cutter.cut(inputs)
        weight = default_weight(self, inputs, takes)
        cutter = self._weighted.setdefault(name_of(weight), changed(self.cutter, weight=weight))
        return cutter.cut(inputs)

    def _ask(self, model: torch.nn.Module, inputs: Any, count: Any) -> bool:
        """Does the loss divide by the count? Asked once, when a batch is first cut."""
        known = self._asked.get(count is not None)
        if known is not None:
            return known
        if not shards(self):
            model = self.accelerator.unwrap_model(model)  # the forwards of DistributedDataParallel wait for other ranks
        asked = Asked(self, model, self.cutter, inputs, count)
        takes = asked.takes_count()
        cut = self._weighed(inputs, takes)
        labels = counted(self, inputs)
        if takes and self.cutter.weight not in (row_weight, None) and labels is not None and cut.weight != labels:
            raise CutError(
                f"weight={name_of(self.cutter.weight)} is {cut.weight:g} in this batch, but the loss divides by "
                f"num_items_in_batch, of which this batch has {labels:g}: leave weight out, the Trainer counts for you."
            )
        if self.coupled != "allow" and not shards(self):  # under FSDP the ranks might differ in what there is to see
            text = asked.against_halves(cut._cutter.weight, takes)
            if text is not None and self.coupled == "raise":
                raise CutError(text)
            if text is not None:
                warnings.warn(text, stacklevel=4)
        self._asked[count is not None] = takes
        return takes

    def _factor(self, sub: SubBatch, takes: bool) -> float:
        """What the loss of a sub-batch is multiplied by."""
        return 1.0 if takes else sub.share

    def _eval_factor(self, sub: SubBatch, takes: bool, has_count: bool) -> float:
        try:
            return self._factor(sub, takes and has_count)
        except WeightError:
            if sub._cut.weight == 0:
                return float("nan")  # a mean over no labels, which the Trainer leaves out of its mean of losses
            raise

    def _runs(self, factors: list[float]) -> list[tuple[int, float]]:
        """The sub-batches to run and their factors; one of no weight has a loss of 0/0, and is left out.

        Under FSDP, where every forward is the ranks' together, another one runs in its place and counts nothing.
        """
        runs = [(index, factor) for index, factor in enumerate(factors) if factor != 0]
        absent = len(factors) - len(runs) if shards(self) else 0
        return [(runs[0][0], 0.0)] * absent + runs

    def _hold(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Keeps the ranks from reducing gradients; nothing inside a context of the Trainer's own that does.

        (Accelerate's `no_sync` turns FSDP2's reduction on again when it ends, whatever it was before.)
        """
        state = self.accelerator.gradient_state
        if not self.accelerator.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        if getattr(self, "is_distributed_loading_by_transformers", False):
            return self._defer_fsdp_gradient_reduction() if shards(self) else nullcontext()
        return self.accelerator.no_sync(model=model)

    @contextmanager
    def _scaled(self, factor: float | Callable[[bool], float], sums: Sums | None = None) -> Iterator[None]:
        """The loss is multiplied before it goes backward, whichever class's `compute_loss` it comes from."""

        def scaled(*args: Any, **kwargs: Any) -> Any:
            returned = compute_loss(*args, **kwargs)
            loss = returned[0] if isinstance(returned, tuple) else returned
            by = factor(kwargs.get("num_items_in_batch") is not None) if callable(factor) else factor
            rest = 1.0 if sums is None else sums.rest_of(((by, loss.dtype),))
            if sums is not None:
                sums.weigh(rest)
            loss = torch.zeros_like(loss) if by == 0 and not loss.requires_grad else loss * (by / rest)
            return (loss, *returned[1:]) if isinstance(returned, tuple) else loss

        compute_loss = self.compute_loss
        with _shadowed(self, "compute_loss", scaled):
            yield

    def _counting(self, inputs: Any) -> AbstractContextManager[None]:
        """Prediction steps count the labels of their own sub-batch: in here they are given those of the whole batch."""
        count = self._get_num_items_in_batch
        whole = cache(lambda: count([inputs], self.args.device))  # once, since the ranks may count together
        return _shadowed(self, "_get_num_items_in_batch", lambda *args: whole())

    def _has_loss(self, inputs: Any) -> bool:
        """Will a prediction step compute one?"""
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        return bool(inputs.get("return_loss") or self.can_return_loss)


class CutTrainer(CutTrainerMixin, Trainer):
    """Transformers' Trainer with batches that are cut: `CutTrainer(model, args, ..., cutter=BatchCutter(rows=4))`.

    `per_device_train_batch_size` is the mathematical batch; see `CutTrainerMixin`.

    Example:
        >>> import tempfile, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from batchsplit import BatchCutter
        >>> from batchsplit.trainers.hf import CutTrainer
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        >>> ids = torch.randint(20, (12, 8))
        >>> data = [{"input_ids": row, "labels": row} for row in ids]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), per_device_train_batch_size=6, num_train_epochs=1, use_cpu=True,
        ...     save_strategy="no", report_to="none", disable_tqdm=True,
        ... )
        >>> CutTrainer(model, args, train_dataset=data, cutter=BatchCutter(rows=2)).train().global_step
        {'train_runtime': ...}
        2
    """


def _joined(cut: Cut, parts: Any) -> Any:
    return None if parts[0] is None else cut.join(parts)


def _total(losses: Any, dtype: torch.dtype) -> Tensor:
    return torch.stack([wide(loss.detach()) for loss in losses]).sum().to(dtype)


@contextmanager
def _shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this object alone stands before its class's, for a while."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


@contextmanager
def _named(sub: SubBatch) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"This came up in {sub!r}; nothing was stepped.")
        raise


@contextmanager
def _cleared_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Half the gradients of a batch are of no use to anyone who catches the error and goes on."""
    try:
        yield
    except BaseException:
        model.zero_grad()
        raise
