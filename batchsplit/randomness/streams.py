"""Where random generators stand: torch's own and the user's, Python's and numpy's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Streams:
    """The states at one moment; the default generators of the devices are always among them."""

    torch: dict[torch.Generator, torch.Tensor]
    host: tuple[Any, ...]
    seeds: dict[torch.Generator, int]

    @classmethod
    def now(cls, generators: Iterable[torch.Generator] = ()) -> Streams:
        known = {torch.default_generator, *generators}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            known |= set(torch.cuda.default_generators)
        return cls({g: g.get_state() for g in known}, host_states(), {g: g.initial_seed() for g in known})

    def restore(self) -> None:
        for generator, state in self.torch.items():
            generator.set_state(state)
        set_host_states(self.host)

    def same(self, other: Streams) -> bool:
        both = self.torch.keys() & other.torch.keys()
        return self.host == other.host and all(torch.equal(self.torch[g], other.torch[g]) for g in both)


def host_states() -> tuple[Any, ...]:
    """States of Python's and numpy's generators, which may steer a forward (layer drop)."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(keys), *rest)  # type: ignore[arg-type]


def set_host_states(states: tuple[Any, ...]) -> None:
    python, (kind, keys, *rest) = states
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


def digest(state: torch.Tensor) -> bytes:
    """A state in short (that of a CPU generator has 5,056 bytes)."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
