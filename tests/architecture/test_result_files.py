"""Files of benchmarks/results are small, because raw measurements stay out of the repository."""

import json
from pathlib import Path

from benchmarks.common.report import MOST_BYTES, WIDTH, dumps, rounded

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"


def test_files_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    large = [path.name for path in files if path.stat().st_size > MOST_BYTES]
    assert not large, f"at most {MOST_BYTES} bytes: write with benchmarks.common.report"


def test_text_is_json():
    table = {"a": {"b": [0.5] * 99}, "c": list(range(99))}
    for value in (1, "a", [], {}, [1, [2, {"a": None}]], table, [[list(range(50))] * 3]):
        assert json.loads(dumps(value)) == value


def test_short_values_are_on_one_line():
    lines = dumps({"rows": [{"a": number} for number in range(40)]}).splitlines()
    assert lines[2] == '  {"a": 0},'
    assert all(len(line) <= WIDTH for line in lines)


def test_floats_are_rounded():
    assert rounded({"a": [1.23456789, 123456789, "x"], "b": (1e-9 / 3,)}) == {
        "a": [1.2346, 123456789, "x"],
        "b": [3.3333e-10],
    }
