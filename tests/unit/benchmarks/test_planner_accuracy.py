"""The sweep taken apart: what counts as slow, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner_accuracy.sweep import paragraph, slow_runs
from plait.planner.evaluate import evaluate
from tests.unit.planner.rows import ROW


def test_slow_rows_are_counted_by_size_and_by_micro_batch() -> None:
    rows = [
        {**ROW, "id": f"X-{i}", "pp": "2", "tp": "1", "gpus_total": "16", "dp": "8", "global_batch": "64", "micro_batch": "2"}
        for i in range(4)
    ]
    found = evaluate(rows)
    seconds = found.predictions[0].seconds
    timed = tuple(replace(p, measured_seconds=seconds * factor) for p, factor in zip(found.predictions, (1, 1.25, 4, 8), strict=True))
    told = slow_runs(replace(found, predictions=timed))
    assert told["sizes"] == {"16": {"rows": 4, "slow": 2, "others_median": pytest.approx(0.1)}}
    (model,) = told["models"].values()
    assert model["rows"] == 2 and model["median"] == pytest.approx(6 * seconds / 4)  # 64 samples over 8 ranks in micro-batches of 2
    assert "| 16 | 4 | 2 | 10.0% |" in paragraph(told)
