"""Shared fixtures: one pool of workers a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)  # the machine is shared with the workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Spawned gloo workers."""
    made = Pool()
    yield made
    made.close()
