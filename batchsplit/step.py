"""Forward and backward of every sub-batch: the gradients and the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchsplit.containers import map_leaves
from batchsplit.cutter import Cut, SubBatch
from batchsplit.errors import CutError, LossError
from batchsplit.ranks import Hold, harmless, hold_back
from batchsplit.weights import wide

LossFn = Callable[[Any], Any]


@dataclass
class Accumulated:
    """What the sub-batches of one batch added up to."""

    loss: Tensor  # 0-dim, detached, float32 or wider
    terms: dict[str, Tensor]
    outputs: Any = None
    bad: tuple[int, str, float] | None = None  # the first loss that is not finite: sub-batch, term, value


@dataclass
class _Losses:
    """The losses of the sub-batches that ran, kept on their device until all have."""

    names: list[str] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)  # by sub-batch, then by term
    shares: list[list[float]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


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
    (`sync`: another context to hold it back, or False), and after an error its gradients are as they were before.
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
    with restored_on_error(model):
        result = accumulate(cut, loss_fn, model=model, backward=backward, sync=sync)
        raise_unless_finite(result, cut)
    return result.loss


def check_randomness(randomness: str) -> None:
    """Raise for a way of drawing that is none."""
    if randomness != "fresh":
        raise CutError(f'randomness={randomness!r}: write randomness="fresh".')


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
) -> Accumulated:
    """Forward and backward of each sub-batch; losses stay on their device until the end."""
    hold = hold_back(model, sync) if len(cut) > 1 or sync else None
    losses = _Losses()
    outputs: list[Any] = [None] * len(cut)
    order = _order(cut) if hold is not None else range(len(cut))
    for n, i in enumerate(order, start=1):
        sub = cut[i]
        try:
            with hold() if hold is not None and n < len(cut) else nullcontext():
                data = sub.data if device is None else sub.to(device, non_blocking=_overlaps(device)).data
                with nullcontext() if forward_context is None else forward_context():
                    loss, outputs[i] = _with_outputs(loss_fn(data))
                scaled = _scaled(loss, sub, losses)
                if scaled is not None:
                    _send_back(scaled, backward)
                elif hold is not None and n == len(cut) and model is not None:
                    with harmless(model):  # the last one carries the reduction for all ranks
                        _send_back(_anyway(loss), backward)
                del data, loss, scaled
        except Exception as error:
            error.add_note(f"This came up in {sub!r}; nothing was stepped.")
            raise
    return _total(losses, cut, outputs)


def _order(cut: Cut) -> list[int]:
    """Sub-batches of weight 0 first: what runs last carries the gradient reduction."""
    return sorted(range(len(cut)), key=lambda i: _nothing(cut[i].share), reverse=True)


def _nothing(share: Any) -> bool:
    return all(s == 0 for s in share.values()) if isinstance(share, Mapping) else share == 0


def _overlaps(device: Any) -> bool:
    return torch.device(device).type == "cuda"


def _with_outputs(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], (Tensor, Mapping)):
        loss, outputs = returned
        return loss, map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
    return returned, None


def _scaled(loss: Any, sub: SubBatch, losses: _Losses) -> Tensor | None:
    """The loss times its share, or its terms times theirs, added up; None where nothing is left to learn from.

    A term of share 0 is left out, not multiplied: its mean is 0/0, and 0 × NaN is NaN, in gradients too.
    """
    share = sub.share
    terms = dict(loss) if isinstance(loss, Mapping) else {"": loss}
    by_name = _by_name(terms, share, loss)
    kept: list[Tensor] = []
    for name, term in terms.items():
        _check_scalar(term, name, sub, wants_grad=by_name[name] != 0)
        if by_name[name] != 0:
            kept.append(term * by_name[name])
    if losses.names != list(terms):
        if losses.indices:
            raise LossError(f"loss_fn returned the terms {list(terms)} for {sub!r}, and {losses.names} before.")
        losses.names = list(terms)
    losses.values.append([term.detach() for term in terms.values()])
    losses.shares.append([by_name[name] for name in terms])
    losses.indices.append(sub.index)
    with_grad = [term for term in kept if term.requires_grad]
    if kept and not with_grad:
        raise LossError(_no_grad(sub, ""))
    return None if not with_grad else with_grad[0] if len(with_grad) == 1 else sum(with_grad[1:], with_grad[0])


def _by_name(terms: dict[str, Any], share: Any, loss: Any) -> dict[str, float]:
    if not isinstance(share, Mapping):
        return dict.fromkeys(terms, share)
    if not isinstance(loss, Mapping):
        raise LossError(f"weight names the terms {sorted(share)}, but loss_fn returned one loss: return a mapping of them.")
    for name in terms.keys() - share.keys():
        raise LossError(f'the loss term "{name}" has no weight: add it to weight={{...}} (None for a sum, "once" for a penalty).')
    for name in share.keys() - terms.keys():
        raise LossError(f'weight names a term "{name}" that loss_fn did not return; it returned {sorted(terms)}.')
    return dict(share)


def _check_scalar(term: Any, name: str, sub: SubBatch, wants_grad: bool) -> None:
    what = f'the term "{name}"' if name else "the loss"
    if not isinstance(term, Tensor):
        raise LossError(f"{what} of sub-batch {sub.index} is a {type(term).__name__}: loss_fn has to return a scalar tensor.")
    if term.dim():
        raise LossError(f"{what} of sub-batch {sub.index} has shape {tuple(term.shape)}: reduce it, with .mean() or .sum().")
    if wants_grad and not name and not term.requires_grad:
        raise LossError(_no_grad(sub, name))


def _no_grad(sub: SubBatch, name: str) -> str:
    return (
        f"the loss of sub-batch {sub.index} has no gradient: was it detached, or computed under no_grad or with frozen parameters?"
    )


def _anyway(loss: Any) -> Tensor:
    return sum(loss.values(), torch.zeros(())) if isinstance(loss, Mapping) else loss


def _send_back(loss: Tensor, backward: Callable[[Tensor], Any] | None) -> None:
    if backward is None:
        loss.backward()
    else:
        backward(loss)


def _total(losses: _Losses, cut: Cut, outputs: list[Any]) -> Accumulated:
    """Σ share × loss by term and over all, with no more than one look at the device."""
    # a term of share 0 is NaN by rights, and is not counted
    values = [torch.stack(row) if len(row) > 1 else row[0].reshape(1) for row in losses.values]
    stacked = torch.stack(values)
    kind = torch.promote_types(stacked.dtype, torch.float32)
    share = torch.tensor(losses.shares, dtype=torch.float32 if stacked.device.type == "mps" else torch.float64)
    share = share.to(stacked.device)
    counted = torch.where(share == 0, 0, wide(stacked) * share)
    by_term = counted.sum(0)
    terms = {} if losses.names == [""] else dict(zip(losses.names, by_term.to(kind).unbind(), strict=True))
    joined = cut.join(outputs) if any(output is not None for output in outputs) else None
    result = Accumulated(by_term.sum().to(kind), terms, joined)
    if not torch.isfinite(counted).all():
        row, term = (~torch.isfinite(counted)).nonzero()[0].tolist()
        result.bad = (losses.indices[row], losses.names[term], float(stacked[row, term]))
    return result


def raise_unless_finite(result: Accumulated, cut: Cut) -> None:
    """Raise a LossError that names the first sub-batch whose loss is NaN or infinite."""
    if result.bad is not None:
        index, name, value = result.bad
        what = f'the term "{name}"' if name else "the loss"
        raise LossError(f"{what} is {value} in {cut[index]!r}; nothing was stepped.")
