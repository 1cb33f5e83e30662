"""Rows of published runs as one job, or the reason why a row has no prediction.

What a row leaves open (micro-batch, chunks of a stage) is searched: the row becomes several
variants, and the fastest that fits counts. `row` reads the columns of a row.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.row import NotPriced, Row, Variant, number_of, variants_of
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


def read_runs(rows: Sequence[Row]) -> Runs:
    """Return the variants of all rows that can be priced as one job."""
    variants: list[Variant] = []
    reasons: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            variants += variants_of(index, row)
        except NotPriced as reason:
            reasons[index] = str(reason)
    if not variants:
        return Runs(tuple(rows), (), None, reasons)

    def values(field: str) -> list[Any]:
        return [getattr(variant, field) for variant in variants]

    job = Job(
        model=stack(values("model")),
        device=stack(values("device")),
        framework=stack(values("framework")),
        layouts=Layouts.of(values("layout")),
        sequence=np.array(values("sequence")),
        precision=np.array(values("precision")),
    )
    return Runs(tuple(rows), tuple(variants), job, reasons)


def column(values: Any, count: int) -> Array:
    """Return numbers of a job, or one number for all of it, as an array of `count` entries."""
    return np.broadcast_to(np.asarray(values, float), (count,))


def choose(runs: Runs, calibration: Calibration) -> dict[int, int]:
    """Map each row to the variant that stands for it: the fastest that fits, or the smallest."""
    assert runs.job is not None
    count = len(runs.variants)
    predicted = estimate(runs.job, merged_rates(calibration))
    seconds = column(predicted.seconds, count)
    needed = column(predicted.memory.total, count)
    does_not_fit = needed > column(runs.job.device.memory_bytes, count)
    # Those that fit come first, by their time, and the others follow by their memory.
    order = np.lexsort((np.where(does_not_fit, needed, seconds), does_not_fit))
    chosen: dict[int, int] = {}
    for index in order.tolist():
        chosen.setdefault(runs.variants[index].row, index)
    return dict(sorted(chosen.items()))


def job_of(runs: Runs, chosen: Mapping[int, int], rows: Iterable[int]) -> Job:
    """Return the variants that stand for these rows as one job."""
    assert runs.job is not None
    return runs.job.take(np.array([chosen[row] for row in rows]))


def calibrate(runs: Runs, *, priors: Priors | None = None) -> Calibration:
    """Fit the constants to the rows that were measured. At least one of them must be priced."""
    chosen = choose(runs, uncalibrated(priors))
    rows = []
    times = []
    peaks = []
    for row in chosen:
        seconds = measured_seconds(runs.rows[row])
        peak = measured_bytes(runs.rows[row])
        if seconds is not None or peak is not None:
            rows.append(row)
            times.append(seconds)
            peaks.append(peak)
    job = job_of(runs, chosen, rows)
    # None becomes NaN.
    measured = MeasuredRuns(job, np.array(times, dtype=float), peaks)
    return calibration_of.calibrate(measured, priors=priors)


def measured_seconds(row: Row) -> float | None:
    """Return the seconds of a step: printed, derived, or from tokens/s."""
    seconds = number_of(row, "step_time_s") or number_of(row, "derived_step_time_s")
    if seconds is not None:
        return seconds
    rate = number_of(row, "tokens_per_s_per_gpu")
    batch = number_of(row, "global_batch")
    sequence = number_of(row, "seq_len")
    gpus = number_of(row, "gpus_total")
    if rate and batch and sequence and gpus:
        return batch * sequence / (rate * gpus)
    return None


def measured_bytes(row: Row) -> tuple[float, str] | None:
    """Return peak bytes, and their kind: allocated, reserved, or total with the context."""
    value = number_of(row, "peak_mem_gb")
    if value is None:
        return None
    text = (row.get("mem_def") or "").lower()
    is_gib = re.search(r"gib\b(?!.*(->|converted|bytes/1e9))", text) and "-> gb" not in text
    kind = "reserved"
    if "nvidia-smi" in text:
        kind = "total"
    elif "reserved" in text and "allocated" not in text:
        kind = "reserved"
    elif "active" in text or ("allocated" in text and "reserved not stated" not in text):
        kind = "allocated"
    return value * (1024**3 if is_gib else 1e9), kind
