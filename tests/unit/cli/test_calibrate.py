"""`plait calibrate`: what it writes and refuses, and that `plait plan` takes it."""

import json

import pytest

from plait.cli import calibrate as command
from plait.cluster.topology import machine_name
from plait.engine import calibration as live
from plait.engine.calibration import TimedSteps
from plait.planner.calibrate import (
    CalibrationOrigin,
    calibrate,
    load_calibration,
    runs_of,
    save_calibration,
)
from tests.unit.cli.commands import PLAN, run
from tests.unit.cli.planning import runs_file
from tests.unit.planner.rows import measured

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "tie_word_embeddings": False}  # fmt: skip


def seconds(capsys, *more):
    """(the best plan's step, the notes)."""
    capsys.readouterr()
    assert run(f"{PLAN} --json", *more) == 0
    told = json.loads(capsys.readouterr().out)
    return told["best"][0]["step"]["seconds"], told["notes"]


def test_a_plan_takes_the_constants_of_its_device_alone(tmp_path, capsys):
    out = tmp_path / "h100.json"
    save_calibration(
        out,
        calibrate(runs_of([measured(factor=1.4, index=index) for index in range(3)])),
        CalibrationOrigin("h100"),
    )
    before, notes = seconds(capsys)
    after, _ = seconds(capsys, "--calibrate", out)
    assert not notes and after > 1.2 * before
    assert run("plan --model gpt2 --world-size 8 --gpu a100 --calibrate", out) == 2
    assert "calibration of h100, but the plan is for a100" in capsys.readouterr().err
    assert run(f"{PLAN} --calibrate", runs_file(tmp_path)) == 2
    assert "name a file that `plait calibrate` wrote" in capsys.readouterr().err


def test_a_live_calibration_of_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live, "ON_CPU", TINY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "here.json"
    monkeypatch.setattr(command, "_MAX_WAITING_SHARE", -1.0)  # always told
    command._run_process(str(out), "1", "1")
    shown = capsys.readouterr()
    assert "of a disturbed machine" in shown.err
    for text in ("GFLOP/s", "GB/s", "gemm.cpu", "rates measured", "error left out"):
        assert text in shown.out, text
    assert "all-reduce" not in shown.out
    calibration, origin = load_calibration(out)
    assert (origin.gpu, origin.machine) == ("cpu", machine_name(1))
    assert origin.facts["runs"] == calibration.time.rows == 4
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    asked = "plan --world-size 1 --gpu cpu --batch 4 --seq 16 --nproc-per-node 1 --calibrate"
    assert run(asked, out, "--model", model) == 0


def test_steps_that_wait_are_told_apart_from_steps_that_compute():
    busy, waiting = TimedSteps((1.0, 1.0), (1.0, 0.98)), TimedSteps((2.0, 2.0), (1.0, 1.0))
    assert live.waiting_share([busy]) == pytest.approx(0.01)
    assert live.waiting_share([busy, waiting]) == pytest.approx(1 - 3.98 / 6)
    assert live.waiting_share([TimedSteps((1.0,), (1.1,))]) == 0
