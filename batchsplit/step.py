"""Forward and backward of every sub-batch: the gradients and the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from batchsplit.cuts import Cut, SubBatch
from batchsplit.errors import CutError
from batchsplit.losses import Accumulated, Losses, raise_unless_finite, total, weighed
from batchsplit.memory import BeginAgain, Recovery
from batchsplit.moving import Ahead
from batchsplit.plan import offsets
from batchsplit.precision import Sums, summed
from batchsplit.ranks import Reduction, Turn, reduction_of, several_ranks
from batchsplit.special import detached
from batchsplit.undivided import Undivided
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
            whole weight is 0; `backward` divides the loss once more.

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
    if backward is not None:
        backward = Undivided(backward)
    return gradients_of(cut, loss_fn, reduction_of(model, sync), backward, randomness)


def gradients_of(
    cut: Cut, loss_fn: LossFn, reduction: Reduction, backward: Callable[[Tensor], Any] | None, randomness: str
) -> Tensor:
    """What `run_step` does, with gradients reduced in the way given, for its model."""
    model, own = reduction.model, cut
    parameters = [] if model is None else list(model.parameters())
    reduction.check(False, randomness)
    cut = reduction.agreed(lambda: own)
    whole = len(cut) == 1 and reduction.ranks.count == 1
    with restored_on_error(parameters), summed(parameters, model, whole=whole) as sums:
        result = accumulate(
            cut,
            loss_fn,
            backward=backward,
            reduction=reduction,
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
def restored_on_error(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Put gradients back as they were, where an error (or an interrupt) comes out of the block."""
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
    backward: Callable[[Tensor], Any] | None = None,
    reduction: Reduction | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] | None = None,
    device: Any = None,
    recovery: Recovery | None = None,
    sums: Sums | None = None,
    draws: UnsplitDraws | None = None,
) -> Accumulated:
    """Forward and backward of each sub-batch; losses stay on their device until the end.

    With a `recovery`, a sub-batch that runs out of memory is cut smaller, together with those still to come. `sums` is
    where gradients add up, where it is not for torch to do; `draws` where random numbers come from, where they are to be
    the unsplit batch's. `reduction` is how gradients and losses get to other ranks: the loss is then that of the batch of
    all of them.
    """
    if reduction is not None and reduction.idle:
        reduction = None
    if all(special is None for special in (reduction, forward_context, device, recovery, draws)):
        return _run_plain(cut, loss_fn, backward, sums)
    try:
        with Ahead(device) as ahead:
            result = _run(cut, loss_fn, backward, reduction, forward_context, ahead, recovery, sums, draws)
    except BeginAgain:
        raise
    except BaseException as error:
        if reduction is not None:
            reduction.failed(tell=isinstance(error, Exception))
        raise
    return result if reduction is None else reduction.union(result)


def _run_plain(
    cut: Cut, loss_fn: LossFn, backward: Callable[[Tensor], Any] | None, sums: Sums | None
) -> Accumulated:
    """Most steps: one rank, the data where they are, nothing to be held around a sub-batch."""
    losses, outputs = Losses(), []
    for sub in cut:
        try:
            loss, output = _with_outputs(loss_fn(sub.data))
            scaled, rest = weighed(loss, sub, losses, sums)
            if sums is not None:
                sums.weigh(rest)
            if scaled is not None:
                _send_back(scaled, backward)
        except Exception as error:
            error.add_note(f"This came up in {sub!r}; nothing was stepped.")
            raise
        outputs.append(output)
        del loss, scaled  # with the graph of a sub-batch that was not sent back, before the next one runs
    if sums is not None:
        sums.settle()
    return total(losses, cut, outputs)


