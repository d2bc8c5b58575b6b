"""Meeting the random operations of one sub-batch, one after another, with those of the unsplit batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchsplit.randomness.draws import Where, WholeDraw, count
from batchsplit.randomness.operations import RandomnessError, draws_nothing, generator_of, seeded
from batchsplit.randomness.streams import Streams, digest


class SubBatchDraws(TorchDispatchMode):
    """Meets every random operation of one sub-batch, in the forward and in what backward recomputes."""

    def __init__(
        self, draws: list[WholeDraw], where: Where, rows: int, start: Streams, states: dict[int, bytes]
    ) -> None:
        super().__init__()
        self._draws, self._where, self._rows, self._start, self._states = draws, where, rows, start, states
        self.generators: set[torch.Generator] = set()
        self._next = 0
        self._last = {generator: digest(state) for generator, state in start.torch.items()}
        self._after: set[bytes] = set(self._last.values())
        self._used: dict[tuple[torch.Generator, bytes], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not seeded(func) or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        generator = generator_of(func, args, kwargs)
        state = generator.get_state()
        if generator not in self._start.torch:
            self._start.torch[generator], self._start.seeds[generator] = state, generator.initial_seed()
        draw = self._match(func, args, kwargs, generator, digest(state))
        result = draw.draw(args, kwargs, self._where, self._rows)
        self._last[generator] = digest(generator.get_state())
        self._after.add(self._last[generator])
        self.generators.add(generator)
        return result

    def _match(self, op: Any, args: Any, kwargs: Any, generator: torch.Generator, state: bytes) -> WholeDraw:
        """Which operation of the unsplit run this is: the next one, or one of those run before, in a recomputation."""
        more, used = self._next < len(self._draws), self._used.get((generator, state), [])
        ahead = more and self._last.get(generator, state) == state
        # A seed set in the forward, or a state put back by fork_rng, moves the generator in every sub-batch alike.
        moved = more and (state in self._after or generator.initial_seed() != self._start.seeds[generator])
        fits = lambda number: self._draws[number].fits(op, args, kwargs, count(self._where))  # noqa: E731
        if not ahead:
            again = next((number for number in used if fits(number)), None)
            if again is not None:
                used.append(used.pop(used.index(again)))
                return self._draws[again]
        if not ahead and not moved:
            raise RandomnessError(
                f"randomness='whole': {op} finds the generator in a state that the unsplit run does not have here: "
                "the forward draws more often than when it was learned, or unseen (in a compiled function), or a "
                " checkpoint recomputes with preserve_rng_state=False; leave that on, or use randomness='fresh'"
            )
        if not fits(self._next):
            raise RandomnessError(
                f"randomness='whole': {op} is not what the forward drew when it was learned "
                f"({self._draws[self._next].title}); a forward that draws by the values of its "
                "rows can't be matched: use randomness='fresh'"
            )
        number, self._next = self._next, self._next + 1
        if self._states.setdefault(number, state) != state:
            raise RandomnessError(
                f"{self._draws[number].title}: the generator stands elsewhere than in the sub-batch before, so "
                "something drew by the number of rows unseen; draw with torch, or use randomness='fresh'"
            )
        self._used.setdefault((generator, state), []).append(number)
        return self._draws[number]

    def close(self) -> None:
        """Every operation of the unsplit run was met."""
        if self._next < len(self._draws):
            raise RandomnessError(
                f"{self._draws[self._next].title} did not run in a sub-batch; a forward that draws by the values of "
                "its rows can't be matched: use randomness='fresh'"
            )
