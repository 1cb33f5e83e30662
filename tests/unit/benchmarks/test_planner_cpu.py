"""`benchmarks/planner_cpu`: its layouts, and that its comparison finds a machine that the model can describe."""

import numpy as np

from benchmarks.planner_cpu import report
from benchmarks.planner_cpu.layouts import BATCH, CASES, QUICK, request
from plait.planner.calibrate import Calibration, Fit, uncalibrated
from plait.planner.constants import Rates
from plait.planner.search import price, simulate_pipelines


def machine(**factors):
    """A machine whose constants are other than the shipped ones."""
    base = uncalibrated()
    values = dict(base.time.rates.values)
    values |= {
        name.replace("_", "."): values[name.replace("_", ".")] * factor
        for name, factor in factors.items()
    }
    return Calibration(Fit(base.time.names, Rates(values), base.time.covariance, 0.02), base.memory)


def test_every_layout_is_of_all_processes_and_the_whole_batch():
    for case in CASES:
        at = case.layout
        dp = at["dp_replicate"] * at["dp_shard"]
        assert at["tp"] * at["pp"] * dp == case.processes
        assert at["micro_batch"] * at["accumulation"] * dp == BATCH
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(QUICK) <= {case.name for case in CASES}
    assert 8 <= sum(case.seen for case in CASES) < len(CASES) / 2


def test_unseen_layouts_of_a_machine_that_differs_are_predicted():
    truth = machine(
        gemm_cpu=1.5, memory_cpu=0.8, link_cpu=1.5, latency_cpu=2.5, host=0.8, packing_cpu=1.2
    )
    seconds = {}
    noise = np.random.default_rng(0)
    for case in CASES:
        asked = request(case.processes)
        exact = simulate_pipelines(asked, price(asked, [case.layout], calibration=truth), truth)[
            0
        ].seconds
        seconds[case.name] = exact * float(np.exp(noise.normal(0, 0.015)))
    found = report.compare(CASES, seconds)
    assert found["unseen_uncalibrated"]["median"] > 0.15
    assert found["unseen"]["median"] < 0.03 and found["unseen"]["max"] < 0.10
    assert found["unseen"]["rows"] == sum(not case.seen for case in CASES)
    page = report.section(
        found | {"machine": {"cpu": "EPYC", "cores": 2, "versions": {"torch": "2"}}}
    )
    assert f"median error {found['unseen']['median']:.1%}" in page and page.count("| fitted |") == 9
