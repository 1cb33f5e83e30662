"""Random numbers of collators and data sets, which must be equal on ranks that share a batch.

Every pipeline stage and tensor-parallel rank reads the batch for itself. The generators of these
ranks differ because dropout draws from them, so a collator that masks at random would give every
stage another batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from plait.hashing import seed_of


@contextmanager
def seeded_generators(*seed_parts: object) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU), and restore their states at exit."""
    seed = seed_of(" ".join(map(str, seed_parts)))
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed would also seed the generators of the devices, which are not restored.
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
