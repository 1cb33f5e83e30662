"""Measured runs of Plait: how they are priced, and what they do to the constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.planner.calibrate import (
    Measured,
    calibrate,
    memory_of,
    merged_rates,
    runs_of,
    uncalibrated,
)
from plait.planner.constants import knowledge
from plait.planner.hardware import cluster
from plait.planner.models import find_model
from plait.planner.request import Request, estimate
from plait.planner.search import plan, price
from tests.unit.planner.rows import measured


def seconds_of(runs: list[Measured]) -> np.ndarray:
    """Seconds per step by the constants that ship."""
    return np.asarray(estimate(runs_of(runs).job, merged_rates(uncalibrated())).seconds)


def test_a_run_is_priced_as_the_plan_priced_it() -> None:
    runs = [measured(index=index) for index in range(4)] + [measured("llama-2-7b")]
    job = runs_of(runs).job
    assert seconds_of(runs) == pytest.approx([one.seconds for one in runs], rel=1e-9)
    allocated = np.exp(memory_of(job, ["allocated"] * 5)(knowledge().rates))
    assert allocated == pytest.approx([one.bytes for one in runs], rel=1e-9)


def test_runs_that_were_slower_make_plans_slower_and_surer() -> None:
    found = calibrate(runs_of([measured(factor=1.3, index=index) for index in range(5)]))
    request = Request(find_model("llama-3-8b"), cluster("h100", 16), 64, 2048)
    layout = plan(request, best=6).best[5].layout
    before, after = (
        price(request, [layout], calibration=calibration)[0] for calibration in (None, found)
    )
    assert after.seconds / before.seconds == pytest.approx(1.3, rel=0.06)
    assert after.seconds_high / after.seconds < before.seconds_high / before.seconds


def test_a_compiled_run_is_priced_as_compiled() -> None:
    plain, compiled = measured(), replace(measured(), compiled=True)
    seconds = seconds_of([plain, compiled])
    assert seconds[1] < seconds[0]
