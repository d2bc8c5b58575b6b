"""The losses of the sub-batches: checked, weighed by their shares, and added up to the whole batch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchsplit.cutter import Cut, SubBatch
from batchsplit.errors import LossError
from batchsplit.precision import Sums
from batchsplit.weights import wide


@dataclass
class Accumulated:
    """What the sub-batches of one batch added up to."""

    loss: Tensor  # 0-dim, detached, float32 or wider
    terms: dict[str, Tensor]
    outputs: Any = None
    bad: tuple[int, str, float] | None = None  # the first loss that is not finite: sub-batch, term, value
    grad_norm: Tensor | None = None  # of the whole gradient, where whoever had it added up has looked
    cut: Cut | None = None  # the cut that ran: another than the one given, where memory ran out


@dataclass
class Losses:
    """The losses of the sub-batches that ran, kept on their device until all have."""

    names: list[str] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)  # by sub-batch, then by term
    shares: list[list[float]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)

    def keep(self, count: int, moved: Mapping[int, int]) -> None:
        """Forget all but the first `count`, whose sub-batches now have other indices."""
        for column in (self.values, self.shares, self.indices):
            del column[count:]
        self.indices[:] = [moved[i] for i in self.indices]


def weighed(loss: Any, sub: SubBatch, losses: Losses, sums: Sums | None) -> tuple[Tensor | None, float]:
    """The loss times its share, or its terms times theirs, added up; None where nothing is left to learn from.

    A term of share 0 is left out, not multiplied: its mean is 0/0, and 0 × NaN is NaN, in gradients too. The second
    result is what the gradients are yet to be multiplied by, as adding them up: 1, but for a loss of 16 bits.
    """
    share = sub.share
    terms = dict(loss) if isinstance(loss, Mapping) else {"": loss}
    by_name = _by_name(terms, share, loss)
    for name, term in terms.items():
        _check_scalar(term, name, sub, wants_grad=by_name[name] != 0)
    rest = 1.0 if sums is None else sums.rest_of((by_name[name], term.dtype) for name, term in terms.items())
    kept = [term * (by_name[name] / rest) for name, term in terms.items() if by_name[name] != 0]
    if not losses.indices:
        losses.names = list(terms)
    elif terms.keys() != set(losses.names):
        raise LossError(f"loss_fn returned the terms {list(terms)} for {sub!r}, and {losses.names} before.")
    losses.values.append([terms[name].detach() for name in losses.names])
    losses.shares.append([by_name[name] for name in losses.names])
    losses.indices.append(sub.index)
    with_grad = [term for term in kept if term.requires_grad]
    if kept and not with_grad:
        raise LossError(_no_grad(sub, ""))
    return (sum(with_grad[1:], with_grad[0]) if with_grad else None), rest


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


def total(losses: Losses, cut: Cut, outputs: list[Any]) -> Accumulated:
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
    result = Accumulated(by_term.sum().to(kind), terms, joined, cut=cut)
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
