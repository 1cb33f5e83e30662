"""Layouts that experts trained with, compared with the plan for the same model and cluster.

Two questions are answered. Is the published time in the interval that is predicted for that layout
and framework, with constants that were learned without its source? Which layout does the plan select
for Plait's kernels instead, and which terms of the step decide?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.report import read
from benchmarks.planner_accuracy.frameworks import DATA, fitted_priors
from benchmarks.planner_accuracy.held_out import left_out
from benchmarks.planner_accuracy.learn import rows_of
from benchmarks.planner_accuracy.predict import evaluate
from benchmarks.planner_accuracy.runs import Row, read_runs
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.job import Layouts
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan, price
from plait.planner.step_time import STEP_TERMS
from plait.sizes import GIB


@dataclass(frozen=True)
class Published:
    """A run of a source: the id of a row of `data`, or its columns. It may have no time."""

    model: str
    gpu: str
    row: str | Mapping[str, str]
    source: str
    tflops: float | None = None
    """TFLOPS per GPU, if the source has no seconds."""


def published() -> list[Published]:
    """Return the runs of data/published.json."""
    return [Published(**entry) for entry in read(DATA / "published.json")]


def rows() -> list[dict[str, Any]]:
    """Compare every published layout with the plan."""
    table = {row["id"]: row for row in rows_of("runs", "unseen_2")}
    return [
        _beside(one, table[one.row] if isinstance(one.row, str) else dict(one.row))
        for one in published()
    ]


def _beside(one: Published, row: Row) -> dict[str, Any]:
    gpus, batch, sequence = (int(row[name]) for name in ("gpus_total", "global_batch", "seq_len"))
    model = find_model(one.model, sequence=sequence)
    flops = float(model.architecture.model_flops(sequence)) * batch * sequence
    if one.tflops is not None:
        row = {**row, "step_time_s": f"{flops / gpus / one.tflops / 1e12:.3f}"}
    # No constant was learned from the sources of other rows.
    found = (
        left_out([row], calibrated=False)
        if row.get("id")
        else evaluate([row], priors=fitted_priors())
    )
    (predicted,) = found.predictions
    layout = Layouts.of([read_runs([row]).variants[0].layout]).at(0)
    precision = "fp16" if row["precision"] == "fp16" else "bf16"
    request = Request(model, cluster(one.gpu, gpus), batch, sequence, precision)
    (theirs,) = price(request, [layout])
    ours = plan(request, best=1).best[0]
    faster = float(np.sign(theirs.seconds - ours.seconds))
    saved = {name: (theirs.terms[name] - ours.terms[name]) * faster for name in STEP_TERMS}
    reasons = sorted(
        (name for name in STEP_TERMS if saved[name] > 0), key=lambda name: -saved[name]
    )
    reasons = [name for name in reasons if saved[name] >= saved[reasons[0]] / 4][:3]
    measured = predicted.measured_seconds
    return {
        "model": one.model,
        "gpus": gpus,
        "gpu": one.gpu,
        "sequence": sequence,
        "source": one.source,
        "published": describe(layout),
        "measured_seconds": measured,
        "predicted_seconds": predicted.seconds,
        "low_90": predicted.seconds_low,
        "high_90": predicted.seconds_high,
        "inside": None
        if measured is None
        else predicted.seconds_low <= measured <= predicted.seconds_high,
        "plan": describe(ours.layout),
        "plan_seconds": ours.seconds,
        "theirs_seconds": theirs.seconds,
        "theirs_gib": theirs.needed_bytes / GIB,
        "theirs_fits": theirs.fit_probability,
        "reasons": {STEP_TERMS[name]: saved[name] * faster for name in reasons},
    }
