"""Layouts that experts trained with, compared with the plan for the same model and cluster.

Two questions are answered. Is the published time in the interval that is predicted for that layout
and framework, with constants that were learned without its source? Which layout does the plan
select for Plait's kernels instead, and which terms of the step decide?

A run of data/published.json names the id of a row of `data`, or has the columns of one. `tflops`
are those per GPU, if the source has no seconds.
"""

from typing import Any

import numpy as np

from benchmarks.common.report import read
from benchmarks.planner_accuracy.frameworks import DATA
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


def rows() -> list[dict[str, Any]]:
    table = {row["id"]: row for row in rows_of("runs", "unseen_2")}
    compared = []
    for run in read(DATA / "published.json"):
        row = run["row"]
        if isinstance(row, str):
            row = table[row]
        compared.append(compare(run, row))
    return compared


def compare(run: dict[str, Any], row: Row) -> dict[str, Any]:
    gpus = int(row["gpus_total"])
    batch = int(row["global_batch"])
    sequence = int(row["seq_len"])
    model = find_model(run["model"], sequence=sequence)
    if run.get("tflops"):
        flops = float(model.architecture.model_flops(sequence)) * batch * sequence
        row = {**row, "step_time_s": f"{flops / gpus / run['tflops'] / 1e12:.3f}"}
    # No constant was learned from the sources of other rows.
    evaluation = left_out([row], calibrated=False) if row.get("id") else evaluate([row])
    (predicted,) = evaluation.predictions
    layout = Layouts.of([read_runs([row]).variants[0].layout]).as_dict(0)
    precision = "fp16" if row["precision"] == "fp16" else "bf16"
    request = Request(model, cluster(run["gpu"], gpus), batch, sequence, precision)
    (theirs,) = price(request, [layout])
    ours = plan(request, best=1).best[0]

    # The terms that make the slower layout slower, if they are at least a quarter of the largest.
    sign = float(np.sign(theirs.seconds - ours.seconds))
    differences = {name: theirs.terms[name] - ours.terms[name] for name in STEP_TERMS}
    names = sorted(STEP_TERMS, key=lambda name: -differences[name] * sign)
    largest = differences[names[0]] * sign
    reasons = {}
    for name in names[:3]:
        saved = differences[name] * sign
        if saved > 0 and saved >= largest / 4:
            reasons[STEP_TERMS[name]] = differences[name]

    measured = predicted.measured_seconds
    is_inside = None
    if measured is not None:
        is_inside = predicted.seconds_low <= measured <= predicted.seconds_high
    return {
        "model": run["model"],
        "gpus": gpus,
        "gpu": run["gpu"],
        "sequence": sequence,
        "source": run["source"],
        "published": describe(layout),
        "measured_seconds": measured,
        "predicted_seconds": predicted.seconds,
        "low_90": predicted.seconds_low,
        "high_90": predicted.seconds_high,
        "inside": is_inside,
        "plan": describe(ours.layout),
        "plan_seconds": ours.seconds,
        "theirs_seconds": theirs.seconds,
        "theirs_gib": theirs.needed_bytes / GIB,
        "theirs_fits": theirs.fit_probability,
        "reasons": reasons,
    }
