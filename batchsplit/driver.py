"""The small step-driving loop: one mathematical batch, one optimizer step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from batchsplit.coupling import Coupled
from batchsplit.cutter import BatchCutter, Cut
from batchsplit.errors import CutError
from batchsplit.step import Accumulated, LossFn, accumulate, check_randomness, raise_unless_finite


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    `loss` and `terms` are the whole batch's, detached; `outputs` what `loss_fn` returned beside the loss, joined in the
    batch's order; `grad_norm` the norm of the whole gradient before clipping (None without `clip_norm`); `rows` and
    `sub_batches` how many; `seconds` what the step took; `retries` how often it was begun anew after running out of
    memory; `skipped` whether the scaler left it out for an overflow.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, StepDriver
        >>> model = torch.nn.Linear(3, 1)
        >>> driver = StepDriver(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: model(x).mean(), BatchCutter(rows=2))
        >>> report = driver.step(torch.rand(5, 3))
        >>> report.rows, report.sub_batches, report.skipped
        (5, 3, False)
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    outputs: Any = None
    grad_norm: Tensor | None = None
    rows: int = 0
    sub_batches: int = 0
    seconds: float = 0.0
    retries: int = 0
    skipped: bool = False

    def __repr__(self) -> str:
        extra = ", skipped" if self.skipped else ""
        return f"StepReport(loss={float(self.loss):.6g}, rows={self.rows}, sub_batches={self.sub_batches}, seconds={self.seconds:.3g}{extra})"


class StepDriver:
    """Drives training steps: cuts each batch, runs its sub-batches, and steps the optimizer once.

    `loss_fn(data)` takes a sub-batch's data and returns a scalar loss, a mapping of named scalar terms, or either with
    outputs beside it. `scheduler` is stepped once a step (not after a skipped one); `clip_norm` clips the whole
    accumulated gradient; `scaler` is a `torch.amp.GradScaler`; `autocast` a dtype, a `torch.autocast`, or a function that
    returns a context for the forward; `device` takes one sub-batch at a time, the batch stays where it is. `coupled` says
    what a train-mode BatchNorm about to be cut gets: "raise", "warn" (once) or "allow". `progress=False` hides the bar.

    Gradients: a step first clears whatever gradients there are (to None), so it uses its own batch's and nothing else;
    they stay in place after the step, to be looked at. After an error they are cleared, and no parameter, optimizer state
    or schedule has changed. To add to gradients of your own, use `run_step`.

    Raises:
        CutError: an argument of the wrong kind; in a step, whatever `BatchCutter.cut` and `run_step` raise.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, StepDriver
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss_fn(data):
        ...     return ((model(data["x"]) - data["y"]) ** 2).mean()
        >>> driver = StepDriver(model, optimizer, loss_fn, BatchCutter(rows=4), progress=False)
        >>> loader = [{"x": torch.rand(10, 3), "y": torch.rand(10, 1)} for _ in range(2)]
        >>> [report.sub_batches for report in driver.run(loader)]
        [3, 3]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        cutter: BatchCutter | None = None,
        *,
        scheduler: Any = None,
        clip_norm: float | None = None,
        scaler: Any = None,
        autocast: Any = None,
        device: Any = None,
        randomness: str = "fresh",
        coupled: str = "warn",
        progress: bool = True,
    ) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise CutError(
                "scheduler: ReduceLROnPlateau wants a metric, which a step does not have; "
                "leave it out and call scheduler.step(metric) yourself."
            )
        if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
            raise CutError(f"clip_norm={clip_norm!r}: write the largest norm the gradient may have, or None.")
        check_randomness(randomness)
        self.model, self.optimizer, self.loss_fn, self.cutter = model, optimizer, loss_fn, cutter
        self.scheduler, self.clip_norm, self.scaler, self.device = scheduler, clip_norm, scaler, device
        self.progress = progress
        self.forward_context = _forward_context(autocast, model)
        self.closure_wanted = inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty
        if self.closure_wanted and scaler is not None:
            raise CutError(f"{type(optimizer).__name__} evaluates the loss several times a step, which a scaler can't serve.")
        self._coupled = Coupled(model, coupled)
        self._parameters = _all_parameters(model, optimizer)

    def step(self, batch: Any) -> StepReport:
        """Cut a batch (unless it is cut already), run its sub-batches, step once.

        Raises:
            CutError: the batch can't be cut, its weight is 0, or its loss can't be accumulated or is not finite.
        """
        start = time.perf_counter()
        cut = self._cut(batch)
        if len(cut) > 1:
            self._coupled.look(stacklevel=3)
        try:
            result = self._gradients(cut)
            grad_norm = self._clip()
        except BaseException:
            self._clear()
            raise
        skipped = self._update(cut)
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        return StepReport(
            result.loss, result.terms, result.outputs, grad_norm,
            cut.rows, len(cut), time.perf_counter() - start, skipped=skipped,
        )  # fmt: skip

    def run(self, dataloader: Iterable[Any]) -> Iterator[StepReport]:
        """One step for each batch (or cut) of a loader, with a progress bar; yields the reports as they come."""
        with tqdm(dataloader, total=_length(dataloader), unit="step", disable=not self.progress) as bar:
            for batch in bar:
                report = self.step(batch)
                if self.progress:
                    bar.set_postfix(loss=f"{float(report.loss):.4g}", sub_batches=report.sub_batches, refresh=False)
                yield report

    def _cut(self, batch: Any) -> Cut:
        if isinstance(batch, Cut):
            return batch
        if self.cutter is None:
            raise CutError("this StepDriver has no cutter: give it one, or batches that are cut already.")
        return self.cutter.cut(batch)

    def _gradients(self, cut: Cut) -> Accumulated:
        """The gradients of one batch, and nothing else's, in `.grad`."""
        self._clear()
        result = accumulate(
            cut,
            self.loss_fn,
            model=self.model,
            backward=None if self.scaler is None else self._scaled_backward,
            forward_context=self.forward_context,
            device=self.device,
        )
        if self.scaler is None or not self.scaler.is_enabled():  # an enabled scaler skips the step by itself
            raise_unless_finite(result, cut)
        return result

    def _scaled_backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _clip(self) -> Tensor | None:
        if self.clip_norm is None:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm).detach()

    def _update(self, cut: Cut) -> bool:
        """Step the optimizer; True where the scaler left the step out."""
        if self.closure_wanted:
            self._step_with_closure(cut)
            return False
        if self.scaler is None:
            self.optimizer.step()
            return False
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before

    def _step_with_closure(self, cut: Cut) -> None:
        """For optimizers such as LBFGS that evaluate the loss again and again, each time at other parameters."""
        before = [p.detach().clone() for p in self._parameters]

        def closure() -> Tensor:
            result = self._gradients(cut)
            self._clip()
            return result.loss

        try:
            self.optimizer.step(closure)
        except BaseException:
            with torch.no_grad():
                for p, value in zip(self._parameters, before, strict=True):
                    p.copy_(value)
            self._clear()
            raise

    def _clear(self) -> None:
        for p in self._parameters:
            p.grad = None

    def __repr__(self) -> str:
        return f"StepDriver({type(self.model).__name__}, {type(self.optimizer).__name__}, {self.cutter!r})"


def _all_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of the model and of the optimizer (a loss may have some of its own), each once."""
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    return list(dict.fromkeys([*model.parameters(), *optimized]))


def _forward_context(autocast: Any, model: torch.nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    if autocast is None or autocast is False:
        return None
    if isinstance(autocast, torch.dtype) or autocast is True:
        first = next(model.parameters(), torch.empty(0))
        return partial(torch.autocast, first.device.type, dtype=None if autocast is True else autocast)
    if hasattr(autocast, "__enter__"):
        return lambda: autocast
    if callable(autocast):
        return autocast
    raise CutError(f"autocast={autocast!r}: write a dtype like torch.bfloat16, a torch.autocast, or a function that returns one.")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
