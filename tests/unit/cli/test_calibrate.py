"""`plait calibrate`: what it writes and refuses, and that `plait plan` takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import calibrate as command
from plait.cli.main import main
from plait.cluster.topology import machine_name
from plait.engine import calibration as live
from plait.engine.timed_steps import TimedSteps
from plait.planner.calibration_file import load
from plait.planner.history import append
from tests.unit.cli.planning import ASKED, runs_file
from tests.unit.planner.rows import ROW, measured

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))


def run(*arguments: object) -> int:
    """The command's exit code."""
    try:
        return int(main(list(map(str, arguments))) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def seconds(capsys: pytest.CaptureFixture[str], *more: object) -> tuple[float, list[str]]:
    """(the best plan's step, the notes)."""
    capsys.readouterr()
    assert run("plan", *ASKED, "--json", *more) == 0
    told = json.loads(capsys.readouterr().out)
    return told["best"][0]["step"]["seconds"], told["notes"]


def test_a_table_becomes_constants_that_a_plan_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "h100.json"
    assert run("calibrate", runs_file(tmp_path), "--out", out) == 0
    shown = capsys.readouterr().out
    for text in ("constant", "shipped", "fitted", "gemm.hopper", "error before", "error after", "error left out", str(out)):
        assert text in shown, text
    assert load(out)[1].gpu == "h100"
    assert seconds(capsys, "--calibrate", out)[0] != seconds(capsys)[0]
    assert run("plan", "--model", "gpt2", "--world-size", "8", "--gpu", "a100", "--calibrate", out) == 2
    assert "calibration of h100, and the plan is for a100" in capsys.readouterr().err


def test_bad_tables_are_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, mixed, none, broken = (tmp_path / name for name in ("few.csv", "mixed.csv", "none.csv", "broken.csv"))
    header = ",".join(ROW)

    def write(file: Path, *rows: dict[str, str]) -> None:
        file.write_text("\n".join([header, *(",".join(row[name] for name in ROW) for row in rows)]) + "\n")

    good = {**ROW, "step_time_s": "8"}  # which an A100 reaches too
    write(few, good, {**good, "seq_len": ""}, {**good, "step_time_s": "", "derived_step_time_s": "", "tokens_per_s_per_gpu": ""})
    write(mixed, *[{**good, "gpu": gpu} for gpu in ("H100", "A100-80GB") for _ in range(3)])
    write(none, {**good, "gpu": "TPU"})
    broken.write_text("a,b\n1,2\n")
    for arguments, words in (
        ((few,), "1 rows of h100 can be predicted and have a time, and a calibration needs at least 3"),
        ((mixed,), "choose with --gpu"),
        ((mixed, "--gpu", "b200"), "only; name one of them"),
        ((none,), "no row names a device of the catalogue"),
        ((broken,), "lacks the columns gpu, gpus_total, seq_len"),
        ((tmp_path / "no.csv",), "No such file"),
        ((mixed, "--nproc-per-node", "2"), "with a table nothing is measured here"),
        (("--gpu", "h100"), "without a table this machine is measured"),
    ):
        assert run("calibrate", *arguments, "--out", tmp_path / "out.json") == 2
        assert words in " ".join(capsys.readouterr().err.split()), arguments
    assert not (tmp_path / "out.json").exists()
    assert run("calibrate", mixed, "--gpu", "a100", "--out", tmp_path / "out.json") == 0
    write(mixed, *[{**good, "framework": name} for name in ("plait", "plait", "plait", "Megatron-LM")])
    assert run("calibrate", mixed, "--out", tmp_path / "out.json") == 0
    assert "are left out; row 4 of its device: framework Megatron-LM is not Plait" in capsys.readouterr().out


@pytest.mark.parametrize("as_plan", [False, True])
def test_rows_that_no_run_has_measured_are_left_out_and_told(as_plan: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `benchmarks.planner_accuracy.evaluate` refuses them: by file, line, field, value and rule."""
    file = runs_file(tmp_path)
    lines = file.read_text().splitlines()
    cells = lines[1].split(",")
    wrong = {"step_time_s": "0.01", "gpus_total": "0", "n_kv_heads": "64"}
    broken = [",".join(wrong[name] if name == one else cell for name, cell in zip(ROW, cells, strict=True)) for one in wrong]
    file.write_text("\n".join([*lines, *broken]) + "\n")
    if as_plan:
        told = seconds(capsys, "--calibrate", file)[1]
    else:
        assert run("calibrate", file, "--out", tmp_path / "out.json") == 0
        told = capsys.readouterr().err.splitlines()
    for line, words in enumerate(("step_time_s = '0.01': its model FLOPs are", "gpus_total = '0': not a number", "n_kv_heads = '64'"), 9):
        assert any(f"left out: {file}, line {line}: {words}" in one for one in told), told
    file.write_text("\n".join([lines[0], *broken]) + "\n")
    assert run("calibrate", file, "--out", tmp_path / "out.json") == 2
    assert (
        f"no row names a device of the catalogue; `plait plan models` prints their names; left out: {file}, line 2"
        in capsys.readouterr().err
    )


def test_a_history_of_runs_moves_the_plans_that_ask_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, notes = seconds(capsys)
    assert not notes
    history = tmp_path / "cache" / "history.jsonl"
    for index in range(3):
        append(history, measured(factor=1.4, index=index))
    with history.open("a") as stream:
        stream.write("damaged\n")
    assert seconds(capsys) == (before, [])  # D10: nothing measured changes a plan by itself
    after, notes = seconds(capsys, "--calibrate", history)
    assert after > 1.2 * before
    assert "line 4" in notes[0] and "3 measured runs" in notes[1]
    assert run("calibrate", history, "--out", tmp_path / "out.json") == 0
    assert seconds(capsys, "--calibrate", tmp_path / "out.json")[0] == after
    assert run("plan", "--model", "gpt2", "--world-size", "8", "--gpu", "a100", "--calibrate", history) == 2
    assert "no run in it was measured on a100" in capsys.readouterr().err


def test_a_live_calibration_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ON_CPU", TINY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "here.json"
    monkeypatch.setattr(command, "_DISTURBED", -1.0)  # always told
    command._work(str(out), "1", "1")
    shown = capsys.readouterr()
    assert "of a disturbed machine" in shown.err
    for text in ("GFLOP/s", "GB/s", "gemm.cpu", "rates measured", "error left out"):
        assert text in shown.out, text
    assert "all-reduce" not in shown.out
    calibration, origin = load(out)
    assert (origin.gpu, origin.machine) == ("cpu", machine_name(1))
    assert origin.facts["runs"] == calibration.time.rows == 4
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    asked = ("plan", "--model", model, "--world-size", "1", "--gpu", "cpu", "--batch", "4", "--seq", "16", "--nproc-per-node", "1")
    assert run(*asked, "--calibrate", out) == 0


def test_steps_that_wait_are_told_apart_from_steps_that_compute() -> None:
    busy, waiting = TimedSteps((1.0, 1.0), (1.0, 0.98)), TimedSteps((2.0, 2.0), (1.0, 1.0))
    assert live.waiting_share([busy]) == pytest.approx(0.01)
    assert live.waiting_share([busy, waiting]) == pytest.approx(1 - 3.98 / 6)
    assert live.waiting_share([TimedSteps((1.0,), (1.1,))]) == 0
