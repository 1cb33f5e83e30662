"""`plait train` as a user runs it: real text, real processes, signals, resuming, and mistakes.

`make test` starts one run of two processes. Tests that start more of them are for `make proof`.
"""

from __future__ import annotations

import csv
import email
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.cli.main import main
from tests.integration.commands import run_plait
from tests.integration.json_lines import rows_of_run
from tests.integration.tiny import llama
from tests.table import check_each

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.json"
TIMEOUT_SECONDS = 280
"""Limit of one run. It takes seconds, but its processes import torch on a busy machine."""

pytestmark = pytest.mark.timeout(2 * TIMEOUT_SECONDS + 20)

SMALL: dict[str, Any] = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "model": llama(hidden_size=64, intermediate_size=128, max_position_embeddings=64),
    "data": {
        "source": "files",
        "paths": [f"{Path(email.__file__).parent}/*.py"],
        "vocab_size": 400,
        "sequence_length": 48,
    },
    "run": {"steps": 12, "log_every": 4, "validate_every": 6, "validate_sequences": 8},
}
CALLBACK = """
from pathlib import Path

class Record:
    def __call__(self, event, engine):
        with Path(f"events-{engine.rank}").open("a") as file:
            print(type(event).__name__, getattr(event, "step", ""), file=file)
"""
TRACKERS = ["csv_monitor"]
if find_spec("tensorboard") and find_spec("accelerate"):
    TRACKERS.append("tensorboard")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder with `small.json` and a cache that the tests share."""
    folder = tmp_path_factory.mktemp("plait-train")
    (folder / "small.json").write_text(json.dumps(SMALL))
    (folder / "my_callbacks.py").write_text(CALLBACK)
    return folder


def start(place, *settings, file="small.json", flags=()):
    """Start `plait train` with `--set` for every setting."""
    environment = {**os.environ, "PLAIT_CACHE": str(place / "cache")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    # A tiny model gains nothing from several threads, which wait for each other on a busy machine.
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", "plait", "train", file, *set_all(settings), *flags],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def set_all(settings):
    return [text for setting in settings for text in ("--set", setting)]


def run(place, *settings, code=0, **options):
    """Run `plait train` in processes, and return its standard output and error."""
    process = start(place, *settings, **options)
    try:
        output, error = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == code, error
    assert "Traceback" not in error + output
    return output, error


def losses_of(folder):
    rows = rows_of_run(folder, "step")
    losses = {row["step"]: row["loss"] for row in rows}
    assert list(losses) == list(range(1, len(rows) + 1)), "every step occurs once and in order"
    return losses


@pytest.fixture(scope="module")
def complete(place):
    """Folder and output of a complete run of two processes with a callback and trackers."""
    trackers = [f"{name}.enabled=true" for name in TRACKERS]
    callback = "run.callbacks=[my_callbacks:Record]"
    output, _ = run(place, "run.folder=runs/complete", callback, *trackers)
    return place / "runs" / "complete", output


def test_run_writes_metrics_checkpoint_and_tokenizer(complete):
    from transformers import AutoTokenizer

    folder, output = complete
    losses = losses_of(folder)
    assert len(losses) == 12
    assert losses[12] < losses[1] - 0.5
    assert [row["step"] for row in rows_of_run(folder, "validation")] == [6, 12]
    assert rows_of_run(folder, "end")[-1]["reason"] == "finished"
    assert rows_of_run(folder, "start")[0]["world_size"] == 2
    assert json.loads((folder / "config.json").read_text())["layout"]["dp_shard"] == 2
    assert (folder / "checkpoints" / "step-00000012").is_dir()
    assert len(AutoTokenizer.from_pretrained(folder / "tokenizer")) == 400

    steps = re.findall(r"^step +(\d+)(?!.*validation).* loss ", output, re.MULTILINE)
    assert steps == ["1", "4", "8", "12"]
    assert "\x1b" not in output, "no colours and no cursor movements in a pipe"


def test_every_process_calls_the_callbacks(place, complete):
    """Events arrive in the same order on both ranks."""
    events = [(place / f"events-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert events[0] == events[1]
    assert events[0][:2] == ["RunStarted ", "StepDone 1"] and events[0][-1] == "RunEnded 12"
    steps = [event for event in events[0] if event.startswith("StepDone")]
    assert steps == [f"StepDone {step}" for step in range(1, 13)]
    assert "CheckpointSaved 12" in events[0]


def test_trackers_record_the_losses_of_the_metrics(complete):
    """The first process writes the numbers of metrics.jsonl to each tracker."""
    folder, _ = complete
    expected = list(losses_of(folder).items())
    with (folder / "csv_monitor" / "train_loss.csv").open(newline="") as stream:
        recorded = [(int(step), float(loss)) for step, loss in list(csv.reader(stream))[1:]]
    assert recorded == expected and len(expected) == 12
    assert (folder / "csv_monitor" / "validation_loss.csv").is_file()
    if "tensorboard" not in TRACKERS:
        return

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {scalar.step: scalar.value for scalar in events.Scalars("train/loss")}
    assert scalars == pytest.approx(dict(expected))


def test_complete_run_is_not_started_again(place, complete, capsys):
    folder, _ = complete
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert run_without_processes(place, "run.folder=runs/complete") == 0
    output = capsys.readouterr().out
    assert "is complete: 12 of 12 steps" in output
    assert "--set run.steps=24" in output
    assert "--fresh" in output
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def commands_of_the_tutorial():
    page = (ROOT / "docs" / "tutorials" / "first-run.md").read_text(encoding="utf-8")
    lines = re.findall(r"^plait ((?:checkpoint|export) .*?)(?:  #.*)?$", page, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["checkpoint", "export"]
    return lines


def test_tutorial_lists_verifies_and_exports(complete, tmp_path, monkeypatch, capsys):
    """The exported weights are the trained ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(complete[0])
    monkeypatch.chdir(tmp_path)
    for line in [*commands_of_the_tutorial(), "checkpoint verify runs/mine"]:
        run_plait(line)
    output = capsys.readouterr().out
    assert "*  step-00000012  12 " in output and "good" in output
    assert "greedy tokens are equal, and logits agree within" in output
    assert "vllm serve trained" in output
    assert "tensors are the checkpoint's" in output and "every byte of 2 files" in output

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    trained = AutoModelForCausalLM.from_config(exported.config)
    plait.load_trained(trained, tmp_path / "runs" / "mine" / "checkpoints")
    weights = trained.state_dict()
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    norm = exported.state_dict()["model.norm.weight"]
    assert norm.sub(1).abs().max() > 1e-3, "differs from the initial weights"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "trained")) == 400


