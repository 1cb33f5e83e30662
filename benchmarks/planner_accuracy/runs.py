"""Rows of published or measured runs: a CSV to jobs that can be priced, or for each row the reason why it cannot.

What a row leaves open (micro-batch, chunks of a stage) is searched: a row becomes several variants, and the fastest that fits counts. How a
row is read is in `row`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.row import (
    FrameworkOf,
    NotPriced,
    Row,
    Variant,
    number_of,
    plait_only,
    variants_of,
)
from plait.errors import InputError
from plait.planner import calibrate as calibration_of
from plait.planner.calibrate import Calibration, MeasuredRuns, merged_rates, uncalibrated
from plait.planner.constants import Priors
from plait.planner.hardware import stack
from plait.planner.job import Job, Layouts
from plait.planner.request import estimate

Array = NDArray[np.float64]
REQUIRED = ("gpu", "gpus_total", "seq_len")


@dataclass(frozen=True)
class Runs:
    """Rows, their variants as one job, and what could not be priced."""

    rows: tuple[Row, ...]
    variants: tuple[Variant, ...]
    job: Job | None
    reasons: Mapping[int, str]
    """Index of a row to why it has no prediction."""

    @property
    def owner(self) -> Any:
        """Index of the row of every variant."""
        return np.array([variant.row for variant in self.variants], dtype=np.int64)


def read_rows(path: str | Path) -> tuple[Row, ...]:
    """The rows of a CSV with a header. Raises InputError for what is none."""
    return tuple(row for _, row in read_table(path))


def read_table(path: str | Path) -> tuple[tuple[int, Row], ...]:
    """(the line where it ends, the row) of a CSV with a header. Raises InputError for what is none."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = tuple((reader.line_num, row) for row in reader)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a CSV of runs") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: no CSV in UTF-8 ({error})") from None
    if not rows:
        raise InputError(f"{path}: holds no rows; a CSV of runs has a header and a row a run")
    missing = [name for name in REQUIRED if name not in rows[0][1]]
    if missing:
        raise InputError(
            f"{path}: lacks the columns {', '.join(missing)}; it needs at least {', '.join(REQUIRED)} and a model"
        )
    return rows


def read_runs(rows: Sequence[Row], framework_of: FrameworkOf = plait_only) -> Runs:
    """Everything that can be priced of `rows`, as one job."""
    variants: list[Variant] = []
    reasons: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            variants += variants_of(index, row, framework_of)
        except NotPriced as reason:
            reasons[index] = str(reason)
    return Runs(
        tuple(rows), tuple(variants), job_of_variants(variants) if variants else None, reasons
    )


def job_of_variants(variants: Sequence[Variant]) -> Job:
    """One job with an entry a variant."""
    return Job(
        model=stack([v.model for v in variants]),
        device=stack([v.device for v in variants]),
        framework=stack([v.framework for v in variants]),
        layouts=Layouts.of([v.layout for v in variants]),
        sequence=np.array([v.sequence for v in variants]),
        precision=np.array([v.precision for v in variants]),
        has_exact_blocks=all(v.own for v in variants),
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
    """Fit the constants to the rows that can be priced and were measured. Raises InputError if there are none."""
    chosen: dict[int, int] = {}
    if runs.job is not None:
        chosen = choose(runs, costs(runs, uncalibrated(priors)))
    seconds = {row: measured_seconds(runs.rows[row]) for row in chosen}
    peaks = {row: measured_bytes(runs.rows[row]) for row in chosen}
    rows = [row for row in chosen if seconds[row] is not None or peaks[row] is not None]
    if runs.job is None or not rows:
        reasons = "; ".join(
            f"row {index + 1}: {reason}" for index, reason in list(runs.reasons.items())[:3]
        )
        raise InputError(
            f"nothing to calibrate on: no row can be priced and has step_time_s, derived_step_time_s or tokens/s ({reasons})"
        )
    job = runs.job.take(np.array([chosen[row] for row in rows]))
    times = np.array(
        [np.nan if seconds[row] is None else seconds[row] for row in rows], dtype=float
    )
    return calibration_of.calibrate(
        MeasuredRuns(job, times, [peaks[row] for row in rows]), priors=priors
    )


def measured_seconds(row: Row) -> float | None:
    """Seconds of a step: printed, derived, or from tokens/s."""
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
    """(peak bytes, what they are: allocated, reserved, or total with the context)."""
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
