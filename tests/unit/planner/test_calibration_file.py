"""Calibrations are files, and measured rates become constants of the model."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from plait.errors import InputError
from plait.planner.calibrate import (
    CalibrationOrigin,
    DeviceRates,
    calibrate,
    calibration_layouts,
    errors_with,
    leave_one_out_errors,
    load_calibration,
    memory_of,
    merged_rates,
    priors_from_rates,
    refuse_other,
    runs_of,
    save_calibration,
    uncalibrated,
)
from plait.planner.constants import fitted_priors
from plait.planner.hardware import cluster
from plait.planner.job import Layouts
from plait.planner.models import find_model
from plait.planner.request import Request, estimate, job_of
from plait.planner.search import price
from plait.planner.step_time import collective_seconds, group
from tests.unit.planner.rows import measured, planned


def test_a_file_gives_back_the_same_predictions(tmp_path):
    saved = calibrate(runs_of([measured(factor=1.2, index=index) for index in range(4)]))
    expected_origin = CalibrationOrigin("h100", "", {"rows": 4})
    save_calibration(tmp_path / "here.json", saved, expected_origin)
    loaded, origin = load_calibration(tmp_path / "here.json")
    assert origin == expected_origin
    request = Request(find_model("llama-3-8b"), cluster("h100", 16), 64, 2048)
    layout = {"dp_shard": 16, "stage": 3, "micro_batch": 1, "accumulation": 4}
    expected = price(request, [layout], calibration=saved)
    assert price(request, [layout], calibration=loaded) == expected
    assert price(request, [layout]) != expected


@pytest.fixture
def file(tmp_path):
    """Return the file of a calibration of H100."""
    file = tmp_path / "here.json"
    save_calibration(file, calibrate(runs_of([measured()])), CalibrationOrigin("h100"))
    return file


def test_a_file_of_another_device_is_refused(file):
    _, origin = load_calibration(file)
    refuse_other(file, origin, gpu="h100", machine="")
    with pytest.raises(InputError, match="calibration of h100, but the plan is for a100"):
        refuse_other(file, origin, gpu="a100", machine="")
    with pytest.raises(InputError, match="'EPYC', but this machine is 'Xeon'"):
        refuse_other(file, CalibrationOrigin("cpu", "EPYC"), gpu="cpu", machine="Xeon")


def test_a_damaged_file_is_refused(file, tmp_path):
    content = json.loads(file.read_text())

    def time_with(**change):
        return {"time": content["time"] | change}

    for change, message in (
        ({"format": "other"}, "its format is not"),
        ({"time": {}}, "KeyError"),
        (time_with(covariance=[[1.0]]), "covariance"),
        (time_with(spread=float("nan")), "the covariance or the spread is negative or not finite"),
        (time_with(constants={"warp": {"value": 1}}), "this version has no constant warp"),
    ):
        file.write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=message):
            load_calibration(file)
    content["time"]["constants"]["link"]["value"] = -1
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not a positive number"):
        load_calibration(file)
    file.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load_calibration(file)
    with pytest.raises(InputError, match="No such file"):
        load_calibration(tmp_path / "none.json")


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_predictions_follow_measured_rates(name):
    pair = cluster(name, 2)
    on_cpu = name == "cpu"
    precision = "fp32" if on_cpu else "bf16"
    shipped = fitted_priors()
    flops = {"small": 1e9, "large": 0.5 * pair.device.flops[precision]}
    rates = DeviceRates(flops, 0.4 * pair.device.memory_bandwidth, (2e-4, 1 / 3e9))
    learn = partial(priors_from_rates, shipped, pair.device, precision=precision)
    priors = learn(rates, processes=2)
    request = Request(find_model("llama-3-8b"), pair, 8, 512, precision)
    job = job_of(request, Layouts(dp_replicate=np.array([2])))
    for nbytes in (1e4, 1e6, 1e8):
        seconds = collective_seconds(job, priors.rates, group(job, "dp"), nbytes, "all_reduce")
        assert seconds == pytest.approx(2e-4 + nbytes / 3e9)

    # Two processes measured together on a CPU slow each other down.
    family = "gemm.cpu" if on_cpu else "gemm.hopper"
    crowding = 2 ** shipped.constants["crowding.cpu"].median if on_cpu else 1
    assert priors.constants[family].median / crowding == pytest.approx(0.5)
    if on_cpu:
        assert priors.constants[family].width < shipped.constants[family].width
    alone = learn(replace(rates, all_reduce=None), processes=1)
    for link in ("link", "link.cpu"):
        assert alone.constants[link] == shipped.constants[link]


@pytest.mark.parametrize("processes", [1, 2, 4, 6, 8])
def test_calibration_layouts_use_all_processes(processes):
    layouts = calibration_layouts(processes, batch=4 * processes, heads=6)
    for layout in layouts:
        dp = layout["dp_replicate"] * layout["dp_shard"]
        assert layout["tp"] * layout["pp"] * dp == processes
        assert layout["micro_batch"] * layout["accumulation"] * dp == 4 * processes
        assert layout["accumulation"] >= layout["pp"]
    assert len({tuple(layout.items()) for layout in layouts}) == len(layouts)

    expected = {(1, 1, 0)}
    if processes > 1:
        expected |= {(1, 1, 1), (1, 1, 2), (1, 1, 3)}
    if processes % 2 == 0:
        expected |= {(2, 1, 0), (1, 2, 0)}
    assert {(layout["tp"], layout["pp"], layout["stage"]) for layout in layouts} == expected


def test_leave_one_out_errors_exceed_those_of_the_fit():
    factors = (1.3, 1.32, 1.28, 1.3, 1.6)
    runs = runs_of([measured(factor=factor, index=i) for i, factor in enumerate(factors)])
    count, before, _ = errors_with(runs, uncalibrated())
    assert count == 5 and before == pytest.approx(1 - 1 / 1.3, abs=0.01)
    _, after, largest = errors_with(runs, calibrate(runs))
    assert after < 0.05
    assert leave_one_out_errors(runs)[2] >= largest


def seconds_of(runs):
    """Return seconds per step by the shipped constants."""
    return np.asarray(estimate(runs_of(runs).job, merged_rates(uncalibrated())).seconds)


def test_a_run_is_priced_as_the_plan_priced_it():
    runs = [measured(index=index) for index in range(4)] + [measured("llama-2-7b")]
    job = runs_of(runs).job
    assert seconds_of(runs) == pytest.approx([run.seconds for run in runs], rel=1e-9)
    allocated = np.exp(memory_of(job, ["allocated"] * 5)(fitted_priors().rates))
    assert allocated == pytest.approx([run.bytes for run in runs], rel=1e-9)


def test_slower_runs_make_plans_slower_and_more_certain():
    calibration = calibrate(runs_of([measured(factor=1.3, index=index) for index in range(5)]))
    planned_runs = planned("llama-3-8b")
    layout = planned_runs.best[5].layout
    (before,) = price(planned_runs.request, [layout])
    (after,) = price(planned_runs.request, [layout], calibration=calibration)
    assert after.seconds / before.seconds == pytest.approx(1.3, rel=0.06)
    assert after.seconds_high / after.seconds < before.seconds_high / before.seconds


def test_a_compiled_run_is_priced_as_compiled():
    plain, compiled = seconds_of([measured(), replace(measured(), compiled=True)])
    assert compiled < plain
