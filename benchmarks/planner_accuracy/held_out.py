"""Errors on sources that nothing was fitted to, and after a calibration on at most 12 of their rows
per GPU and framework.

The rows of the calibration are selected without their measurements. Each next one is that with the
least certain prediction, given those before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.planner_accuracy.frameworks import datasheet_priors, without_name
from benchmarks.planner_accuracy.learn import learn, rows_of
from benchmarks.planner_accuracy.predict import (
    Evaluation,
    Prediction,
    evaluate,
    source_of,
    stack_of,
)
from benchmarks.planner_accuracy.runs import Row, choose, measured_seconds, read_runs
from benchmarks.planner_accuracy.widths import Residuals, residuals, scaled, scales_of
from plait.planner import calibrate as fitting
from plait.planner.constants import Priors

CALIBRATION_ROWS = 12
_FAMILIES = (
    ("NANO", "NANOBEST"),
    ("NEMO2405", "NEMO2407", "NEMOLC", "DGXC", "DGXC25", "DGXCMOE", "MLPERF", "NMTRON15B"),
    ("DGXCMAX", "DGXCPAX", "JAXMAX", "JAXPAX"),
    ("MBRIDGE", "AUTOMODEL", "MOEZOO", "QW3BRIDGE"),
    ("TITANOLD", "TITANLOG", "TITANFP4", "TORCHAO", "TAONC", "TITAN24"),
    ("FSDP2F8", "FMSFSDP"),
    ("DLPONE", "DLPMEG"),
    ("INTERNEVO", "INTERNMEM", "XTUNER"),
    ("GIPFEL", "ALPSCG", "ALPSMEM"),
    ("ZBPP", "VOCABPP"),
)
"""Sources that the same people measured."""


def _family(source: str) -> tuple[str, ...]:
    for names in _FAMILIES:
        if source in names:
            return names
    return (source,)


@cache
def learned_without(sources: tuple[str, ...]) -> Priors:
    """Return constants from all published runs except those of `sources`.

    Kernels of frameworks that these sources ran are not learned. The widths are those with which
    nine in ten rows of other sources, each held out, are in their intervals.
    """
    return with_widths_of_others(_medians_without(sources), without=sources)


def with_widths_of_others(priors: Priors, *, without: tuple[str, ...] = ()) -> Priors:
    """Return `priors` with the widths that the other sources need, each held out."""
    families = {_family(source_of(row)) for row in _scored()} - {without}
    return scaled(priors, scales_of(map(_residuals, sorted(families))))


@cache
def _scored() -> tuple[Row, ...]:
    """Return the rows that determine widths, with those that no constant is learned from."""
    rows = rows_of("runs", "unseen_2")
    return tuple(r for r in rows if r["tier"] == "A" and not r["moe"] and r["status"] == "ok")


@cache
def _residuals(sources: tuple[str, ...]) -> Residuals:
    return residuals(_rows_from(sources, _scored()), _medians_without(sources))


def _rows_from(sources: tuple[str, ...], rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if source_of(row) in sources]


@cache
def _medians_without(sources: tuple[str, ...]) -> Priors:
    rows = rows_of("runs", "sweeps")
    learned = _from_all()
    if _rows_from(sources, rows):
        learned = learn(rows, without=sources, near=learned)
    rows += rows_of("unseen_2", "unseen_3")
    believed = datasheet_priors().constants
    constants = dict(learned.constants)
    for variant in read_runs(_rows_from(sources, rows)).variants:
        kernels = f"stack.{variant.framework.name}"
        if kernels in believed:
            constants[kernels] = believed[kernels]
    return replace(learned, constants=constants)


@cache
def _from_all() -> Priors:
    return learn(rows_of("runs", "sweeps"))


def left_out(rows: Sequence[Row], *, calibrated: bool, named: bool = True) -> Evaluation:
    """Predict each row by constants that were learned without its source and related ones.

    Args:
        rows: Rows of published runs.
        calibrated: Whether a few rows of each source calibrate the constants for the others.
        named: Whether the entry of a framework is used, or only what a row says about its kernels.
    """
    predictions: list[Prediction] = []
    reasons: dict[int, str] = {}
    by_source: dict[str, list[Row]] = defaultdict(list)
    index_of: dict[int, int] = {}
    for index, row in enumerate(rows):
        framework = row["framework"] if named else without_name(row["framework"])
        predicted_row = {**row, "framework": framework}
        by_source[source_of(row)].append(predicted_row)
        # The rows of the calibration are not among those of an evaluation.
        index_of[id(predicted_row)] = index
    for source, members in by_source.items():
        priors = learned_without(_family(source))
        selected = first_rows(members, priors) if calibrated else []
        evaluation = evaluate(members, calibrate=selected, priors=priors)
        for prediction in evaluation.predictions:
            index = index_of[id(evaluation.rows[prediction.row])]
            predictions.append(replace(prediction, row=index))
        for row_index, reason in evaluation.reasons.items():
            reasons[index_of[id(evaluation.rows[row_index])]] = reason
    predictions.sort(key=lambda prediction: prediction.row)
    return Evaluation(tuple(rows), tuple(predictions), reasons)


def first_rows(rows: Sequence[Row], priors: Priors) -> list[Row]:
    """Return at most 12 rows, and half of all, per GPU and framework."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if measured_seconds(row) and row["status"] == "ok":
            for variant in read_runs([row]).variants[:1]:
                groups[stack_of(variant)].append(row)
    selected: list[Row] = []
    for group in groups.values():
        selected += _informative(group, priors, min(CALIBRATION_ROWS, len(group) // 2))
    return selected


def _informative(rows: Sequence[Row], priors: Priors, count: int) -> list[Row]:
    runs = read_runs(rows)
    if runs.job is None or count < 1:
        return []
    base = fitting.uncalibrated(priors)
    chosen = choose(runs, base)
    job = runs.job.take(np.array(list(chosen.values())))
    names = fitting.relevant(base.time.names, job)
    slopes = fitting.sensitivity(fitting.time_of(job), base.time, names)
    covariance = base.time.covariance.copy()
    selected: list[int] = []
    for _ in range(count):
        variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
        variance[selected] = -1
        index = int(np.argmax(variance))
        selected.append(index)
        # What the measurement of this row, with a noise of 5 %, leaves uncertain.
        direction = covariance @ slopes[index]
        covariance -= np.outer(direction, direction) / (slopes[index] @ direction + 0.05**2)
    owners = list(chosen)
    return [rows[owners[index]] for index in selected]
