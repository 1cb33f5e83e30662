import numpy as np
import pytest

from benchmarks.planner_accuracy.grouped_fit import grouped_fit
from benchmarks.planner_accuracy.predict import evaluate, summary
from benchmarks.planner_accuracy.runs import read_runs
from plait.planner.calibrate import deviation, fit, merged_rates, relevant, time_of, uncalibrated
from plait.planner.constants import CONSTANTS, Rates, fitted_priors
from tests.unit.planner.rows import ROW


def rows(count=24):
    found = []
    for index in range(count):
        hidden = (2048, 4096, 5120)[index % 3]
        degrees = {
            "tp": (1, 2, 4, 8)[index % 4],
            "pp": (1, 2)[index // 4 % 2],
            "micro_batch": (1, 2)[index // 8 % 2],
            "hidden": hidden,
            "ffn_hidden": 4 * hidden,
        }
        texts = {name: str(value) for name, value in degrees.items()}
        found.append({**ROW, "id": f"X-{index}", "gpus_total": "32", **texts})
    return found


def truth(changes, given):
    """Return `given` with the step times of a machine whose constants differ by `changes`."""
    runs = read_runs(given)
    base = fitted_priors().rates.values
    changed = {name: base[name] * factor for name, factor in changes.items()}
    seconds = np.exp(time_of(runs.job)(Rates({**base, **changed})))
    pairs = zip(given, seconds, strict=True)
    return [{**row, "step_time_s": f"{value:.6f}"} for row, value in pairs]


def test_a_machine_that_differs_is_found_from_a_few_rows():
    measured = truth({"gemm.hopper": 0.8, "link": 0.75, "p2p": 1.5}, rows())
    before, after = (
        summary(evaluate(measured, calibrate=given))["time"]["all"]["all"]
        for given in ((), measured[:10])
    )
    assert before["median"] > 0.1
    assert after["median"] < 0.03 and after["rows"] == 14
    assert after["coverage"] > 0.85


def test_other_machines_are_left_alone():
    measured = truth({"gemm.hopper": 0.7}, rows())
    other = [{**row, "gpu": "A100-80GB"} for row in measured[10:]]
    found = evaluate(other, calibrate=measured[:10])
    assert found.predictions[0].seconds == evaluate(other).predictions[0].seconds


def test_few_rows_move_little_and_one_wild_row_decides_nothing():
    measured = truth({}, rows())
    slow = str(50 * float(measured[0]["step_time_s"]))
    wild = [{**measured[0], "step_time_s": slow}, *measured[1:8]]
    errors = summary(evaluate(measured[8:], calibrate=wild))["time"]["all"]["all"]
    assert errors["median"] < 0.05


def test_intervals_narrow_with_rows():
    measured = truth({"gemm.hopper": 0.9}, rows())
    wide, narrow = (
        evaluate(measured[12:], calibrate=given).predictions[0] for given in ((), measured[:12])
    )
    assert narrow.seconds_high / narrow.seconds_low < wide.seconds_high / wide.seconds_low


def test_without_rows_the_fit_is_the_priors():
    base = uncalibrated()
    assert merged_rates(base).values == fitted_priors().rates.values
    width = fitted_priors().constants[base.time.names[0]].width
    assert base.time.covariance[0, 0] == pytest.approx(width**2)


def test_an_offset_of_a_group_moves_no_constant():
    runs = read_runs(rows())
    names = relevant(tuple(CONSTANTS), runs.job)
    predict = time_of(runs.job)
    measured = predict(fitted_priors().rates) + 0.05
    settings = {"priors": fitted_priors().constants, "spread": 0.02}
    free = fit(predict, measured, names, **settings)
    groups = {"groups": np.zeros(len(measured), dtype=int), "group_width": 1.0}
    held, offsets = grouped_fit(predict, measured, names, **settings, **groups)
    assert offsets[0] == pytest.approx(0.05, abs=0.01)
    assert abs(np.log(held.rates["overall"])) < abs(np.log(free.rates["overall"]))


def test_a_fit_does_not_depend_on_its_start():
    runs = read_runs(rows())
    names = relevant(tuple(CONSTANTS), runs.job)
    predict, priors = time_of(runs.job), fitted_priors().constants
    measured = truth({"gemm.hopper": 0.9, "p2p": 1.3}, rows())
    measured = np.log([float(row["step_time_s"]) for row in measured])
    one = fit(predict, measured, names, priors=priors, spread=0.02)
    values = dict(one.rates.values)
    values["gemm.hopper"] *= 1.2
    values["host"] *= 0.5
    settings = {"priors": priors, "spread": 0.02, "begin": Rates(values)}
    groups = {"groups": np.zeros(len(measured), dtype=int), "group_width": 1e-6}
    other, _ = grouped_fit(predict, measured, names, **settings, **groups)
    assert other.rates["gemm.hopper"] == pytest.approx(one.rates["gemm.hopper"], rel=0.01)
    fast = fit(predict, measured - 1.5, names, priors=priors, spread=0.02)
    assert fast.rates["gemm.hopper"] <= priors["gemm.hopper"].most * (1 + 1e-9)
    assert fast.rates["memory"] <= 0.95 * (1 + 1e-9) and fast.rates["bubble"] >= 0.95 * (1 - 1e-9)


def test_noise_is_part_of_the_deviation():
    runs = read_runs(rows())
    base = uncalibrated()
    assert np.all(deviation(time_of(runs.job), base.time, runs.job) > base.time.spread)
