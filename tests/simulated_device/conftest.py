"""The simulated device is built when a test needs it. Without a compiler these tests are skipped; where CI is set they fail instead."""

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

    The fixture is a function of the configuration, what it was compared with and the largest difference.
    """
    RECORDS.clear()

    def put(configuration, compared_with, difference):
        for name, value in (
            ("configuration", configuration),
            ("compared with", compared_with),
            ("difference", difference),
        ):
            record_property(name, value)

    yield put
    record_property("devices", max((record.devices for record in RECORDS), default=0))
    record_property("races", sum(record.races for record in RECORDS))
