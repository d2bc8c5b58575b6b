"""Forward and backward of every sub-batch: the gradients and the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from batchsplit.containers import map_leaves
from batchsplit.cutter import Cut, SubBatch
from batchsplit.errors import CutError
from batchsplit.losses import Accumulated, Losses, raise_unless_finite, total, weighed
from batchsplit.memory import Recovery
from batchsplit.plan import offsets
from batchsplit.precision import Sums, summed
from batchsplit.ranks import harmless, hold_back, several_ranks
from batchsplit.unsplit_draws import UnsplitDraws

LossFn = Callable[[Any], Any]


def run_step(
    cut: Cut,
    loss_fn: LossFn,
    *,
    model: torch.nn.Module | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    sync: Any = None,
    randomness: str = "fresh",
) -> Tensor:
    """Run forward and backward of every sub-batch, without an optimizer, and return the whole batch's loss.

    `loss_fn(data)` takes a sub-batch's data and returns its loss: a scalar tensor, a mapping of named scalar terms, or
    either with outputs beside it. Each is multiplied by its share and sent backward, so gradients add up to the whole
    batch's, on top of what `.grad` held before, as `backward()` does. `backward` stands in for `loss.backward()` (a
    scaler's, an accelerator's). With `model` given, gradient reduction among ranks is held back until the last sub-batch
    (`sync`: another context to hold it back, or False), after an error its gradients are as they were before, and those
    of its 16-bit parameters add up in float32, what `.grad` held before included, and are rounded once.
    A sub-batch of weight 0 runs forward only. The result is detached, 0-dim, in float32 or wider.

    Raises:
        CutError: the loss is no scalar, has no gradient, does not match the weights by name, or is not finite; the
            whole weight is 0.

    Example:
        >>> import torch
        >>> from batchsplit import BatchCutter, run_step
        >>> model = torch.nn.Linear(3, 1)
        >>> cut = BatchCutter(rows=2).cut({"x": torch.rand(5, 3), "y": torch.rand(5, 1)})
        >>> loss = run_step(cut, lambda data: ((model(data["x"]) - data["y"]) ** 2).mean(), model=model)
        >>> loss.shape, model.weight.grad.shape
        (torch.Size([]), torch.Size([1, 3]))
    """
    if not isinstance(cut, Cut):
        raise CutError(f"run_step wants a Cut, not a {type(cut).__name__}: write run_step(cutter.cut(batch), loss_fn).")
    check_randomness(randomness)
    parameters = [] if model is None else list(model.parameters())
    with restored_on_error(model), summed(parameters, model, whole=len(cut) == 1) as sums:
        result = accumulate(
            cut,
            loss_fn,
            model=model,
            backward=backward,
            sync=sync,
            sums=sums if parameters else None,
            draws=UnsplitDraws(cut, loss_fn, model) if randomness == "whole" else None,
        )
        raise_unless_finite(result, cut)
    return result.loss


def check_randomness(randomness: str) -> None:
    """Raise for a way of drawing that is none."""
    if randomness not in ("fresh", "whole"):
        raise CutError(f'randomness={randomness!r}: write randomness="fresh" or randomness="whole".')


@contextmanager
def restored_on_error(model: torch.nn.Module | None) -> Iterator[None]:
    """Put the model's gradients back as they were, where an error (or an interrupt) comes out of the block."""
    parameters = list(model.parameters()) if model is not None else []
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    try:
        yield
    except BaseException:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        raise


def accumulate(
    cut: Cut,
    loss_fn: LossFn,
    *,
    model: torch.nn.Module | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    sync: Any = None,
    forward_context: Callable[[], AbstractContextManager[Any]] | None = None,
    device: Any = None,
    recovery: Recovery | None = None,
    sums: Sums | None = None,
    draws: UnsplitDraws | None = None,
) -> Accumulated:
    """Forward and backward of each sub-batch; losses stay on their device until the end.

    With a `recovery`, a sub-batch that runs out of memory is cut smaller, together with those still to come. `sums` is
    where gradients add up, where it is not for torch to do; `draws` where random numbers come from, where they are to be
    the unsplit batch's.
    """
    hold = hold_back(model, sync) if len(cut) > 1 or sync or recovery is not None else None
    losses = Losses()
    outputs: dict[int, Any] = {}

    def run(sub: SubBatch, last: bool) -> None:
        """One sub-batch, with all that it needs in local variables of this frame, which an error can let go."""
        with nullcontext() if hold is None or last else hold(), nullcontext() if draws is None else draws.of(sub):
            data = sub.data if device is None else sub.to(device, non_blocking=_overlaps(device)).data
            with nullcontext() if forward_context is None else forward_context():
                loss, output = _with_outputs(loss_fn(data))
            scaled, rest = weighed(loss, sub, losses, sums)
            if recovery is not None:
                recovery.sends_back()
            if sums is not None:
                sums.weigh(rest)
                if last:
                    sums.last()
            if scaled is not None:
                _send_back(scaled, backward)
            elif hold is not None and last and model is not None:
                with harmless(model):  # the last one carries the reduction for all ranks
                    _send_back(_anyway(loss), backward)
            outputs[sub.index] = output

    todo = _order(cut, by_weight=hold is not None and draws is None)
    while todo:
        sub, failed = cut[todo[-1]], False
        last = len(todo) == 1
        if recovery is not None:
            recovery.begins()
        try:
            run(sub, last)
        except Exception as error:
            waited_for = hold is not None and last and several_ranks()
            failed = recovery is not None and not waited_for and recovery.caught(error, sub)
            if not failed:
                error.add_note(f"This came up in {sub!r}; nothing was stepped.")
                raise
        if failed and recovery is not None:  # and the error is gone, with all that it held
            before, cut = cut, recovery.smaller(cut, sub.index, outputs)
            moved = _moved(before, cut, outputs)
            losses.keep(len(outputs), moved)
            outputs = {moved[i]: output for i, output in outputs.items()}
            todo = [i for i in _order(cut, by_weight=hold is not None and draws is None) if i not in outputs]
        else:
            todo.pop()
    if sums is not None:
        sums.settle()
    if draws is not None:
        draws.finish()
    return total(losses, cut, [outputs[i] for i in range(len(cut))])


def _order(cut: Cut, by_weight: bool) -> list[int]:
    """The sub-batches, what is to run first at the end; by weight, those of weight 0 run before all others.

    What runs last carries the gradient reduction among ranks, which waits for the parameters of every term.
    """
    backwards = range(len(cut) - 1, -1, -1)
    return sorted(backwards, key=lambda i: _missing(cut[i].share)) if by_weight else list(backwards)


def _moved(before: Cut, after: Cut, kept: Iterable[int]) -> dict[int, int]:
    """The new indices of sub-batches that are in both cuts."""
    starts, index = offsets(before._sizes), {start: i for i, start in enumerate(offsets(after._sizes))}
    return {i: index[starts[i]] for i in kept}


def _missing(share: Any) -> int:
    """How many terms a sub-batch says nothing about."""
    return sum(s == 0 for s in (share.values() if isinstance(share, Mapping) else [share]))


def _overlaps(device: Any) -> bool:
    return torch.device(device).type == "cuda"


def _with_outputs(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], (Tensor, Mapping)):
        loss, outputs = returned
        return loss, map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
    return returned, None


def _anyway(loss: Any) -> Tensor:
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, Mapping) else loss


def _send_back(loss: Tensor, backward: Callable[[Tensor], Any] | None) -> None:
    if backward is None:
        loss.backward()
    else:
        backward(loss)
