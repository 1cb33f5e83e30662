"""The simulated device is built when a test needs it. Without a compiler these tests are skipped; where CI is set they fail instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated_device.build import CannotBuild, built
from tests.simulated_device.pool import SimulatedPool


@pytest.fixture(scope="session")
def device() -> Path:
    """The folder of the built libraries."""
    try:
        return built()
    except CannotBuild as reason:
        if os.environ.get("CI"):
            pytest.fail(f"the simulated device cannot be built: {reason}")
        pytest.skip(f"the simulated device cannot be built: {reason}")


@pytest.fixture(scope="session")
def simulated(device: Path) -> Iterator[SimulatedPool]:
    """Workers with simulated GPUs."""
    pool = SimulatedPool(SIMULATED_DEVICE_TIMEOUT="60")
    yield pool
    pool.close()
