"""Builds the simulated device when a test needs it.

Without a compiler these tests are skipped, or fail if CI is set.
"""

import os
from collections.abc import Callable

import pytest

from tests.simulated_device.build import CannotBuild, built
from tests.simulated_device.pool import RECORDS, SimulatedPool

Row = Callable[[str, str, float], None]


@pytest.fixture(scope="session")
def device():
    """The folder of the built libraries."""
    try:
        return built()
    except CannotBuild as reason:
        if os.environ.get("CI"):
            pytest.fail(f"the simulated device cannot be built: {reason}")
        pytest.skip(f"the simulated device cannot be built: {reason}")


@pytest.fixture(scope="session")
def simulated(device):
    """Workers with simulated GPUs."""
    pool = SimulatedPool(SIMULATED_DEVICE_TIMEOUT=os.environ.get("SIMULATED_DEVICE_TIMEOUT", "60"))
    yield pool
    pool.close()


@pytest.fixture
def row(record_property):
    """Record this test for docs/development/simulated_device.md.

    The fixture is a function of the configuration, the reference and the largest difference.
    """
    RECORDS.clear()

    def put(configuration, compared_with, difference):
        record_property("configuration", configuration)
        record_property("compared with", compared_with)
        record_property("difference", difference)

    yield put
    record_property("devices", max((record.devices for record in RECORDS), default=0))
    record_property("races", sum(record.races for record in RECORDS))
