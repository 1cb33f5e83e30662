"""Learn the planner's constants from published runs: medians and widths for new machines.

Every source has about the same weight. A source has an offset that moves no constant. `learn` can
leave sources out, which the errors in the docs need.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_accuracy.frameworks import (
    DATA,
    STACKS,
    datasheet_priors,
    is_unknown,
    open_kernels,
)
from benchmarks.planner_accuracy.grouped_fit import grouped_fit
from benchmarks.planner_accuracy.predict import source_of
from benchmarks.planner_accuracy.runs import (
    Row,
    choose,
    job_of,
    measured_bytes,
    measured_seconds,
    read_runs,
)
from plait.planner import calibrate as fitting
from plait.planner import constants
from plait.planner.constants import Priors

_OFFSETS = {"time": 0.10, "memory": 0.08}
"""Widths of the offset of a source. That of times is wider than the differences of frameworks
(`constants.of_kernels`), so that no source alone moves a constant."""
_NOISE = {"time": 0.06, "memory": 0.08}
_NOISY = {"NANO": 0.15, "NANOBEST": 0.15}
"""Weights of sources whose repeated runs differ by more than an order of magnitude."""
_UNTRUSTED_MEMORY = (
    *("DSSDMA", "THUNDER", "LAMBDA", "COLOSSAL", "JZV100", "ALPA", "DLPONE", "DLPMEG", "MI325X"),
)
"""Sources whose memory contradicts the size of their model, is of an unknown tool, of the pool of
XLA or OneFlow, or is what a process reserved."""
_HOW = (
    "python -m benchmarks.planner_accuracy --learn, from benchmarks/planner_accuracy/data; "
    "[median, width of the logarithm]"
)


def rows_of(*names: str) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    return rows


def learn(
    rows: Iterable[Row], *, without: Sequence[str] = (), near: Priors | None = None
) -> Priors:
    """Fit the constants to rows of tiers A and B of models without experts.

    Args:
        rows: Rows of published runs.
        without: Sources that are left out.
        near: Where the search starts. The result is the same, sooner.
    """
    lessons = [row for row in rows if _is_lesson(row) and source_of(row) not in without]
    base = datasheet_priors()
    runs = read_runs(lessons)
    chosen = choose(runs, fitting.uncalibrated(base))
    seconds: dict[int, float] = {}
    peaks: dict[int, tuple[float, str]] = {}
    for row in chosen:
        duration = measured_seconds(lessons[row])
        if duration:
            seconds[row] = duration
        peak = measured_bytes(lessons[row])
        if peak and source_of(lessons[row]) not in _UNTRUSTED_MEMORY:
            peaks[row] = peak
    time_job = job_of(runs, chosen, seconds)
    memory_job = job_of(runs, chosen, peaks)
    peak_bytes, kinds = zip(*peaks.values(), strict=True)

    def fit(
        what: str, indices: Iterable[int], predict: Any, measured: Any, names: Sequence[str]
    ) -> fitting.Fit:
        sources = []
        groups = []
        for row in indices:
            source = source_of(lessons[row])
            sources.append(source)
            groups.append(f"{source} {lessons[row]['gpu']}")
        return grouped_fit(
            predict,
            np.log(np.array(measured, dtype=float)),
            names,
            priors=base.constants,
            spread=_NOISE[what],
            weights=_weights(np.array(sources)),
            groups=np.unique(groups, return_inverse=True)[1],
            group_width=_OFFSETS[what],
            begin=near.rates if near is not None else None,
        )[0]

    names = [name for name in fitting.relevant(base.time_names, time_job) if name != "overall"]
    predict = fitting.time_of(time_job)
    time = fit("time", seconds, predict, list(seconds.values()), names)
    predict = fitting.memory_of(memory_job, kinds)
    memory = fit("memory", peaks, predict, peak_bytes, fitting.MEMORY_NAMES)
    learned = {}
    for name, constant in base.constants.items():
        learned[name] = constant
        fitted = memory if name.startswith("memory:") else time
        if name in open_kernels():  # the next user writes others
            continue
        width = constant.width
        if name in fitted.names:
            index = fitted.names.index(name)
            # New machines are not those of the fit, so half of the prior width stays.
            width = float(np.hypot(0.5 * constant.width, np.sqrt(fitted.covariance[index, index])))
        median = float(fitted.rates[name])
        learned[name] = replace(constant, median=median, width=min(width, constant.width))
    return Priors(learned, 0.052, 0.14)


def _is_lesson(row: Row) -> bool:
    is_priced = row["tier"] in "AB" and row["status"] == "ok" and not row["moe"]
    # The power of such GPUs is limited to an unknown value.
    is_limited = "limited" in row["gpu"]
    return is_priced and not is_limited and not is_unknown(row["framework"])


def _weights(sources: np.ndarray) -> np.ndarray:
    weights = np.ones(len(sources))
    for source in np.unique(sources):
        rows = sources == source
        weights[rows] = source_weight(rows.sum()) * _NOISY.get(str(source), 1.0)
    return weights


def source_weight(rows: int) -> float:
    """Return the weight of each of the rows of a source, so that large ones do not decide alone."""
    return float(min(1.0, 40 / rows) ** 0.7)


def write(learned: Priors, path: Path) -> None:
    """Write the constants for the planner, and the speeds of other frameworks to `STACKS`."""
    shipped = constants.datasheet_priors().constants
    of_planner: dict[str, list[float]] = {}
    of_others: dict[str, list[float]] = {}
    for name, constant in learned.constants.items():
        constants_of_file = of_planner if name in shipped else of_others
        constants_of_file[name] = [float(f"{constant.median:.4g}"), round(constant.width, 4)]
    spreads = {"time_spread": learned.time_spread, "memory_spread": learned.memory_spread}
    _write(path, {**spreads, "constants": of_planner})
    _write(STACKS, {"constants": of_others})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"source": _HOW, **content}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
