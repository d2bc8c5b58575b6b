"""What every test starts from: known seeds, deterministic algorithms, one thread; Hypothesis profiles.

Each test draws its inputs from a seed of its own, the same at every run. BATCHSPLIT_SEED=7 gives all of them others;
BATCHSPLIT_HYPOTHESIS=large draws many more examples.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,  # the first example pays for torch's lazy imports
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("large", settings.get_profile("ci"), max_examples=5_000, derandomize=False)
settings.load_profile(os.environ.get("BATCHSPLIT_HYPOTHESIS", "ci"))

SEED = int(os.environ.get("BATCHSPLIT_SEED", "0"))


@pytest.fixture(scope="session", autouse=True)
def deterministic() -> None:
    """The same sums in the same order, and NaN in memory that nobody has written to."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(request.node.nodeid.encode()) ^ SEED
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def float64() -> Iterator[None]:
    """Modules and random tensors of the test are float64: differences are the method's, not the precision's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
