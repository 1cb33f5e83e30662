"""Errors on sources that nothing was fitted to, and after a calibration on at most 12 of their rows
per GPU and framework.

The rows of the calibration are selected without their measurements. Each next one is that with the
least certain prediction, given those before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.planner_accuracy.frameworks import datasheet_priors, without_name
from benchmarks.planner_accuracy.learn import learn, rows_of
from benchmarks.planner_accuracy.predict import Evaluation, Prediction, evaluate, source_of
from benchmarks.planner_accuracy.runs import Row, choose, costs, measured_seconds, read_runs
from benchmarks.planner_accuracy.widths import Residuals, residuals, scaled, scales_of
from plait.planner import calibrate as fitting
from plait.planner.constants import Priors

MOST = 12


@cache
def learned_without(sources: tuple[str, ...]) -> Priors:
    """Return constants from all published runs except those of `sources`.

    Kernels of frameworks that these sources ran are not learned. The widths are those with which
    nine in ten rows of other sources, each held out, are in their intervals.
    """
    return with_widths_of_others(_medians_without(sources), without=sources)


def with_widths_of_others(priors: Priors, *, without: tuple[str, ...] = ()) -> Priors:
    """Return `priors` with the widths that the other sources need, each held out."""
    others = [names for names in _scored_families() if names != without]
    return scaled(priors, scales_of(_residuals(names) for names in others))


@cache
def _scored_families() -> tuple[tuple[str, ...], ...]:
    return tuple(sorted({family(source_of(row)) for row in _scored()}))


@cache
def _scored() -> tuple[Row, ...]:
    """Return the rows that determine widths, with those that no constant is learned from."""
    return tuple(
        row
        for row in rows_of("runs", "unseen_2")
        if row["tier"] == "A" and not row["moe"] and row["status"] == "ok"
    )


@cache
def _residuals(names: tuple[str, ...]) -> Residuals:
    return residuals([row for row in _scored() if source_of(row) in names], _medians_without(names))


@cache
def _medians_without(sources: tuple[str, ...]) -> Priors:
    rows = rows_of("runs", "sweeps")
    taught = any(source_of(row) in sources for row in rows)
    found = learn(rows, without=sources, near=_from_all()) if taught else _from_all()
    own_rows = [
        row
        for row in rows_of("runs", "sweeps", "unseen_2", "unseen_3")
        if source_of(row) in sources
    ]
    ran = {str(variant.framework.name) for variant in read_runs(own_rows).variants}
    own = {
        f"stack.{name}": constant
        for name in ran
        if (constant := datasheet_priors().constants.get(f"stack.{name}"))
    }
    return replace(found, constants={**found.constants, **own})


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
    used = 0
    where: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        where[source_of(row)].append(index)
    for source, indices in where.items():
        priors = learned_without(family(source))
        part = [
            rows[i] if named else {**rows[i], "framework": without_name(rows[i]["framework"])}
            for i in indices
        ]
        given = first_rows(part, priors) if calibrated else []
        found = evaluate(part, calibrate=given, priors=priors)
        used += len(given)
        position = {id(row): indices[k] for k, row in enumerate(part)}
        predictions += [replace(p, row=position[id(found.rows[p.row])]) for p in found.predictions]
        reasons |= {position[id(found.rows[row])]: reason for row, reason in found.reasons.items()}
    return Evaluation(tuple(rows), tuple(sorted(predictions, key=lambda p: p.row)), reasons, used)


def family(source: str) -> tuple[str, ...]:
    """Return the sources that the same people measured."""
    families = (
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
    return next((names for names in families if source in names), (source,))


def first_rows(rows: Sequence[Row], priors: Priors, *, most: int = MOST) -> list[Row]:
    """Return at most `most` rows, and half of all, per GPU and framework."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if measured_seconds(row) and row["status"] == "ok":
            one = read_runs([row])
            if one.variants:
                groups[
                    (str(one.variants[0].device.name), str(one.variants[0].framework.name))
                ].append(row)
    return [
        row
        for group in groups.values()
        for row in _informative(group, priors, min(most, len(group) // 2))
    ]


def _informative(rows: Sequence[Row], priors: Priors, count: int) -> list[Row]:
    runs = read_runs(rows)
    if runs.job is None or count < 1:
        return []
    base = fitting.uncalibrated(priors)
    chosen = choose(runs, costs(runs, base))
    job = runs.job.take(np.array(list(chosen.values())))
    slopes = fitting.sensitivity(
        fitting.time_of(job), base.time, fitting.relevant(base.time.names, job)
    )
    covariance = base.time.covariance.copy()
    owners, picked = list(chosen), []
    for _ in range(count):
        variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
        variance[picked] = -1
        index = int(np.argmax(variance))
        picked.append(index)
        direction = covariance @ slopes[index]
        covariance -= np.outer(direction, direction) / (slopes[index] @ direction + 0.05**2)
    return [rows[owners[index]] for index in picked]
