"""Measured runs of Plait: the file, and what they do to the constants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.errors import InputError
from plait.planner.calibrate import calibrate, costs, memory_of, uncalibrated
from plait.planner.choice import price
from plait.planner.constants import knowledge
from plait.planner.hardware import cluster
from plait.planner.history import append, read, runs_of, same_machine
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan
from tests.unit.planner.rows import measured


def test_a_run_is_priced_from_its_line_as_the_plan_priced_it(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "history.jsonl"
    runs = [measured(index=index) for index in range(4)] + [measured("llama-2-7b")]
    for one in runs:
        append(file, one)
    found, warnings = read(file)
    assert found == runs and not warnings
    seconds, _ = costs(runs_of(found), uncalibrated())
    assert seconds == pytest.approx([one.seconds for one in runs], rel=1e-9)
    job = runs_of(found).job
    assert job is not None
    allocated = np.exp(memory_of(job, ["allocated"] * 5)(knowledge().rates))
    assert allocated == pytest.approx([one.bytes for one in runs], rel=1e-9)


def test_damaged_lines_are_skipped_and_told(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, measured())
    lines = ["nonsense", "[]", '{"gpu": "h100"}', json.dumps({**json.loads(file.read_text()), "seconds": -1})]
    lines.append(json.dumps({**json.loads(file.read_text()), "gpu": "abacus"}))
    lines.append(json.dumps({**json.loads(file.read_text()), "layout": {"schedule": "none", "recompute": "none"}}))
    with file.open("a") as stream:
        stream.write("\n".join(lines) + "\n" + file.read_text()[:100])  # the last one was cut off
    append(file, measured(index=1))  # and does not swallow what comes after it
    found, warnings = read(file)
    assert found == [measured(), measured(index=1)]
    assert [f"line {number}" in warnings[number - 2] for number in range(2, 9)] == [True] * 7
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *(("", "seconds", value) for value in (float("inf"), float("nan"), "1")),
        *(("", "bytes", value) for value in (float("nan"), 0, "x")),
        *(("", name, 0) for name in ("sequence", "devices", "devices_per_node")),
        *(("architecture", name, value) for name, value in (("layers", 0), ("hidden", -5), ("ffn", "x"))),
        *(("layout", name, value) for name, value in (("tp", 0), ("micro_batch", float("nan")), ("accumulation", -2))),
    ],
)
def test_numbers_that_no_run_has_are_skipped_and_told(section: str, name: str, value: object, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, measured())
    line = json.loads(file.read_text())
    (line[section] if section else line)[name] = value
    file.write_text(json.dumps(line) + "\n")
    found, (warning,) = read(file)
    assert not found and f"{name} = {value!r}, not a number" in warning


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("seconds", 1e-3, "seconds = 0.001: its model FLOPs are "), ("bytes", 2e11, "bytes = 200000000000.0: 200 GB, and NVIDIA H100")],
)
def test_runs_beyond_their_devices_are_skipped_and_told(name: str, value: float, words: str, tmp_path: Path) -> None:
    """By the rules for a table's rows; of CPU cores no peak is known."""
    file = tmp_path / "history.jsonl"
    append(file, replace(measured(), **{name: value}))
    append(file, replace(measured(), **{name: value}, gpu="cpu"))
    (found,), (warning,) = read(file)
    assert found.gpu == "cpu" and f"line 1: skipped, it holds no measured run ({words}" in warning


def test_lines_of_versions_that_counted_latent_attention_otherwise_are_read(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, measured())
    line = json.loads(file.read_text())
    line["architecture"] = {
        name: line["architecture"][name] for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    }
    line["architecture"]["compressed"] = 0
    file.write_text(json.dumps(line) + "\n")
    found, warnings = read(file)
    assert len(found) == 1 and not warnings
    assert costs(runs_of(found), uncalibrated())[0] == pytest.approx([measured().seconds], rel=1e-9)


def test_runs_that_were_slower_make_plans_slower_and_surer() -> None:
    found = calibrate(runs_of([measured(factor=1.3, index=index) for index in range(5)]))
    request = Request(find_model("llama-3-8b"), cluster("h100", 16), 64, 2048)
    layout = plan(request, best=6).best[5].layout
    before, after = (price(request, [layout], calibration=calibration)[0] for calibration in (None, found))
    assert after.seconds / before.seconds == pytest.approx(1.3, rel=0.06)
    assert after.seconds_high / after.seconds < before.seconds_high / before.seconds


def test_another_device_or_another_processor_says_nothing() -> None:
    one = measured()
    assert same_machine(one, gpu="h100", machine="whatever") and not same_machine(one, gpu="a100", machine="")
    cpu = replace(one, gpu="cpu", machine="EPYC, 1 thread a process")
    assert same_machine(cpu, gpu="cpu", machine="EPYC, 1 thread a process")
    assert not same_machine(cpu, gpu="cpu", machine="EPYC, 2 threads a process")


def test_a_compiled_run_is_priced_as_compiled() -> None:
    plain, compiled = measured(), replace(measured(), compiled=True)
    seconds, _ = costs(runs_of([plain, compiled]), uncalibrated())
    assert seconds[1] < seconds[0]
