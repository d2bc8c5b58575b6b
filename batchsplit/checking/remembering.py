"""What changes at each forward changes once for the unsplit batch, and once for every sub-batch of a cut."""

from __future__ import annotations

from batchsplit.checking.memories import State, differing, state_of
from batchsplit.checking.report import Cause
from batchsplit.checking.results import Result, compare
from batchsplit.checking.runs import Bench
from batchsplit.randomness.streams import Streams


def state_causes(bench: Bench, unsplit: Result, cut: Result | None, tolerance: float) -> list[Cause]:
    """Buffers and attributes that a cut leaves otherwise than the unsplit batch, and loss functions with a memory."""
    causes = []
    if cut is not None and differing(unsplit.state, cut.state):
        causes += _left_otherwise(bench, unsplit.state, cut.state)
    if not causes and not _repeatable(bench, unsplit, tolerance):
        causes.append(
            Cause(
                "state",
                "loss_fn does not give the same twice on the same batch, with all generators, buffers and "
                "attributes put back: it changes state that lies outside of modules (a global, a closure, an "
                "object of its own), or its kernels are not deterministic. So every sub-batch changes what the "
                "next one computes.",
                "Keep such state in buffers, and change it once a step, outside of loss_fn.",
                "loss_fn",
            )
        )
    return causes


def _left_otherwise(bench: Bench, unsplit: State, cut: State) -> list[Cause]:
    first, second = _twice(bench)
    growing = differing(first, second)
    own = {name for name, _ in bench.model.named_buffers(remove_duplicate=False)}
    own |= {name for name, _ in bench.model.named_parameters(remove_duplicate=False)}
    names = [name for name in differing(unsplit, cut) if name in own or name in growing]
    if not names:  # attributes that only hold what the last forward saw
        return []
    shown = ", ".join(f"`{name}`" for name in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    when = "changed by each forward" if set(names) & set(growing) else "set to what the last forward saw"
    text = f"{shown}: {when}, so that the sub-batches of a cut leave something else than the unsplit batch does."
    advice = (
        f"Update {shown} once a step, outside of the forward, from the whole batch; or freeze it (eval mode, "
        "momentum 0), or accept it where nothing depends on it."
    )
    return [Cause("state", text, advice, names[0])]


def _twice(bench: Bench) -> tuple[State, State]:
    """What is remembered after one forward of the whole batch, and after another one."""
    with bench.lent() as loan:
        start = Streams.now()
        bench.terms(bench.data())
        first = state_of(loan)
        start.restore()
        bench.terms(bench.data())
        return first, state_of(loan)


def _repeatable(bench: Bench, unsplit: Result, tolerance: float) -> bool:
    return compare(bench.whole(), unsplit).within(max(1e-9, tolerance))
