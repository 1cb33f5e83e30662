"""Random numbers of collators and data sets: equal on the ranks that share a batch, and apart from
those of the training.

Pipeline stages and ranks of tp read one batch each for itself. Their own generators differ, since
dropout draws from them, and a collator that masks at random would give every stage another batch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def drawn_from(*words: object) -> Iterator[None]:
    """The generators of Python, numpy and torch (CPU) are seeded by `words` inside, and as they
    were afterwards.
    """
    text = " ".join(map(str, words)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    python = random.getstate()
    numbers = np.random.get_state()
    tensors = torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(tensors)
