"""Predictions of published runs, and their errors by source, GPU and framework.

The measurement of a row is not used to predict it. Rows for calibration move the constants of their
device and framework, and are not predicted. Rows that cannot be priced are listed with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import erf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.frameworks import fitted_priors
from benchmarks.planner_accuracy.metrics import Confusion, confusion, errors, ranking
from benchmarks.planner_accuracy.runs import (
    Row,
    Runs,
    choose,
    costs,
    measured_bytes,
    measured_seconds,
    read_runs,
)
from benchmarks.planner_accuracy.runs import calibrate as fitted_to
from plait.planner.calibrate import (
    Calibration,
    deviation,
    memory_of,
    merged_rates,
    time_of,
    uncalibrated,
)
from plait.planner.constants import Priors
from plait.planner.request import estimate
from plait.planner.search import NINETY

Array = NDArray[np.float64]
LIKELY = 0.5
"""Least probability with which a row counts as predicted to fit."""
_KINDS = ("allocated", "reserved", "total")


@dataclass(frozen=True)
class Prediction:
    """The prediction for one row, with 90 % intervals."""

    row: int
    source: str
    gpu: str
    framework: str
    seconds: float
    seconds_low: float
    seconds_high: float
    allocated_bytes: float
    reserved_bytes: float
    total_bytes: float
    memory_low: float
    memory_high: float
    """Ends of the interval are of `measured_kind`, or of the total if nothing was measured."""
    fit_probability: float
    terms: Mapping[str, float]
    memory_terms: Mapping[str, float]
    experts: bool
    measured_seconds: float | None
    measured_bytes: float | None
    measured_kind: str | None
    status: str

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.fit_probability >= LIKELY

    @property
    def memory_bytes(self) -> float:
        """Predicted bytes of the kind that was measured."""
        named = {"allocated": self.allocated_bytes, "reserved": self.reserved_bytes}
        return named.get(self.measured_kind or "", self.total_bytes)


@dataclass(frozen=True)
class Evaluation:
    """Predictions, and the rows that could not be priced."""

    rows: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    reasons: Mapping[int, str]
    used_to_calibrate: int = 0


def source_of(row: Row) -> str:
    """Return the source of a row: the prefix of its id, or its `source`."""
    name = (row.get("id") or "").rsplit("-", 1)[0]
    return name or (row.get("source") or "unknown")


def evaluate(
    rows: Sequence[Row], *, calibrate: Sequence[Row] = (), priors: Priors | None = None
) -> Evaluation:
    """Predict every row.

    Args:
        rows: Rows of published runs.
        calibrate: Measured rows that move the constants of their device and framework.
        priors: Constants. Default: those that ship, and those of the table of frameworks.
    """
    priors = priors or fitted_priors()
    used = {row["id"] for row in calibrate if row.get("id")}
    rows = tuple(row for row in rows if not (row.get("id") and row["id"] in used))
    runs = read_runs(rows)
    fits = _calibrations(calibrate, priors)
    if runs.job is None:
        return Evaluation(rows, (), runs.reasons, len(calibrate))
    groups: dict[tuple[str, str] | None, list[int]] = defaultdict(list)
    for index, variant in enumerate(runs.variants):
        key = (str(variant.device.name), str(variant.framework.name))
        groups[key if key in fits else None].append(index)
    found: list[Prediction] = []
    for group, indices in groups.items():
        calibration = uncalibrated(priors) if group is None else fits[group]
        found += _predict(runs, np.array(indices), calibration)
    found.sort(key=lambda prediction: prediction.row)
    return Evaluation(rows, tuple(found), runs.reasons, len(calibrate))


def _calibrations(rows: Sequence[Row], priors: Priors) -> dict[tuple[str, str] | None, Calibration]:
    by: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        one = read_runs([row])
        if one.variants:
            variant = one.variants[0]
            by[str(variant.device.name), str(variant.framework.name)].append(row)
    return {key: fitted_to(read_runs(group), priors=priors) for key, group in by.items()}


def _predict(runs: Runs, indices: NDArray[np.int64], calibration: Calibration) -> list[Prediction]:
    assert runs.job is not None
    part = Runs(runs.rows, tuple(runs.variants[i] for i in indices), runs.job.take(indices), {})
    chosen = choose(part, costs(part, calibration))
    rows, picks = list(chosen), np.array(list(chosen.values()))
    assert part.job is not None
    job = part.job.take(picks)
    rates = merged_rates(calibration)
    result = estimate(job, rates)
    shape = (len(rows),)
    measured_memory = [measured_bytes(runs.rows[row]) for row in rows]
    kinds = [found[1] if found else "total" for found in measured_memory]
    time_spread = deviation(time_of(job), calibration.time, job)
    assumed = [part.variants[pick].assumed for pick in picks]
    # What a row leaves open adds to the uncertainty of its prediction.
    open_questions = np.array([0.08 * min(len(notes), 2) for notes in assumed])
    time_spread = np.sqrt(time_spread**2 + open_questions**2)
    memory_spread = np.sqrt(
        deviation(memory_of(job, kinds), calibration.memory, job) ** 2 + open_questions**2
    )
    total_spread = np.sqrt(
        deviation(memory_of(job, ["total"] * len(rows)), calibration.memory, job) ** 2
        + open_questions**2
    )
    seconds = np.broadcast_to(np.asarray(result.seconds, float), shape)
    memory = {
        kind: np.broadcast_to(np.asarray(getattr(result.memory, kind), float), shape)
        for kind in _KINDS
    }
    device = np.broadcast_to(np.asarray(job.device.memory_bytes, float), shape)
    terms = {
        name: np.broadcast_to(np.asarray(value, float), shape)
        for name, value in result.step.terms.items()
    }
    memory_terms = {
        name: np.broadcast_to(np.asarray(value, float), shape)
        for name, value in result.memory.terms.items()
    }
    found = []
    for i, row_index in enumerate(rows):
        row, kind = runs.rows[row_index], measured_memory[i]
        value = memory[kinds[i]][i]
        margin = (np.log(device[i]) - np.log(memory["total"][i])) / total_spread[i]
        found.append(
            Prediction(
                row=row_index,
                source=source_of(row),
                gpu=str(part.variants[picks[i]].device.name),
                framework=str(part.variants[picks[i]].framework.name),
                seconds=float(seconds[i]),
                seconds_low=float(seconds[i] * np.exp(-NINETY * time_spread[i])),
                seconds_high=float(seconds[i] * np.exp(NINETY * time_spread[i])),
                allocated_bytes=float(memory["allocated"][i]),
                reserved_bytes=float(memory["reserved"][i]),
                total_bytes=float(memory["total"][i]),
                memory_low=float(value * np.exp(-NINETY * memory_spread[i])),
                memory_high=float(value * np.exp(NINETY * memory_spread[i])),
                fit_probability=0.5 * (1 + erf(margin / sqrt(2))),
                terms={name: float(values[i]) for name, values in terms.items()},
                memory_terms={name: float(values[i]) for name, values in memory_terms.items()},
                experts=bool(np.asarray(job.model.experts)[i] > 0),
                measured_seconds=measured_seconds(row),
                measured_bytes=kind[0] if kind else None,
                measured_kind=kind[1] if kind else None,
                status=(row.get("status") or "ok").strip(),
            )
        )
    return found


_SAME = (
    "n_layers",
    "hidden",
    "n_heads",
    "ffn_hidden",
    "vocab",
    "gpu",
    "gpus_total",
    "seq_len",
    "global_batch",
    "precision",
    "framework",
)
"""Columns that are equal in layouts that compete with each other."""


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return errors of time and memory by source, GPU and framework, ranking, fit, and reasons."""
    dense = [p for p in evaluation.predictions if not p.experts]
    experts = [p for p in evaluation.predictions if p.experts]
    ran = [p for p in evaluation.predictions if p.status.lower() == "ok"]
    fit = fit_of(evaluation.predictions)
    ranked = ranking(_groups(evaluation))
    return {
        "rows": len(evaluation.rows),
        "predicted": len(evaluation.predictions),
        "used_to_calibrate": evaluation.used_to_calibrate,
        "time": _errors(dense, interval_of_time),
        "time_experts": _errors(experts, interval_of_time),
        "memory": _errors(ran, interval_of_memory),
        "ranking": asdict(ranked) if ranked else None,
        "fit": asdict(fit) | {"false_fits": fit.false_fits, "false_alarms": fit.false_alarms},
        "not_priced": _count(evaluation.reasons.values()),
    }


