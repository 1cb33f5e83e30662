"""The comparison of predicted with measured times, and its page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.common.report import markdown as table
from benchmarks.planner_cpu.layouts import Case, request
from plait.planner.calibrate import (
    Calibration,
    Measured,
    calibrate,
    facts_of,
    layout_facts,
    runs_of,
    uncalibrated,
)
from plait.planner.search import price, simulate_pipelines

AIM = 0.10


def compare(cases: Sequence[Case], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Calibrate on the seen cases, and return all predictions and the errors of the others."""
    measured = [_measured(case, seconds[case.name]) for case in cases if case.seen]
    calibration = calibrate(runs_of(measured))
    rows = []
    for case in cases:
        took = seconds[case.name]
        before = _predicted(case, uncalibrated())
        after = _predicted(case, calibration)
        row = {"name": case.name, "processes": case.processes, "seen": case.seen, "seconds": took}
        row |= {"uncalibrated": before, "predicted": after}
        rows.append(row | {"error": after / took - 1, "error_uncalibrated": before / took - 1})
    return {
        "rows": rows,
        "unseen": _errors(rows, "error"),
        "unseen_uncalibrated": _errors(rows, "error_uncalibrated"),
        "constants": {name: float(calibration.time.rates[name]) for name in calibration.time.names},
    }


def _errors(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    errors = np.abs([row[key] for row in rows if not row["seen"]])
    return {
        "rows": len(errors),
        "median": float(np.median(errors)),
        "max": float(errors.max()),
        "within_10": float((errors <= AIM).mean()),
    }


def _predicted(case: Case, calibration: Calibration) -> float:
    of_case = request(case.processes)
    candidates = price(of_case, [case.layout], calibration=calibration)
    return simulate_pipelines(of_case, candidates, calibration)[0].seconds


def _measured(case: Case, seconds: float) -> Measured:
    of_case = request(case.processes)
    return Measured(
        gpu="cpu",
        machine="",
        devices=case.processes,
        devices_per_node=case.processes,
        precision="fp32",
        compiled=False,
        sequence=of_case.sequence,
        architecture=facts_of(of_case.model.architecture),
        layout=layout_facts(case.layout),
        seconds=seconds,
    )


def section(result: Mapping[str, Any]) -> str:
    unseen = result["unseen"]
    before = result["unseen_uncalibrated"]
    machine = result["machine"]
    rows = []
    for row in result["rows"]:
        times = (f"{row[key]:.3f}" for key in ("seconds", "uncalibrated", "predicted"))
        fitted = "fitted" if row["seen"] else ""
        rows.append([row["name"], str(row["processes"]), fitted, *times, f"{row['error']:+.1%}"])
    header = ("layout", "processes", "", "measured s", "before s", "calibrated s", "error")
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores, with torch "
        f"{machine['versions']['torch']}. The constants are fitted to "
        f"{sum(row['seen'] for row in result['rows'])} layouts.\n\n"
        f"Other layouts: median error {unseen['median']:.1%}, largest {unseen['max']:.1%}, "
        f"{unseen['within_10']:.0%} of {unseen['rows']} within 10 %. With the constants that "
        f"ship: median {before['median']:.1%}, largest {before['max']:.1%}.\n\n"
        f"{table(header, rows)}"
    )
