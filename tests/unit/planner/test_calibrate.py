"""A calibration finds the constants of a machine from a few measured runs."""

import numpy as np
import pytest

from benchmarks.planner_accuracy.grouped_fit import grouped_fit
from benchmarks.planner_accuracy.predict import evaluate, summary
from benchmarks.planner_accuracy.runs import read_runs
from plait.planner.calibrate import deviation, fit, merged_rates, relevant, time_of, uncalibrated
from plait.planner.constants import CONSTANTS, Rates, fitted_priors
from tests.unit.planner.rows import ROW


def make_rows(count=24):
    """Return rows of different layouts and sizes."""
    rows = []
    for index in range(count):
        hidden = (2048, 4096, 5120)[index % 3]
        fields = {
            "tp": (1, 2, 4, 8)[index % 4],
            "pp": (1, 2)[index // 4 % 2],
            "micro_batch": (1, 2)[index // 8 % 2],
            "hidden": hidden,
            "ffn_hidden": 4 * hidden,
            "gpus_total": 32,
        }
        texts = {name: str(value) for name, value in fields.items()}
        rows.append({**ROW, "id": f"X-{index}", **texts})
    return rows


def measure(**factors):
    """Return rows with the step times of a machine whose constants differ by the factors."""
    rows = make_rows()
    values = dict(fitted_priors().rates.values)
    for name, factor in factors.items():
        values[name.replace("_", ".")] *= factor
    seconds = np.exp(time_of(read_runs(rows).job)(Rates(values)))
    for row, value in zip(rows, seconds, strict=True):
        row["step_time_s"] = f"{value:.6f}"
    return rows


def errors_of(evaluation):
    return summary(evaluation)["time"]["all"]["all"]


def test_a_different_machine_is_learned_from_few_rows():
    rows = measure(gemm_hopper=0.8, link=0.75, p2p=1.5)
    assert errors_of(evaluate(rows))["median"] > 0.1
    errors = errors_of(evaluate(rows, calibrate=rows[:10]))
    assert errors["median"] < 0.03 and errors["rows"] == 14
    assert errors["coverage"] > 0.85


def test_predictions_of_other_devices_do_not_change():
    rows = measure(gemm_hopper=0.7)
    others = [{**row, "gpu": "A100-80GB"} for row in rows[10:]]
    calibrated = evaluate(others, calibrate=rows[:10])
    assert calibrated.predictions[0].seconds == evaluate(others).predictions[0].seconds


def test_one_outlier_changes_little():
    rows = measure()
    slow = str(50 * float(rows[0]["step_time_s"]))
    outlier = [{**rows[0], "step_time_s": slow}, *rows[1:8]]
    assert errors_of(evaluate(rows[8:], calibrate=outlier))["median"] < 0.05


def test_intervals_narrow_with_rows():
    rows = measure(gemm_hopper=0.9)

    def width(calibrate):
        prediction = evaluate(rows[12:], calibrate=calibrate).predictions[0]
        return prediction.seconds_high / prediction.seconds_low

    assert width(rows[:12]) < width(())


def test_without_rows_the_fit_is_the_priors():
    base = uncalibrated()
    assert merged_rates(base).values == fitted_priors().rates.values
    width = fitted_priors().constants[base.time.names[0]].width
    assert base.time.covariance[0, 0] == pytest.approx(width**2)


def test_an_offset_of_a_group_moves_no_constant():
    runs = read_runs(make_rows())
    names = relevant(tuple(CONSTANTS), runs.job)
    predict = time_of(runs.job)
    measured = predict(fitted_priors().rates) + 0.05
    settings = {"priors": fitted_priors().constants, "spread": 0.02}
    alone = fit(predict, measured, names, **settings)
    groups = {"groups": np.zeros(len(measured), dtype=int), "group_width": 1.0}
    grouped, offsets = grouped_fit(predict, measured, names, **settings, **groups)
    assert offsets[0] == pytest.approx(0.05, abs=0.01)
    assert abs(np.log(grouped.rates["overall"])) < abs(np.log(alone.rates["overall"]))


def test_a_fit_does_not_depend_on_its_start():
    runs = read_runs(make_rows())
    names = relevant(tuple(CONSTANTS), runs.job)
    predict = time_of(runs.job)
    rows = measure(gemm_hopper=0.9, p2p=1.3)
    measured = np.log([float(row["step_time_s"]) for row in rows])
    settings = {"priors": fitted_priors().constants, "spread": 0.02}
    expected = fit(predict, measured, names, **settings)

    values = dict(expected.rates.values)
    values["gemm.hopper"] *= 1.2
    values["host"] *= 0.5
    settings["begin"] = Rates(values)
    groups = {"groups": np.zeros(len(measured), dtype=int), "group_width": 1e-6}
    fitted, _ = grouped_fit(predict, measured, names, **settings, **groups)
    assert fitted.rates["gemm.hopper"] == pytest.approx(expected.rates["gemm.hopper"], rel=0.01)


def test_constants_stay_within_their_bounds():
    runs = read_runs(make_rows())
    names = relevant(tuple(CONSTANTS), runs.job)
    predict = time_of(runs.job)
    rows = measure(gemm_hopper=0.9, p2p=1.3)
    # No device is that fast.
    measured = np.log([float(row["step_time_s"]) for row in rows]) - 1.5
    priors = fitted_priors().constants
    rates = fit(predict, measured, names, priors=priors, spread=0.02).rates
    assert rates["gemm.hopper"] <= priors["gemm.hopper"].most * (1 + 1e-9)
    assert rates["memory"] <= 0.95 * (1 + 1e-9) and rates["bubble"] >= 0.95 * (1 - 1e-9)


def test_noise_is_part_of_the_deviation():
    runs = read_runs(make_rows())
    base = uncalibrated()
    assert np.all(deviation(time_of(runs.job), base.time, runs.job) > base.time.spread)
