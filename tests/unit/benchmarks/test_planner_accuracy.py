"""The sweep taken apart: what counts as slow, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_accuracy.evaluate import main
from benchmarks.planner_accuracy.sweep import paragraph, slow_runs
from plait.planner.evaluate import evaluate
from tests.unit.cli.planning import runs_file
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


def test_a_table_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = runs_file(tmp_path), tmp_path / "report.json"
    assert main([str(file), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "7 rows, 6 predicted" in shown and "not in the catalogue" in shown
    told = json.loads(out.read_text())
    assert told["summary"]["time"]["all"]["all"]["rows"] == 6 and len(told["predictions"]) == 6
    assert told["not_priced"] == [{"row": 6, "id": "X-99", "reason": told["not_priced"][0]["reason"]}]
    assert set(told["predictions"][0]) >= {
        "id",
        "seconds",
        "seconds_low",
        "seconds_high",
        "reserved_bytes",
        "fits",
        "terms",
        "memory_terms",
    }
    assert main([str(file), "--calibrate", str(file)]) == 0
    assert "0 predicted, 7 used to calibrate" in capsys.readouterr().out
    assert main(["no-such.csv"]) == 2
    assert "No such file" in capsys.readouterr().err
