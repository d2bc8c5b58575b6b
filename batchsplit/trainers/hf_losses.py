"""What a Trainer's loss is divided by: known for Transformers' own losses, and asked of every loss once.

Some models divide a sum by `num_items_in_batch`, some take it and ignore it, some refuse it. No signature tells them
apart, so the loss of some rows is computed with the count and with twice the count, and compared with the losses of the
halves of these rows: without gradients, in eval mode, the random numbers put back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError, LossError, WeightError
from batchsplit.weights import Weight, label_weight, name_of, row_weight

TOKEN_MEANS = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)


def default_weight(trainer: Trainer, inputs: Any, takes_count: bool) -> Weight:
    """The denominator of the mean loss of a batch, for a cutter that names none.

    Rows where there are no labels or where they are no whole numbers; else labels other than -100, after the shift
    where the loss shifts them.

    Raises:
        CutError: nobody can know what a loss of your own is a mean over.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return row_weight
    if "shift_labels" in inputs:
        return label_weight("shift_labels")
    if labels.dim() == 1:
        return label_weight("labels")
    if not takes_count and not _is_token_mean(trainer):
        raise CutError(
            f"labels of shape {tuple(labels.shape)}, and the loss is {_whose(trainer)}, which does not divide by "
            "num_items_in_batch: it is a mean, and what over can't be known. Say so: "
            'BatchCutter(..., weight=label_weight("labels", shifted=True)) for tokens after the causal shift, '
            'weight=label_weight("labels") for all labels but -100, weight=lambda data: len(data["labels"]) for rows, '
            "weight=None for a sum."
        )
    smoothed = not takes_count and trainer.label_smoother is not None
    return label_weight("labels", shifted=_is_causal(trainer) or (not smoothed and _count_is_shifted(trainer)))


