"""`randomness="whole"`: every sub-batch sees the random numbers that the unsplit batch would have given its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from batchsplit.randomness.draws import Where, WholeDraw, count, whole_draws
from batchsplit.randomness.mode import SubBatchDraws
from batchsplit.randomness.operations import RandomnessError
from batchsplit.randomness.streams import Streams, host_states
from batchsplit.randomness.trace import Trace, record

__all__ = ["RandomnessError", "WholeRandomness"]


class WholeRandomness:
    """Lend each sub-batch its rows of the unsplit batch's random numbers.

    Each random operation in the forward of a sub-batch is drawn for the whole batch, from the generator state that the
    unsplit run would have, in its order in memory, and this sub-batch's rows are kept. Which axis holds the rows is
    learned before the first sub-batch from two forwards on fake tensors, one with all rows and one with fewer; they
    cost time but no memory. A forward that needs values (`.item()`, boolean indexing) runs on 2 and 3 real rows
    instead. Both leave generators, parameters, buffers, gradients and module attributes as they were; Python objects
    that a forward changes in place (a list it appends to) they can't put back. What decides the course of a
    forward must be the same for all rows (layer drop is); one that draws by the values of its rows is refused, and a
    size that it computes from values (`torch.rand(int(lengths.max()))`) is compared between sub-batches only.

    Cost: each sub-batch draws every random tensor of the whole batch, one at a time, so time for random numbers grows
    with the number of sub-batches, and the largest random tensor of the unsplit batch must fit beside a sub-batch.

    Args:
        forward: what runs on a sub-batch's data: a loss function or a module's forward.
        data_for: gives the data of a range of rows, `data_for(slice(0, 2))`.
        rows: how many rows the whole batch has.
        model: its modules are kept as they were even where the forward does not call them.
        plans: a dictionary that the caller keeps; forwards learned for one batch serve all of the same shapes.

    Raises:
        RandomnessError: (in `rows`, before the sub-batch runs) an operation can't be drawn by rows, such as the dropout
            inside fused attention kernels; the message names it and the way out.

    Example:
        >>> import torch
        >>> from batchsplit.randomness.whole import WholeRandomness
        >>> dropout, x = torch.nn.Dropout(0.5), torch.ones(4, 3)
        >>> forward = lambda x: dropout(dropout(x))
        >>> state = torch.get_rng_state()
        >>> unsplit, end = forward(x), torch.get_rng_state()
        >>> _ = torch.set_rng_state(state)
        >>> whole, parts = WholeRandomness(forward, lambda rows: x[rows], rows=4), []
        >>> for rows in (slice(0, 3), slice(3, 4)):
        ...     with whole.rows(rows):
        ...         parts.append(forward(x[rows]))
        >>> whole.finish()
        >>> torch.equal(torch.cat(parts), unsplit), torch.equal(torch.get_rng_state(), end)
        (True, True)
    """

    def __init__(
        self,
        forward: Callable[[Any], Any],
        data_for: Callable[[slice], Any],
        rows: int,
        *,
        model: torch.nn.Module | None = None,
        plans: MutableMapping[Any, list[WholeDraw]] | None = None,
    ) -> None:
        self._forward, self._data_for, self._count, self._model = forward, data_for, rows, model
        self._plans = {} if plans is None else plans
        self._draws: list[WholeDraw] | None = None
        self._start: Streams | None = None
        self._end: Streams | None = None
        self._states: dict[int, bytes] = {}

    @contextmanager
    def rows(self, where: slice | Any) -> Iterator[None]:
        """Run forward and backward of the sub-batch with these rows (a slice, or an array of row numbers) inside.

        The generators start where the unsplit run's would, and are left where it would leave them; after an exception
        they are back at the start. Recomputation (`torch.utils.checkpoint`) inside sees the same numbers again.
        """
        own = _where(where, self._count)
        unsplit = isinstance(own, slice) and count(own) == self._count
        if self._draws is None and not unsplit:
            self._draws = self._learn()
        if self._start is None:
            self._start = Streams.now()
        self._start.restore()
        used = set(self._start.torch)
        try:
            if unsplit or not self._draws:
                yield  # the unsplit batch itself, or nothing to draw
            else:
                mode = SubBatchDraws(self._draws, own, self._count, self._start, self._states)
                with mode:
                    yield
                mode.close()
                used = mode.generators
            self._check_end(used, still=self._draws == [])
        except BaseException as error:
            self._start.restore()
            if isinstance(error, RandomnessError):
                self._plans.clear()  # the model draws otherwise than when it was learned
            raise

    @contextmanager
    def replay(self, where: slice | Any) -> Iterator[None]:
        """As `rows`, for a second pass over a sub-batch: afterwards the generators stand where they stood before it."""
        before = Streams.now(self._start.torch if self._start is not None else ())
        try:
            with self.rows(where):
                yield
        finally:
            before.restore()

    def finish(self) -> None:
        """Leave the generators where the unsplit run would have left them: call it after the last sub-batch."""
        if self._end is not None:
            self._end.restore()

    def _check_end(self, used: set[torch.Generator], still: bool) -> None:
        assert self._start is not None
        end = Streams.now(used)
        right = self._start if still else self._end
        if self._end is None:
            self._end = end
        if right is not None and not end.same(right):
            raise RandomnessError(
                "randomness='whole': a sub-batch left the random generators in another state than it should, so "
                "something drew where it can't be seen (numpy's or Python's random, a compiled function) or by the "
                "values of its rows; draw with torch, or use randomness='fresh'"
            )

    def _learn(self) -> list[WholeDraw]:
        key = self._key()
        if key is not None and key in self._plans:
            return self._plans[key]
        before = host_states()
        try:
            traces = self._record(fake=True)
        except RandomnessError:
            raise
        except Exception as error:  # whatever a forward without values may raise
            try:
                return self._learn_by_rows()
            except (RandomnessError, torch.OutOfMemoryError):
                raise
            except Exception as second:
                raise RandomnessError(
                    f"randomness='whole': the forward could be run ahead neither without values ({error}) nor on a few "
                    f"rows ({second}); use randomness='fresh'"
                ) from second
        draws = whole_draws(*traces).draws
        if key is not None and traces[1].host_states == before:
            self._plans[key] = draws  # else the forward may take another course the next time
        return draws

    def _learn_by_rows(self) -> list[WholeDraw]:
        """From real rows; once more with what was learned for as long as the draws themselves steer the forward."""
        learned = whole_draws(*self._record(fake=False), partly=True)
        while learned.steered:
            known = learned
            traces = self._record(fake=False, known=known.draws)
            learned = whole_draws(*traces, partly=True)
            if learned.draws == known.draws and learned.complete:
                break
            if len(learned.draws) <= len(known.draws) and not learned.complete:
                return whole_draws(*traces).draws  # no further: this says why
        return learned.draws

    def _record(self, fake: bool, known: list[WholeDraw] | None = None) -> tuple[Trace, Trace]:
        rows = self._count
        if fake:
            sizes = (rows - 1, rows) if rows > 2 else (2, 3)  # views of a single row are not those of several
        else:
            sizes = (min(2, rows - 1), min(3, rows))
        few, many = (
            record(self._forward, self._data(size), size, fake, self._model, known or (), rows) for size in sizes
        )
        if few.host_states != many.host_states:
            raise RandomnessError(
                "randomness='whole': Python's or numpy's generator is drawn from in another number at "
                f"{few.rows} rows than at {many.rows}; draw by rows with torch, or use randomness='fresh'"
            )
        return few, many

    def _data(self, rows: int) -> Any:
        if rows <= self._count:
            return self._data_for(slice(0, rows))
        return tree_map(_one_row_more, self._data_for(slice(0, rows - 2)), self._data_for(slice(0, rows - 1)))

    def _key(self) -> Any:
        """What a forward's random operations depend on; None where a batch holds what can't be compared."""
        leaves, spec = tree_flatten(self._data_for(slice(0, self._count)))
        marks: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
                marks.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            elif isinstance(leaf, (bool, int, float, str, bytes, type(None))):
                marks.append(leaf)
            else:
                return None
        training = [module.training for module in self._model.modules()] if self._model is not None else []
        return str(spec), tuple(marks), tuple(training), torch.is_grad_enabled(), _autocast()


def _one_row_more(few: Any, many: Any) -> Any:
    """The leaf with as many rows more as `many` has more than `few`; its values do not matter."""
    if isinstance(many, torch.Tensor):
        shape, strides = (
            [2 * b - a for a, b in zip(one, two, strict=True)]
            for one, two in ((few.shape, many.shape), (few.stride(), many.stride()))
        )
        more = torch.empty_strided(shape, strides, dtype=many.dtype, device=many.device)
        return many if list(many.shape) == shape else more.requires_grad_(many.requires_grad)
    if isinstance(many, (bool, int, float, str, bytes, type(None))):
        return many
    raise TypeError(f"a leaf of type {type(many).__name__} can't be made longer")


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _where(where: Any, rows: int) -> Where:
    if isinstance(where, slice):
        start, stop, step = where.indices(rows)
        if step == 1:
            return slice(start, stop)
        return torch.arange(start, stop, step)
    return torch.as_tensor(np.asarray(where.cpu() if isinstance(where, torch.Tensor) else where), dtype=torch.int64)
