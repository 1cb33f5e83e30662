"""The comparison of predicted with measured times, and its page."""

from __future__ import annotations

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
    calibration = calibrate(
        runs_of(_measured(case, seconds[case.name]) for case in cases if case.seen)
    )
    rows = []
    for case in cases:
        before, after = (_predicted(case, one) for one in (uncalibrated(), calibration))
        took = seconds[case.name]
        rows.append({
            "name": case.name, "processes": case.processes, "seen": case.seen, "seconds": took, "uncalibrated": before,
            "predicted": after, "error": after / took - 1, "error_uncalibrated": before / took - 1,
        })  # fmt: skip
    constants = {name: float(calibration.time.rates[name]) for name in calibration.time.names}
    return {
        "rows": rows,
        "unseen": _errors(rows, "error"),
        "unseen_uncalibrated": _errors(rows, "error_uncalibrated"),
        "constants": constants,
    }


def _errors(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    found = np.abs([row[key] for row in rows if not row["seen"]])
    return {
        "rows": len(found),
        "median": float(np.median(found)),
        "max": float(found.max()),
        "within_10": float((found <= AIM).mean()),
    }


def _predicted(case: Case, calibration: Calibration) -> float:
    asked = request(case.processes)
    return simulate_pipelines(
        asked, price(asked, [case.layout], calibration=calibration), calibration
    )[0].seconds


def _measured(case: Case, seconds: float) -> Measured:
    asked = request(case.processes)
    return Measured(
        gpu="cpu", machine="", devices=case.processes, devices_per_node=case.processes, precision="fp32", compiled=False,
        sequence=asked.sequence, architecture=facts_of(asked.model.architecture), layout=layout_facts(case.layout), seconds=seconds,
    )  # fmt: skip


def section(result: Mapping[str, Any]) -> str:
    """Return the section `results` of the page."""
    unseen, before, machine = result["unseen"], result["unseen_uncalibrated"], result["machine"]
    seen = sum(row["seen"] for row in result["rows"])
    rows = [
        [
            row["name"],
            str(row["processes"]),
            "fitted" if row["seen"] else "",
            f"{row['seconds']:.3f}",
            f"{row['uncalibrated']:.3f}",
            f"{row['predicted']:.3f}",
            f"{row['error']:+.1%}",
        ]
        for row in result["rows"]
    ]
    header = ("layout", "processes", "", "measured s", "before s", "calibrated s", "error")
    return "\n".join(
        [
            f"Measured on {machine['cpu']}, {machine['cores']} cores, with torch "
            f"{machine['versions']['torch']}. The constants are fitted to {seen} layouts.\n",
            f"Other layouts: median error {unseen['median']:.1%}, largest {unseen['max']:.1%}, "
            f"{unseen['within_10']:.0%} of {unseen['rows']} within 10 %. With the constants that "
            f"ship: median {before['median']:.1%}, largest {before['max']:.1%}.\n",
            table(header, rows),
        ]
    )