def fit_of(predictions: Sequence[Prediction]) -> Confusion:
    """Count fit and no fit of rows that ran or ran out of memory. Crashes may have other causes."""
    certain = [p for p in predictions if p.status in ("OOM", "ok")]
    return confusion(
        np.array([p.fits for p in certain], dtype=bool),
        np.array([p.status == "ok" for p in certain], dtype=bool),
    )


def interval_of_time(p: Prediction) -> tuple[float, float, float, float] | None:
    """Return (predicted, measured, low, high) if seconds were measured."""
    return (
        None
        if p.measured_seconds is None
        else (p.seconds, p.measured_seconds, p.seconds_low, p.seconds_high)
    )


def interval_of_memory(p: Prediction) -> tuple[float, float, float, float] | None:
    """Return (predicted, measured, low, high) if bytes were measured."""
    return (
        None
        if p.measured_bytes is None
        else (p.memory_bytes, p.measured_bytes, p.memory_low, p.memory_high)
    )


def _errors(
    predictions: Sequence[Prediction],
    values: Callable[[Prediction], tuple[float, float, float, float] | None],
) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for title, key in (
        ("all", lambda p: "all"),
        ("source", lambda p: p.source),
        ("gpu", lambda p: p.gpu),
        ("framework", lambda p: p.framework),
    ):
        by: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for prediction in predictions:
            found = values(prediction)
            if found is not None:
                by[key(prediction)].append(found)
        tables[title] = {
            name: asdict(errors(*(np.array(column) for column in zip(*rows, strict=True))))
            for name, rows in sorted(by.items())
        }
    return tables


def _groups(evaluation: Evaluation) -> list[tuple[Array, Array]]:
    by: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for p in evaluation.predictions:
        if p.measured_seconds is not None and p.status.lower() == "ok":
            row = evaluation.rows[p.row]
            by[(p.source, *(row.get(name) or "" for name in _SAME))].append(
                (p.seconds, p.measured_seconds)
            )
    return [
        (np.array([x for x, _ in rows]), np.array([y for _, y in rows])) for rows in by.values()
    ]


def _count(reasons: Any) -> dict[str, int]:
    counted: dict[str, int] = defaultdict(int)
    for reason in reasons:
        counted[reason] += 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))
