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

from plait.errors import InputError
from plait.planner.hardware import stack
from plait.planner.job import Job, Layouts
from plait.planner.row import FrameworkOf, NotPriced, Row, Variant, number_of, plait_only, variants_of

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
        raise InputError(f"{path}: lacks the columns {', '.join(missing)}; it needs at least {', '.join(REQUIRED)} and a model")
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
    return Runs(tuple(rows), tuple(variants), job_of_variants(variants) if variants else None, reasons)


def job_of_variants(variants: Sequence[Variant]) -> Job:
    """One job with an entry a variant."""
    return Job(
        model=stack([v.model for v in variants]),
        device=stack([v.device for v in variants]),
        framework=stack([v.framework for v in variants]),
        layouts=Layouts.of([v.layout for v in variants]),
        sequence=np.array([v.sequence for v in variants]),
        precision=np.array([v.precision for v in variants]),
        own=all(v.own for v in variants),
    )


# ---- what was measured -----------------------------------------------------------------------------------------------------------------


def measured_seconds(row: Row) -> float | None:
    """Seconds of a step: printed, derived, or from tokens/s."""
    for key in ("step_time_s", "derived_step_time_s"):
        value = number_of(row, key)
        if value is not None:
            return value
    rate, batch, sequence, gpus = (number_of(row, key) for key in ("tokens_per_s_per_gpu", "global_batch", "seq_len", "gpus_total"))
    return batch * sequence / (rate * gpus) if rate and batch and sequence and gpus else None


def measured_bytes(row: Row) -> tuple[float, str] | None:
    """(peak bytes, what they are: allocated, reserved, or total with the context)."""
    value = number_of(row, "peak_mem_gb")
    if value is None:
        return None
    text = (row.get("mem_def") or "").lower()
    unit = 1024**3 if re.search(r"gib\b(?!.*(->|converted|bytes/1e9))", text) and "-> gb" not in text else 1e9
    if "nvidia-smi" in text:
        return value * unit, "total"
    if "reserved" in text and "allocated" not in text:
        return value * unit, "reserved"
    if "allocated" in text and "reserved not stated" not in text:
        return value * unit, "allocated"
    if "active" in text:
        return value * unit, "allocated"
    return value * unit, "reserved"
