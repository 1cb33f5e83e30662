"""`plait calibrate` measures a machine, and `plait plan` uses the result."""

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
from tests.unit.planner.jobs import llama
from tests.unit.planner.rows import measured

TINY = llama(num_key_value_heads=4, max_position_embeddings=16, tie_word_embeddings=False)


def plan_seconds(capsys, *options):
    """Return the seconds per step of the best layout, and the notes of the plan."""
    capsys.readouterr()
    assert run(f"{PLAN} --json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    return report["best"][0]["step"]["seconds"], report["notes"]


def test_a_plan_uses_a_calibration_of_its_device(tmp_path, capsys):
    out = tmp_path / "h100.json"
    calibration = calibrate(runs_of([measured(factor=1.4, index=index) for index in range(3)]))
    save_calibration(out, calibration, CalibrationOrigin("h100"))
    before, notes = plan_seconds(capsys)
    after, _ = plan_seconds(capsys, "--calibrate", out)
    assert not notes and after > 1.2 * before
    assert run("plan --model gpt2 --world-size 8 --gpu a100 --calibrate", out) == 2
    assert "calibration of h100, but the plan is for a100" in capsys.readouterr().err
    assert run(f"{PLAN} --calibrate", runs_file(tmp_path)) == 2
    assert "name a file that `plait calibrate` wrote" in capsys.readouterr().err


def test_a_live_calibration_of_one_process(tmp_path, capsys, monkeypatch):
    # A small model, because the command measures for minutes otherwise.
    monkeypatch.setattr(live, "ON_CPU", TINY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "here.json"
    # A machine that is always reported as disturbed, and the part of the command that a process
    # runs, without a launcher.
    monkeypatch.setattr(command, "_MAX_WAITING_SHARE", -1.0)
    command._run_process(str(out), "1", "1")
    printed = capsys.readouterr()
    assert "of a disturbed machine" in printed.err
    for text in ("GFLOP/s", "GB/s", "gemm.cpu", "rates measured", "error left out"):
        assert text in printed.out, text
    assert "all-reduce" not in printed.out
    calibration, origin = load_calibration(out)
    assert (origin.gpu, origin.machine) == ("cpu", machine_name(1))
    assert origin.facts["runs"] == calibration.time.rows == 4
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    line = "plan --world-size 1 --gpu cpu --batch 4 --seq 16 --nproc-per-node 1 --calibrate"
    assert run(line, out, "--model", model) == 0


def test_share_of_a_step_that_a_process_waits():
    # Seconds of the clock and of the processor.
    busy = TimedSteps((1.0, 1.0), (1.0, 0.98))
    waiting = TimedSteps((2.0, 2.0), (1.0, 1.0))
    assert live.waiting_share([busy]) == pytest.approx(0.01)
    assert live.waiting_share([busy, waiting]) == pytest.approx(1 - 3.98 / 6)
    assert live.waiting_share([TimedSteps((1.0,), (1.1,))]) == 0
