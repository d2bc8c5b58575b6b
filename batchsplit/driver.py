"""The small step-driving loop: one mathematical batch, one optimizer step."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from batchsplit.coupling import Coupled
from batchsplit.cuts import Cut
from batchsplit.cutter import BatchCutter
from batchsplit.errors import CutError
from batchsplit.fitting import Sizes
from batchsplit.losses import Accumulated, raise_unless_finite
from batchsplit.memory import Recovery
from batchsplit.precision import check_accumulate, summed
from batchsplit.ranks import Ended, reduction_of
from batchsplit.step import LossFn, accumulate, check_randomness
from batchsplit.unsplit_draws import UnsplitDraws


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

    Memory: with `on_oom="split"` (which a cutter with `rows="auto"` or `area="auto"` implies) a sub-batch that runs out
    of memory is run again in smaller parts, cut from the batch itself, and the step gives what it would have given. The
    sizes that fit are remembered by padded width, grow again after clean steps, and are in `state_dict()`. `loss_fn`
    must not change the batch's tensors in place: that is an error where a retry would meet it (writes into numpy arrays
    can't be seen), nor send anything backward itself. Nothing but running out of memory is retried.

    16-bit parameters: with `accumulate="float32"` their gradients add up in float32, are unscaled and clipped there,
    and are rounded to the parameters' dtype once, before the step; until then there is a float32 copy of them.
    `accumulate="parameter"` adds up in the parameters' dtype. Where you have set the `grad_dtype` of a parameter to
    float32, its gradient stays float32 for the optimizer. (Before torch 2.10 and under DistributedDataParallel they are
    clipped after they are rounded, as an unsplit batch's are.) Parameters of 32 bits and more are not touched by this.

    Gradients: a step first clears whatever gradients there are (to None), so it uses its own batch's and nothing else;
    they stay in place after the step, to be looked at. After an error (or Ctrl-C) they are cleared, and no parameter,
    optimizer state or schedule has changed, unless it came up within the optimizer's own step. To add to gradients of your
    own, use `run_step`.

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
        accumulate: str = "float32",
        randomness: str = "fresh",
        on_oom: str = "raise",
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
        if on_oom not in ("raise", "split"):
            raise CutError(f'on_oom={on_oom!r}: write on_oom="raise" or on_oom="split".')
        check_randomness(randomness)
        check_accumulate(accumulate)
        self.model, self.optimizer, self.loss_fn, self.cutter = model, optimizer, loss_fn, cutter
        self.scheduler, self.clip_norm, self.scaler, self.device = scheduler, clip_norm, scaler, device
        self.accumulate, self.randomness, self.progress = accumulate, randomness, progress
        self._learned: dict[Any, Any] = {}  # where the forward draws random numbers, for batches of the same shapes
        self.forward_context = _forward_context(autocast, model)
        self.closure_wanted = inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty
        if self.closure_wanted and scaler is not None:
            raise CutError(f"{type(optimizer).__name__} evaluates the loss several times a step, which a scaler can't serve.")
        self.on_oom = "split" if cutter is not None and cutter.auto else on_oom
        self.steps = 0
        self._sizes = Sizes()
        self._loader: Any = None  # of the last run
        self._position: Any = None  # where the next one's is to start
        self._reduction = reduction_of(model)
        self._coupled = Coupled(model, coupled)
        self._parameters = _all_parameters(model, optimizer)

    def step(self, batch: Any) -> StepReport:
        """Cut a batch (unless it is cut already), run its sub-batches, step once.

        Raises:
            CutError: the batch can't be cut, its weight is 0, or its loss can't be accumulated or is not finite.
        """
        start = time.perf_counter()
        self._retries = 0
        self._reduction = reduction_of(self.model)
        cut = self._reduction.agreed(lambda: self._ready(batch))
        try:
            result = self._gradients(cut)
        except BaseException as error:
            self._reduction.failed(tell=isinstance(error, Exception))
            self._clear()
            raise
        skipped = self._update(cut)
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        self.steps += 1
        return StepReport(
            result.loss, result.terms, result.outputs, result.grad_norm,
            cut.rows, len(result.cut or cut), time.perf_counter() - start, self._retries, skipped,
        )  # fmt: skip

    def run(self, dataloader: Iterable[Any]) -> Iterator[StepReport]:
        """One step for each batch (or cut) of a loader, with a progress bar; yields the reports as they come.

        Where other ranks take part, the loop ends for all as soon as one of them has no batch left, with a warning on
        those that have. After `load_state_dict`, the loader goes on where it was; in the middle of an epoch it gives the
        rest of it.

        Raises:
            CutError: as `step` does; a position was loaded, and this loader can't be set to one.
        """
        ranks = reduction_of(self.model).ranks
        dataloader = self._continued(dataloader)
        with tqdm(dataloader, total=_length(dataloader), unit="step", disable=not self.progress) as bar:
            for batch in ranks.batches(bar):
                try:
                    report = self.step(batch)
                except Ended as end:
                    text = f"{end} The loop ends here too, and this batch and what may follow are left out: "
                    warnings.warn(text + "give all ranks equally many batches, as DistributedSampler does.", stacklevel=2)
                    return
                if self.progress:
                    bar.set_postfix(loss=f"{float(report.loss):.4g}", sub_batches=report.sub_batches, refresh=False)
                yield report

    def _ready(self, batch: Any) -> Cut:
        cut = self._cut(batch)
        self._reduction.check(self.on_oom == "split" or cut._cutter.auto, self.randomness)
        if len(cut) > 1:
            self._coupled.look(stacklevel=7)
        return cut

    def _cut(self, batch: Any) -> Cut:
        if isinstance(batch, Cut):
            return batch
        if self.cutter is None:
            raise CutError("this StepDriver has no cutter: give it one, or batches that are cut already.")
        return self.cutter.cut(batch)

    def _gradients(self, cut: Cut) -> Accumulated:
        """The gradients of one batch, and nothing else's, in `.grad`, in as many attempts as its memory takes."""
        if self.on_oom == "raise" and not cut._cutter.auto:
            return self._attempt(cut)
        recovery = Recovery(cut, self._sizes, self.model, self.device)
        try:
            result = recovery.complete(self._attempt)
        finally:
            self._retries += recovery.retries
        recovery.ran(result.cut or cut)
        return result

    def _attempt(self, cut: Cut, recovery: Recovery | None = None) -> Accumulated:
        if recovery is not None and len(cut) > 1:
            self._coupled.look(stacklevel=6)
        self._clear()
        alone = self._reduction.ranks.count == 1
        whole = len(cut) == 1 and alone and self.scaler is None  # a scaler takes no float16 gradients, only float32
        with summed(self._parameters, self.model, accumulate=self.accumulate, whole=whole) as sums:
            result = accumulate(
                cut,
                self.loss_fn,
                backward=None if self.scaler is None else self._scaled_backward,
                forward_context=self.forward_context,
                device=self.device,
                reduction=self._reduction,
                recovery=recovery,
                sums=sums,
                draws=self._draws(cut),
            )
            if self.scaler is None or not self.scaler.is_enabled():  # an enabled scaler skips the step by itself
                raise_unless_finite(result, cut)
            result.grad_norm = self._clip()
        return result

    def _draws(self, cut: Cut) -> UnsplitDraws | None:
        if self.randomness == "fresh":
            return None
        context, plans = self.forward_context, self._learned
        return UnsplitDraws(cut, self.loss_fn, self.model, forward_context=context, device=self.device, plans=plans)

    def _scaled_backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _clip(self) -> Tensor | None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is None:
            return None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm).detach()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a sharded model's is in parts

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

        def closure() -> Any:  # a tensor: torch says float, and takes both
            return self._gradients(cut).loss

        try:
            self.optimizer.step(closure)
        except BaseException:
            with torch.no_grad():
                for p, value in zip(self._parameters, before, strict=True):
                    p.copy_(value)
            self._clear()
            raise

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on: the number of steps, the sizes found to fit in memory, the states of the
        scheduler and the scaler, and the loader's position in the last `run`, where these have one.

        Take it between steps. The states of the model, of the optimizer and of random number generators
        (`torch.get_rng_state()`, where there is dropout) are yours to save beside it.
        """
        owners = {"scheduler": self.scheduler, "scaler": self.scaler}
        state = {"steps": self.steps, "sizes": self._sizes.state_dict()}
        state |= {name: owner.state_dict() for name, owner in owners.items() if owner is not None}
        if self._position is not None:
            state["loader"] = self._position
        elif hasattr(self._loader, "state_dict"):
            state["loader"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; the loader of the next `run` starts at the position it holds.

        Raises:
            CutError: the state is not a driver's, or is that of one with a scheduler or scaler where this has none, or
                the other way round; nothing is loaded then.
        """
        if not isinstance(state, Mapping) or not {"steps", "sizes"} <= state.keys():
            raise CutError("this is no state of a StepDriver: take one with driver.state_dict().")
        owners = {"scheduler": self.scheduler, "scaler": self.scaler}
        for name, owner in owners.items():
            if (owner is None) != (name not in state):
                has, lacks = ("state", "driver") if owner is None else ("driver", "state")
                raise CutError(f"the {has} has a {name} and the {lacks} has none: make the driver as it was, with or without.")
        self._sizes.load_state_dict(state["sizes"])
        for name, owner in owners.items():
            if owner is not None:
                owner.load_state_dict(state[name])
        self.steps, self._position = int(state["steps"]), state.get("loader")

    def _continued(self, loader: Any) -> Any:
        """The loader of a run, at the position that was loaded, if one was."""
        if self._position is not None:
            if not hasattr(loader, "load_state_dict"):
                raise CutError(
                    f"the loaded state holds the position of a loader, and a {type(loader).__name__} has no "
                    "load_state_dict: run with the kind of loader it was taken from."
                )
            loader.load_state_dict(self._position)
        self._loader, self._position = loader, None
        return loader

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
        context: Callable[[], Any] = autocast
        return context
    raise CutError(f"autocast={autocast!r}: write a dtype like torch.bfloat16, a torch.autocast, or a function that returns one.")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
