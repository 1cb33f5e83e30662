"""One rank on the CPU, as the checks receive it."""

import pytest

from plait.validation.context import Context


@pytest.fixture
def context():
    """A rank alone, without a launcher. Its group ends with the test."""
    rank = Context(rank=0, world=1, shares_gpu=False, simulated=False)
    yield rank
    rank.close()
