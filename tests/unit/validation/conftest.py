"""A single rank on the CPU, in the form in which checks receive it."""

import pytest

from plait.validation.context import Context


@pytest.fixture
def context():
    """A rank without a launcher. Its process group ends with the test."""
    rank = Context(rank=0, world=1, shares_gpu=False, simulated=False)
    yield rank
    rank.close()
