"""A live calibration on two processes: every trial layout runs, and what is handed on is enough to fit."""

from __future__ import annotations

import numpy as np
import pytest

from plait.engine import calibration as live
from plait.planner.calibrate import calibrate, errors_with, priors_from_rates, runs_of, uncalibrated
from plait.planner.constants import fitted_priors
from plait.planner.hardware import cluster

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "tie_word_embeddings": False}  # fmt: skip


def measured(rank, world_size):
    """What rank 0 gets, and how often it was told."""
    live.ON_CPU = TINY
    told: list[str] = []
    request = live.calibration_request(cluster("cpu", world_size))
    pace = live.Pace(rounds=1, steps=1, link_seconds=0.2)
    found = live.measure(request, machine="here", pace=pace, done=told.append)
    return found, len(told), live.measurements(request, pace)


@pytest.mark.proof
def test_two_processes_measure_every_kind_of_layout(pool):
    found, told, expected = pool.run(2, measured)[0]
    rates, runs = found.rates, found.runs
    assert 0 <= found.waiting < 1
    assert told == expected
    assert {(one.layout["tp"], one.layout["pp"], one.layout["stage"]) for one in runs} == {
        (1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 0), (1, 2, 0),
    }  # fmt: skip
    assert all(
        one.seconds > 0
        and one.predicted_seconds > 0
        and one.machine == "here"
        and one.bytes is None
        for one in runs
    )
    assert rates.all_reduce is not None and all(rate > 0 for rate in rates.products.values())
    priors = priors_from_rates(
        fitted_priors(), cluster("cpu", 2).device, rates, processes=2, precision="fp32"
    )
    fitted = calibrate(runs_of(runs), priors=priors)
    assert fitted.time.rows == len(runs)
    assert errors_with(runs_of(runs), fitted)[1] < errors_with(runs_of(runs), uncalibrated())[1]
    assert np.all(np.diag(fitted.time.covariance) > 0)
