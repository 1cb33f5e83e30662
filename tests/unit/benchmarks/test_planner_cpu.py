"""`benchmarks/planner_cpu` calibrates the planner to a machine, and predicts other layouts."""

import numpy as np

from benchmarks.planner_cpu import report
from benchmarks.planner_cpu.layouts import BATCH, CASES, QUICK, request
from plait.planner.calibrate import Calibration, Fit, uncalibrated
from plait.planner.constants import Rates
from plait.planner.search import price, simulate_pipelines


def machine(**factors):
    """Return the calibration of a machine whose constants differ by the factors."""
    base = uncalibrated()
    values = dict(base.time.rates.values)
    for name, factor in factors.items():
        values[name.replace("_", ".")] *= factor
    return Calibration(Fit(base.time.names, Rates(values), base.time.covariance, 0.02), base.memory)


def test_every_layout_has_all_processes_and_the_full_batch():
    for case in CASES:
        layout = case.layout
        dp = layout["dp_replicate"] * layout["dp_shard"]
        assert layout["tp"] * layout["pp"] * dp == case.processes
        assert layout["micro_batch"] * layout["accumulation"] * dp == BATCH
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert set(QUICK) <= names
    assert 8 <= sum(case.seen for case in CASES) < len(CASES) / 2


def test_unseen_layouts_of_a_machine_that_differs_are_predicted():
    truth = machine(
        gemm_cpu=1.5, memory_cpu=0.8, link_cpu=1.5, latency_cpu=2.5, host=0.8, packing_cpu=1.2
    )
    seconds = {}
    noise = np.random.default_rng(0)
    for case in CASES:
        case_request = request(case.processes)
        choices = price(case_request, [case.layout], calibration=truth)
        (exact,) = simulate_pipelines(case_request, choices, truth)
        seconds[case.name] = exact.seconds * float(np.exp(noise.normal(0, 0.015)))

    result = report.compare(CASES, seconds)
    unseen = result["unseen"]
    assert result["unseen_uncalibrated"]["median"] > 0.15
    assert unseen["median"] < 0.03 and unseen["max"] < 0.10
    assert unseen["rows"] == sum(not case.seen for case in CASES)
    machine_facts = {"cpu": "EPYC", "cores": 2, "versions": {"torch": "2"}}
    page = report.section(result | {"machine": machine_facts})
    assert f"median error {unseen['median']:.1%}" in page and page.count("| fitted |") == 9