def test_export_overwrites_nothing(complete, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained").mkdir()
    run_plait(f"export {complete[0]} --out trained", code=2)
    assert "exists; pass another name" in capsys.readouterr().err
    (tmp_path / ".linked.tmp").symlink_to(tmp_path / "trained")
    run_plait(f"export {complete[0]} --out linked", code=2)
    assert "--out linked cannot be written: Not a directory" in capsys.readouterr().err

    # The lock of another export.
    temporary = tmp_path / ".other.tmp"
    (temporary / "left").mkdir(parents=True)
    lock = os.open(temporary, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run_plait(f"export {complete[0]} --out other", code=2)
    message = "--out other: another export is writing it; wait until it ends"
    assert message in capsys.readouterr().err
    assert (temporary / "left").is_dir()
    os.close(lock)
    run_plait(f"export {complete[0]} --out other")
    assert not temporary.exists() and not (tmp_path / "other" / "left").exists()
    assert (tmp_path / "other" / "config.json").is_file()


def test_damaged_checkpoints_are_named(complete, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(complete[0] / "checkpoints", copy)
    (last,) = (path.name for path in copy.iterdir() if path.is_dir())
    run_plait(f"checkpoint diff {copy / last} {complete[0]}")
    assert "equal, bit for bit" in capsys.readouterr().out

    (copy / ".step-00000099.tmp").mkdir()
    shards = copy / last / "00001.safetensors"
    shards.write_bytes(shards.read_bytes()[:-1])
    run_plait(f"checkpoint verify {copy}", code=4)
    assert "00001.safetensors has " in capsys.readouterr().err
    run_plait(f"checkpoint ls {copy}")
    run_plait(f"export {copy} --out {tmp_path}/out", code=4)
    assert not (tmp_path / "out").exists()

    manifest = copy / last / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sequence"', '"Sequence"'))
    capsys.readouterr()
    run_plait(f"checkpoint ls {copy}", code=4)
    assert "was changed after it was written" in capsys.readouterr().out
    run_plait(f"checkpoint prune {copy} --keep 1")
    assert not (copy / ".step-00000099.tmp").exists()
    run_plait(f"checkpoint ls {tmp_path}/none", code=2)


@pytest.mark.proof
def test_two_processes_continue_a_run_of_one(place, complete):
    """The losses are those of two processes from the start."""
    folder = place / "runs" / "one-then-two"
    run(place, "run.folder=runs/one-then-two", "run.processes=1", "run.steps=7")
    output, _ = run(place, "run.folder=runs/one-then-two")
    assert "changed since the last start: run.steps: 7 to 12" in output
    assert [row["world_size"] for row in rows_of_run(folder, "start")] == [1, 2]
    assert losses_of(folder) == pytest.approx(losses_of(complete[0]), rel=1e-5)
    expected = rows_of_run(complete[0], "validation")[-1]["loss"]
    assert rows_of_run(folder, "validation")[-1]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.proof
def test_interrupted_run_continues_with_the_same_bits(place, complete):
    folder = place / "runs" / "interrupted"
    process = start(place, "run.folder=runs/interrupted", "run.steps=100000")
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (folder / "metrics.jsonl").exists() or len(rows_of_run(folder, "step")) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    end = rows_of_run(folder, "end")[-1]
    assert end["reason"] == "interrupted"
    assert rows_of_run(folder, "checkpoint")[-1]["step"] == end["step"]
    command = "plait train small.json --set run.folder=runs/interrupted --set run.steps=100000"
    assert f"resume with: {command}" in output

    steps = end["step"] + 3
    output, _ = run(place, "run.folder=runs/interrupted", f"run.steps={steps}")
    assert f"from step {end['step']}" in output
    losses = losses_of(folder)
    reference = losses_of(complete[0])
    assert len(losses) == steps
    common = losses.keys() & reference.keys()
    assert len(common) >= 6
    assert {step: losses[step] for step in common} == {step: reference[step] for step in common}


@pytest.mark.proof
def test_weights_of_a_folder_are_trained(place, complete):
    from transformers import LlamaConfig, LlamaForCausalLM

    from plait.config.resolving.resolve import load
    from plait.data.loader import Loader
    from plait.train.session import check

    torch.manual_seed(5)
    shape = {key: value for key, value in SMALL["model"]["config"].items() if key != "model_type"}
    saved = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=400))
    saved.lm_head.weight.data.mul_(20)  # far from any initialisation
    saved.save_pretrained(place / "saved")
    config = {
        **SMALL,
        "model": {"path": "saved"},
        "data": {**SMALL["data"], "tokenizer": str(complete[0] / "tokenizer")},
        "run": {"steps": 1, "folder": "runs/weights"},
    }
    (place / "weights.json").write_text(json.dumps(config))
    run(place, file="weights.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        loaded = load("weights.json", ["run.folder=runs/other"])
        cache = place / "cache"
        data = check(loaded, world_size=2, cache=cache, say=lambda text: None).data
    batch = Loader(data.train, 4, 0).at(0)
    with torch.no_grad():
        expected = float(saved(**batch).loss)
    assert losses_of(place / "runs" / "weights")[1] == pytest.approx(expected, rel=1e-5)
    assert expected > 8


@pytest.mark.proof
def test_loss_that_is_not_finite_is_reported_once(place):
    huge = ("optimizer.params.lr=1e30", "gradient_clipping=0", "run.checkpoint_every=1")
    _, error = run(place, "run.folder=runs/lost", *huge, code=7)
    assert error.count("is not finite; the gradient of") == 1


def run_without_processes(place, *settings, file="small.json", flags=()):
    """Run `plait train` in this process, fail if it starts another, and return its exit code."""

    def launch(*_, **__):
        raise AssertionError("a process was started")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("PLAIT_CACHE", str(place / "cache"))
        patch.setattr("plait.cli.launch.run", launch)
        with pytest.raises(SystemExit) as end:
            main(["train", file, *set_all(settings), *flags])
    return int(end.value.code or 0)


def error_of(place, capsys, *settings, **options):
    """Return the error of a command that is refused before it starts a process."""
    capsys.readouterr()
    assert run_without_processes(place, *settings, **options) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


WRONG_SETTINGS = {
    "data.paths=[missing.txt]": "data.paths: 'missing.txt' names no file",
    "data.source=jsonl data.paths=[rows.jsonl]": (
        "rows.jsonl, line 2: has no field 'text'; it has 'body'"
    ),
    "data.paths=[empty.txt]": "there is no text to train on",
    "train_batch_size=100000": (
        "train_batch_size = 100000: one step takes 100000 sequences, but the text has"
    ),
    "model.config.vocab_size=300": "model vocab_size = 300: the tokenizer has 400 tokens",
    "model.config.hiden_size=3": (
        "model.config.hiden_size = 3: a 'llama' configuration has no such field; use 'hidden_size'"
    ),
    "model.config.model_type=lama": "use 'llama'",
    "data.tokenizer=./nowhere": "data.tokenizer = './nowhere': there is no such file or folder",
    "train_batch_size=3": "3",
}


def test_wrong_settings_are_refused(place, capsys):
    def check(settings, message):
        assert message in error_of(place, capsys, *settings.split(), "run.folder=runs/refused")
        assert not (place / "runs" / "refused").exists()

    (place / "rows.jsonl").write_text('{"text": "fine"}\n{"body": "not"}\n')
    (place / "empty.txt").write_text("")
    check_each(WRONG_SETTINGS.items(), check)


def test_wrong_file_is_refused_before_the_text_is_read(place, capsys, monkeypatch):
    def prepare(*_, **__):
        raise AssertionError("the text was read")

    # Reading a large text takes minutes, and the tests have none.
    monkeypatch.setattr("plait.train.session.prepare", prepare)
    assert "train_batch_size" in error_of(place, capsys, "train_batch_size=3")
    assert "use 'hidden_act'" in error_of(place, capsys, "model.config.hiden_act=gelu")


def test_incomplete_files_are_refused(place, capsys):
    assert "nothing.json" in error_of(place, capsys, file="nothing.json")
    for section in ("model", "data"):
        config = {name: value for name, value in SMALL.items() if name != section}
        (place / "part.json").write_text(json.dumps(config))
        assert error_of(place, capsys, file="part.json").startswith(f"plait: {section}")


def test_run_does_not_continue_with_another_model(place, complete, capsys):
    changes = ("model.config.hidden_size=32", "run.seed=1")
    error = error_of(place, capsys, "run.folder=runs/complete", *changes)
    assert "model.hidden_size = 32" in error
    assert "run.seed = 1" in error
    assert "was created with 64" in error
    assert "--fresh" in error


def test_refused_fresh_start_keeps_the_folder(place, complete, capsys):
    settings = ("run.folder=runs/complete", "model.config.vocab_size=3")
    error_of(place, capsys, *settings, flags=("--fresh",))
    assert (complete[0] / "metrics.jsonl").is_file()


@pytest.mark.proof
def test_fresh_start_renames_the_earlier_run(place, complete):
    folder = place / "runs" / "over"
    shutil.copytree(complete[0], folder)
    settings = ("run.folder=runs/over", "run.processes=1", "run.steps=2", "run.seed=1")
    output, _ = run(place, *settings, flags=("--fresh",))
    assert "runs/over.old-1" in output
    assert len(losses_of(folder)) == 2
    assert len(losses_of(folder.with_name("over.old-1"))) == 12


def test_quickstart_is_what_its_page_says(tmp_path, monkeypatch):
    from plait.config.resolving.resolve import load
    from plait.train.session import check

    # The folder that the file names may exist in the checkout.
    monkeypatch.chdir(tmp_path)
    # The real text takes seconds to tokenise. The embedding of the shorter one gets the rows that
    # the real vocabulary needs.
    original = load(QUICKSTART)
    assert original.train_batch_size is None, "a fixed batch would not fit every number of GPUs"
    overrides = [
        "data.source=files",
        f"data.paths=[{Path(email.__file__).parent}/*.py]",
        "data.vocab_size=600",
        f"model.config.vocab_size={original.data.vocab_size}",
    ]
    config = load(QUICKSTART, overrides)
    checked = check(config, world_size=2, cache=tmp_path, say=lambda text: None)
    assert 9e6 < checked.parameters < 11e6
    assert checked.resolved.layout.dp == 2
    assert checked.resolved.data_parallel.stage == 2