def _run(
    cut: Cut,
    loss_fn: LossFn,
    backward: Callable[[Tensor], Any] | None,
    reduction: Reduction | None,
    forward_context: Callable[[], AbstractContextManager[Any]] | None,
    ahead: Ahead,
    recovery: Recovery | None,
    sums: Sums | None,
    draws: UnsplitDraws | None,
) -> Accumulated:
    """The sub-batches of this rank."""
    losses = Losses()
    outputs: dict[int, Any] = {}

    def forward(sub: SubBatch, following: SubBatch | None = None) -> Any:
        data = sub.data if ahead.device is None else ahead.data(sub, following)
        if forward_context is None:
            return loss_fn(data)
        with forward_context():
            return loss_fn(data)

    def run(sub: SubBatch, following: SubBatch | None, turn: Turn | None = None) -> None:
        """One sub-batch, with all that it needs in local variables of this frame, which an error can let go."""
        loss, output = _with_outputs(forward(sub, following))
        scaled, rest = weighed(loss, sub, losses, sums)
        if recovery is not None:
            recovery.sends_back()
        if sums is not None:
            sums.weigh(rest)
            if turn is not None and turn.carries:
                sums.last()
        if turn is not None and reduction is not None:
            if turn.missing:
                reduction.unweighed(loss)
            if turn.silent:
                if reduction.uncalled():
                    forward(_spare(cut))
                scaled = _anyway(loss)
            if scaled is not None:
                scaled = reduction.sends(scaled, turn)
        if scaled is not None:
            _send_back(scaled, backward)
        outputs[sub.index] = output

    def run_one(sub: SubBatch, following: SubBatch | None, last: bool) -> None:
        """The same where something has to be held around it."""
        if reduction is None:
            with nullcontext() if draws is None else draws.of(sub):
                return run(sub, following)
        turn = reduction.turn(last, *_missing(sub.share), recovers=recovery is not None)
        with reduction.around(turn), nullcontext() if draws is None else draws.of(sub):
            run(sub, following, turn)
        if turn.reduces:
            if sums is not None and not turn.carries:
                sums.last()
            reduction.reduce(turn)
        return None

    by_weight = reduction is not None and reduction.hold is not None and draws is None
    if reduction is not None:
        reduction.begin(cut, lambda: forward(_spare(cut)))
    todo = _order(cut, by_weight)
    while todo:
        sub, failed, last = todo[-1], False, len(todo) == 1
        following = None if last else todo[-2]
        if recovery is not None:
            recovery.begins()
            following = following if sub.rows > 1 else None  # if a row does not fit, it is for no other's sake
        try:
            if reduction is None and draws is None:
                run(sub, following)
            else:
                run_one(sub, following, last)
        except Exception as error:
            waited_for = reduction is not None and (reduction.sending or (last and not reduction.recovers and several_ranks()))
            failed = recovery is not None and not waited_for and recovery.caught(error, sub)
            if not failed:
                error.add_note(f"This came up in {sub!r}; nothing was stepped.")
                raise
        if failed and recovery is not None:  # and the error is gone, with all that it held
            ahead.drop()
            if reduction is not None:
                reduction.again()
            before, cut = cut, recovery.smaller(cut, sub.index, outputs)
            moved = _moved(before, cut, outputs)
            losses.keep(len(outputs), moved)
            outputs = {moved[i]: output for i, output in outputs.items()}
            todo = [sub for sub in _order(cut, by_weight) if sub.index not in outputs]
        else:
            todo.pop()
    if sums is not None:
        sums.settle()
    if draws is not None:
        draws.finish()
    return total(losses, cut, [outputs[i] for i in range(len(cut))])


def _order(cut: Cut, by_weight: bool) -> list[SubBatch]:
    """The sub-batches, what is to run first at the end; by weight, those of weight 0 run before all others.

    What runs last carries the gradient reduction among ranks, which waits for the parameters of every term.
    """
    backwards = list(cut)[::-1]
    return sorted(backwards, key=lambda sub: _missing(sub.share)[0]) if by_weight else backwards


def _spare(cut: Cut) -> SubBatch:
    """A small sub-batch that has weight for as many terms as any, to be run for the other ranks' sake."""
    return cut[min(range(len(cut)), key=lambda i: (_missing(cut[i].share)[0], cut[i].rows))]


def _moved(before: Cut, after: Cut, kept: Iterable[int]) -> dict[int, int]:
    """The new indices of sub-batches that are in both cuts."""
    starts, index = offsets(before._sizes), {start: i for i, start in enumerate(offsets(after._sizes))}
    return {i: index[starts[i]] for i in kept}


def _missing(share: Any) -> tuple[int, int]:
    """How many terms a sub-batch says nothing about, and of how many."""
    shares = list(share.values()) if isinstance(share, Mapping) else [share]
    return shares.count(0), len(shares)


def _with_outputs(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], (Tensor, Mapping)):
        loss, outputs = returned
        return loss, detached(outputs)
    return returned, None


def _anyway(loss: Any) -> Tensor:
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, Mapping) else loss


def _send_back(loss: Tensor, backward: Callable[[Tensor], Any] | None) -> None:
    if backward is None:
        loss.backward()
    else:
        backward(loss)
