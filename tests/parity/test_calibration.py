"""A live calibration on two processes measures every trial layout, and enough to fit constants."""

from __future__ import annotations

import numpy as np
import pytest

from plait.engine import calibration
from plait.planner.calibrate import calibrate, errors_with, priors_from_rates, runs_of, uncalibrated
from plait.planner.constants import fitted_priors
from plait.planner.hardware import cluster

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


def measured(rank, world):
    """Return measurements, and the reported and the expected number. Runs on every rank."""
    # The model that is measured on CPUs takes minutes.
    calibration.ON_CPU = TINY_LLAMA
    reports: list[str] = []
    request = calibration.calibration_request(cluster("cpu", world))
    pace = calibration.Pace(rounds=1, steps=1, link_seconds=0.2)
    measurements = calibration.measure(request, machine="here", pace=pace, done=reports.append)
    return measurements, len(reports), calibration.measurements(request, pace)


@pytest.mark.proof
def test_two_processes_measure_every_kind_of_layout(pool):
    measurements, reports, expected_reports = pool.run(2, measured)[0]
    assert reports == expected_reports
    assert 0 <= measurements.waiting < 1
    rates = measurements.rates
    assert rates.all_reduce is not None
    assert all(rate > 0 for rate in rates.products.values())

    layouts = set()
    for run in measurements.runs:
        layouts.add((run.layout["tp"], run.layout["pp"], run.layout["stage"]))
        assert run.seconds > 0 and run.predicted_seconds > 0
        assert run.machine == "here" and run.bytes is None
    assert layouts == {(1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 0), (1, 2, 0)}

    device = cluster("cpu", 2).device
    priors = priors_from_rates(fitted_priors(), device, rates, processes=2, precision="fp32")
    runs = runs_of(measurements.runs)
    fitted = calibrate(runs, priors=priors)
    assert fitted.time.rows == len(measurements.runs)
    assert errors_with(runs, fitted)[1] < errors_with(runs, uncalibrated())[1]
    assert np.all(np.diag(fitted.time.covariance) > 0)