def _plain(trainer: Trainer) -> Any:
    """The model under its wrappers."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter (PEFT)


def _count_is_shifted(trainer: Trainer) -> bool:
    """Does the Trainer count `labels[..., 1:]`? (Not for every causal model: GPT-2's says nothing of its loss.)"""
    model = _plain(trainer)
    decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return decoder and _loss_type(model) is ForCausalLMLoss


def _is_causal(trainer: Trainer) -> bool:
    return type(_plain(trainer)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _loss_type(model: Any) -> Any:
    return LOSS_MAPPING.get(getattr(model, "loss_type", None) or "")


def _is_token_mean(trainer: Trainer) -> bool:
    """Is the loss Transformers' own, and a mean over labels other than -100?"""
    if _own_loss(trainer):
        return False
    return trainer.label_smoother is not None or _loss_type(_plain(trainer)) in TOKEN_MEANS or _is_causal(trainer)


def _own_loss(trainer: Trainer) -> bool:
    return trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss


def _whose(trainer: Trainer) -> str:
    if trainer.compute_loss_func is not None:
        return f"compute_loss_func ({name_of(trainer.compute_loss_func)})"
    if _own_loss(trainer):
        return f"{type(trainer).__name__}.compute_loss"
    return f"that of {type(_plain(trainer)).__name__}"


def countable(trainer: Trainer, data: Any) -> bool:
    """Does the Trainer count the labels of a batch, to pass them on?"""
    passes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return bool(passes and counted(trainer, data) is not None and "labels" in data)


def counted(trainer: Trainer, data: Any) -> float | None:
    """How many labels the Trainer counts in a batch, on this process; None where it counts none."""
    path = "shift_labels" if "shift_labels" in data else "labels"
    if not isinstance(data.get(path), Tensor):
        return None
    shifted = path == "labels" and _count_is_shifted(trainer)
    labels = data[path][..., 1:] if shifted else data[path]
    return float((labels != -100).sum())


class Asked:
    """What a loss says of itself when it is asked: does it divide by the count, and does it add up over rows?"""

    def __init__(self, trainer: Trainer, model: torch.nn.Module, cutter: BatchCutter, inputs: Any, count: Any) -> None:
        self.trainer, self.model, self.inputs, self.count = trainer, model, inputs, count
        rows = max(cutter.cut(inputs)[0].rows, 2)  # no more than fit, but for a cut into single rows
        self.cutter = changed(cutter, rows=rows, area=None, parts=None, sizes="full", weight=None)
        heads = self.cutter.cut(inputs)
        sizes = [(counted(trainer, sub.data) or 0) if count is not None and sub.rows >= 2 else 0 for sub in heads]
        self.which = sizes.index(max(sizes))
        self.whole = self._loss(self._head(), count)

    def _head(self) -> Any:
        return self.cutter.cut(self.inputs)[self.which].data  # new containers each time: compute_loss may pop from them

    def takes_count(self) -> bool:
        """Is the loss a sum over `num_items_in_batch`, and not a mean of its own?

        Raises:
            CutError: it is neither, or nothing can be told from it.
        """
        if self.count is None:  # whoever has no count may still divide by one of its own, and says so
            return getattr(self.trainer, "loss_is_scaled_for_ga", None) is True
        once, twice = self.whole, self._loss(self._head(), self.count * 2)
        if not abs(once) > 0:  # NaN as well
            raise LossError(
                f"the loss of {self._rows()} rows is {once}, so it can't be seen whether it is divided by "
                "num_items_in_batch or is a mean. Leave such rows out of the first batch."
            )
        if _close(once, twice, self._tolerance()):
            return False
        if _close(once, 2 * twice, self._tolerance()):
            return True
        raise CutError(
            f"the loss is {once:.6g}, and {twice:.6g} when num_items_in_batch is doubled: a part of it is divided by "
            "the count and a part is not (a router's load-balancing loss?), so no share makes its sub-batches add up. "
            "Leave that part out (router_aux_loss_coef=0), or divide all of the loss by num_items_in_batch."
        )

    def against_halves(self, weight: Any, takes_count: bool) -> str | None:
        """Why the loss of some rows is not that of their halves put together; None where it is."""
        halves = changed(self.cutter, rows=None, parts=2, weight=weight)
        try:
            shares = [1.0, 1.0] if takes_count else [half.share for half in halves.cut(self._head())]
        except WeightError:
            return None  # no labels in there: a later batch will tell, or raise
        losses = [
            0.0 if share == 0 else share * self._loss(halves.cut(self._head())[i].data, self.count)
            for i, share in enumerate(shares)
        ]
        if _close(sum(losses), self.whole, self._tolerance()) or not _finite(self.whole, *losses):
            return None
        divided = "num_items_in_batch" if takes_count else f"weight={name_of(weight)}"
        return (
            f"the loss of {self._rows()} rows is {self.whole:.6g}, and that of their halves, put together by "
            f"{divided}, {sum(losses):.6g}: cut training is not exact. Either the loss is a mean over something else: "
            "write BatchCutter(..., weight=...) for what it is divided by; or it compares rows with one another "
            "(contrastive, pairs, a router's load): then no cut of the batch adds up. "
            'batchsplit.check(...) says more; coupled="allow" accepts it.'
        )

    def _rows(self) -> int:
        return self.cutter.cut(self.inputs)[self.which].rows

    def _loss(self, data: Any, count: Any) -> float:
        trainer = self.trainer
        data = trainer._prepare_inputs(data)
        with torch.no_grad(), _undisturbed(self.model, trainer.args.device), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(self.model, data, num_items_in_batch=count)
        assert isinstance(loss, Tensor)
        self._short = loss.dtype in (torch.bfloat16, torch.float16)
        return float(loss.detach().mean())

    def _tolerance(self) -> float:
        """How far sums in another order may be apart, relatively."""
        short = self._short or self.trainer.accelerator.mixed_precision != "no"
        dtypes = {p.dtype for p in self.model.parameters()}
        return 2e-2 if short or dtypes & {torch.bfloat16, torch.float16} else 1e-3


def changed(cutter: BatchCutter, **values: Any) -> BatchCutter:
    """A cutter like another one, but for some of its settings."""
    other = copy.copy(cutter)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _finite(*values: float) -> bool:
    return all(abs(value) < float("inf") for value in values)


@contextmanager
def _undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode; afterwards the modes of all modules and the random streams are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
