"""The files of `plait plan --report` and `--trace`: checked before the search, written after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.errors import InputError
from plait.observe.files import write_text
from plait.observe.report.plan import Story, plan_page
from plait.observe.trace import chrome_trace
from plait.planner.calibrate import Calibration
from plait.planner.detail import beyond, timeline
from plait.planner.explain import Change, Comparison, describe
from plait.planner.search import Plan


def write_report(
    path: Path,
    found: Plan,
    *,
    notes: Sequence[str] = (),
    reasons: Sequence[Comparison] = (),
    changes: Sequence[Change] = (),
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> None:
    """The page of a plan. Raises InputError for a file that cannot be written."""
    write_text("--report", path, plan_page(Story(found, notes, reasons, changes, fixed, calibration)))


def write_trace(path: Path, found: Plan, *, calibration: Calibration | None = None) -> None:
    """The pipeline of the best choice as a Chrome trace. Raises InputError where its schedule has no table, or the file cannot be
    written."""
    best = found.best[0]
    try:
        simulated = timeline(found.request, best, calibration=calibration)
    except InputError as error:
        raise InputError(f"--trace: the best layout has no timeline: {error}; leave the option out, or --fix another schedule") from None
    trace = chrome_trace(simulated, title=describe(best.layout), after=beyond(best, simulated))
    write_text("--trace", path, json.dumps(trace) + "\n")
