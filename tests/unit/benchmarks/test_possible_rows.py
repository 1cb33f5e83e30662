"""Rows with values that no run has, by file, line, field, value and rule."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from benchmarks.planner_accuracy.evaluate import main
from benchmarks.planner_accuracy.possible import possible_rows
from tests.unit.planner.rows import ROW


def table(folder: Path, *rows: dict[str, str]) -> Path:
    file = folder / "runs.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(
            stream, list(dict.fromkeys(name for row in rows for name in row)), restval=""
        )
        writer.writeheader()
        writer.writerows(rows)
    return file


IMPOSSIBLE = [
    ({"step_time_s": "0.2"}, "step_time_s = '0.2': its model FLOPs are "),
    (
        {"step_time_s": "", "tokens_per_s_per_gpu": "90000"},
        "tokens_per_s_per_gpu = '90000': its model FLOPs are ",
    ),
    ({"step_time_s": "-2"}, "step_time_s = '-2': not a number above 0"),
    ({"step_time_s": "0"}, "step_time_s = '0': not a number above 0"),
    ({"step_time_s": "nan"}, "step_time_s = 'nan': not a number above 0"),
    ({"tp": "0"}, "tp = '0': not a number above 0"),
    ({"gpus_total": "15.5"}, "gpus_total = '15.5': not a whole number"),
    ({"dp": "8"}, "gpus_total = '16': tp x pp x cp x dp = 2 x 2 x 1 x 8 = 32"),
    (
        {"global_batch": "2"},
        "global_batch = '2': a micro-batch of 1 on each of 4 data-parallel ranks is 4 samples",
    ),
    (
        {"n_kv_heads": "64"},
        "n_kv_heads = '64': n_heads is 32, and keys have no more heads than queries",
    ),
    ({"peak_mem_gb": "120"}, "peak_mem_gb = '120': 120 GB, and "),
]
"""Changes of a row, and what its refusal says."""


def test_impossible_rows_are_refused_and_the_others_count(tmp_path: Path, capsys) -> None:
    changed = [
        {**ROW, "id": f"bad-{index}", **changes} for index, (changes, _) in enumerate(IMPOSSIBLE)
    ]
    file = table(tmp_path, ROW, *changed, {**ROW, "id": "X-3"})
    rows, problems = possible_rows(file)
    assert [row["id"] for row in rows] == ["X-1", "X-3"]
    for line, (problem, (_, words)) in enumerate(zip(problems, IMPOSSIBLE, strict=True), start=3):
        assert f"{file}, line {line}: {words}" in str(problem)
    assert main([str(file), "--json", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert (
        told["refused"] == [str(problem) for problem in problems] and told["summary"]["rows"] == 2
    )
    shown = capsys.readouterr().err
    assert all(f"refused: {problem}" in shown for problem in problems)


def test_what_is_not_given_is_not_refused(tmp_path: Path) -> None:
    others = {"dp": "", "peak_mem_gb": "n/a", "seq_len": "4096 (packed)", "gpu": "abacus"}
    rows, problems = possible_rows(
        table(tmp_path, ROW, {**ROW, "peak_mem_gb": "85.9"}, {**ROW, **others})
    )
    assert len(rows) == 3 and not problems


def test_a_table_of_which_nothing_is_left(tmp_path: Path, capsys) -> None:
    assert main([str(table(tmp_path, {**ROW, "step_time_s": "-1"}))]) == 2
    assert "no row is left; correct those that were refused" in capsys.readouterr().err
