"""The nanotron sweep taken apart: how many runs are several times slower than predicted, by size, and what those have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.planner_accuracy.predict import Evaluation, Prediction
from benchmarks.planner_accuracy.runs import Row

SLOW = 3.0
"""Times the prediction; far outside what kernels or links explain."""


def slow_runs(evaluation: Evaluation) -> dict[str, Any]:
    """By number of GPUs: rows, those that took more than SLOW times the prediction, and the median error of the others. Of the slow rows
    with a pipeline: quartiles of seconds a micro-batch, by model."""
    timed = [
        (evaluation.rows[p.row], p, p.measured_seconds)
        for p in evaluation.predictions
        if p.measured_seconds
    ]
    sizes: dict[str, dict[str, float]] = {}
    for gpus in sorted({int(row["gpus_total"]) for row, _, _ in timed}):
        found = [(p, took) for row, p, took in timed if int(row["gpus_total"]) == gpus]
        others = [p.seconds / took - 1 for p, took in found if not _slow(p, took)]
        sizes[str(gpus)] = {
            "rows": len(found),
            "slow": sum(_slow(p, took) for p, took in found),
            "others_median": float(np.median(np.abs(others))) if others else float("nan"),
        }
    models: dict[str, dict[str, float]] = {}
    for model in sorted({row["model_name"] for row, _, _ in timed}):
        each = [
            took / _micro_batches(row)
            for row, p, took in timed
            if _slow(p, took) and int(row["pp"]) > 1 and row["model_name"] == model
        ]
        if each:
            low, middle, high = (float(x) for x in np.quantile(each, (0.25, 0.5, 0.75)))
            models[model] = {"rows": len(each), "low": low, "median": middle, "high": high}
    return {"sizes": sizes, "models": models}


def _slow(p: Prediction, took: float) -> bool:
    return took > SLOW * p.seconds


def _micro_batches(row: Row) -> float:
    return float(row["global_batch"]) / float(row["dp"]) / float(row["micro_batch"])


def paragraph(found: dict[str, Any]) -> list[str]:
    """The part of the page."""
    lines = [
        "## Why the sweep is so far off",
        "",
        f"Some of its runs take more than {SLOW:.0f} times what is predicted, the more of them the more machines; layouts beside them",
        "take what is predicted. The slow ones with a pipeline take about as many seconds a micro-batch whatever the model, the",
        "micro-batch and the degrees are, so it is neither computation nor bytes: more likely a fault of that cluster's network or of",
        "its sends, that came and went from job to job. Nothing in a row says which job had it, so it is not modelled, and it stays in",
        "the errors above. A slowdown by nodes that was fitted to this source alone was taken out.",
        "",
        "| GPUs | rows | slow | median error of the others |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {gpus} | {e['rows']} | {e['slow']} | {e['others_median']:.1%} |"
        for gpus, e in found["sizes"].items()
    ]
    lines += [
        "",
        "| slow rows with a pipeline | rows | seconds a micro-batch: quartiles |",
        "|---|---|---|",
    ]
    lines += [
        f"| {model} | {e['rows']} | {e['low']:.2f}, {e['median']:.2f}, {e['high']:.2f} |"
        for model, e in found["models"].items()
    ]
    return [*lines, ""]
