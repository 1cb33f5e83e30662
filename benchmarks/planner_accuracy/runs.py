"""Rows of published runs as one job, or the reason why a row has no prediction.

What a row leaves open (micro-batch, chunks of a stage) is searched: the row becomes several
variants, and the fastest that fits counts. `row` reads the columns of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.row import (
    NotPriced,
    Row,
    Variant,
    number_of,
    variants_of,
)
from plait.planner import calibrate as calibration_of
from plait.planner.calibrate import Calibration, MeasuredRuns, merged_rates, uncalibrated
from plait.planner.constants import Priors
from plait.planner.hardware import stack
from plait.planner.job import Job, Layouts
from plait.planner.request import estimate

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """Rows, their variants as one job, and the rows that could not be priced."""

    rows: tuple[Row, ...]
    variants: tuple[Variant, ...]
    job: Job | None
    reasons: Mapping[int, str]
    """Index of a row to why it has no prediction."""

    @property
    def owner(self) -> Any:
        """Index of the row of every variant."""
        return np.array([variant.row for variant in self.variants], dtype=np.int64)


def read_runs(rows: Sequence[Row]) -> Runs:
    """Return the variants of all rows that can be priced as one job."""
    variants: list[Variant] = []
    reasons: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            variants += variants_of(index, row)
        except NotPriced as reason:
            reasons[index] = str(reason)
    return Runs(
        tuple(rows), tuple(variants), job_of_variants(variants) if variants else None, reasons
    )


def job_of_variants(variants: Sequence[Variant]) -> Job:
    """Return one job with an entry per variant."""
    return Job(
        model=stack([v.model for v in variants]),
        device=stack([v.device for v in variants]),
        framework=stack([v.framework for v in variants]),
        layouts=Layouts.of([v.layout for v in variants]),
        sequence=np.array([v.sequence for v in variants]),
        precision=np.array([v.precision for v in variants]),
    )


def costs(runs: Runs, calibration: Calibration) -> tuple[Array, Array]:
    """Return (seconds, bytes) of every variant."""
    assert runs.job is not None
    found = estimate(runs.job, merged_rates(calibration))
    shape = (len(runs.variants),)
    return np.broadcast_to(np.asarray(found.seconds, float), shape), np.broadcast_to(
        np.asarray(found.memory.total, float), shape
    )


def choose(runs: Runs, cost: tuple[Array, Array]) -> dict[int, int]:
    """Map each row to the variant that stands for it: the fastest that fits, or the smallest."""
    assert runs.job is not None
    seconds, needed = cost
    room = np.broadcast_to(np.asarray(runs.job.device.memory_bytes, float), seconds.shape)
    best: dict[int, tuple[tuple[bool, float], int]] = {}
    for index, variant in enumerate(runs.variants):
        over = bool(needed[index] > room[index])
        key = (over, float(needed[index]) if over else float(seconds[index]))
        if variant.row not in best or key < best[variant.row][0]:
            best[variant.row] = (key, index)
    return {row: index for row, (_, index) in best.items()}


def calibrate(runs: Runs, *, priors: Priors | None = None) -> Calibration:
    """Fit the constants to the rows that were measured. At least one of them must be priced."""
    assert runs.job is not None
    chosen = choose(runs, costs(runs, uncalibrated(priors)))
    seconds = {row: measured_seconds(runs.rows[row]) for row in chosen}
    peaks = {row: measured_bytes(runs.rows[row]) for row in chosen}
    rows = [row for row in chosen if seconds[row] is not None or peaks[row] is not None]
    job = runs.job.take(np.array([chosen[row] for row in rows]))
    times = np.array([seconds[row] for row in rows], dtype=float)  # None becomes NaN
    measured = MeasuredRuns(job, times, [peaks[row] for row in rows])
    return calibration_of.calibrate(measured, priors=priors)


def measured_seconds(row: Row) -> float | None:
    """Return the seconds of a step: printed, derived, or from tokens/s."""
    for key in ("step_time_s", "derived_step_time_s"):
        value = number_of(row, key)
        if value is not None:
            return value
    rate, batch, sequence, gpus = (
        number_of(row, key)
        for key in ("tokens_per_s_per_gpu", "global_batch", "seq_len", "gpus_total")
    )
    return batch * sequence / (rate * gpus) if rate and batch and sequence and gpus else None


def measured_bytes(row: Row) -> tuple[float, str] | None:
    """Return peak bytes, and their kind: allocated, reserved, or total with the context."""
    value = number_of(row, "peak_mem_gb")
    if value is None:
        return None
    text = (row.get("mem_def") or "").lower()
    unit = (
        1024**3
        if re.search(r"gib\b(?!.*(->|converted|bytes/1e9))", text) and "-> gb" not in text
        else 1e9
    )
    if "nvidia-smi" in text:
        return value * unit, "total"
    if "reserved" in text and "allocated" not in text:
        return value * unit, "reserved"
    if "allocated" in text and "reserved not stated" not in text:
        return value * unit, "allocated"
    if "active" in text:
        return value * unit, "allocated"
    return value * unit, "reserved"
