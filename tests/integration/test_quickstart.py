"""`plait train` as a user runs it: real text, real processes, a pipe, Ctrl-C, resuming, and everything a user can get wrong. `make test`
starts one run of two processes; what needs more of them is for `make proof`."""

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
from tests.integration.tiny import llama

pytest.importorskip("transformers")

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.json"
TIMEOUT_SECONDS = 280
"""For one run. It takes seconds, but each of its processes imports torch, and the machine may be busy."""

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
    """A working folder with `small.json` and a cache that the tests share."""
    folder = tmp_path_factory.mktemp("plait-train")
    (folder / "small.json").write_text(json.dumps(SMALL))
    (folder / "my_callbacks.py").write_text(CALLBACK)
    return folder


def _start(place, *arguments, file="small.json"):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "plait", "train", file, *arguments],
        cwd=place,
        # One thread each: a tiny model gains nothing from more, and on a busy machine threads wait for each other.
        env={**environment, "PLAIT_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(place, *arguments, file="small.json"):
    """(exit code, standard output, standard error)."""
    process = _start(place, *arguments, file=file)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def _folder(place, name):
    return place / "runs" / name, "--set", f"run.folder=runs/{name}"


def _rows(folder, event):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def _losses(folder):
    rows = _rows(folder, "step")
    found = {row["step"]: row["loss"] for row in rows}
    assert list(found) == list(range(1, len(rows) + 1)), "every step is there once and in order"
    return found


@pytest.fixture(scope="module")
def whole(place):
    """A run of two processes with a callback and trackers, and what it printed."""
    folder, *where = _folder(place, "whole")
    callback = ("--set", "run.callbacks=[my_callbacks:Record]")
    trackers = [part for name in TRACKERS for part in ("--set", f"{name}.enabled=true")]
    code, out, err = _run(place, *where, *callback, *trackers)
    assert code == 0, err
    return folder, out


def test_a_run_trains_and_leaves_everything_behind(whole):
    folder, out = whole
    losses = _losses(folder)
    assert len(losses) == 12
    assert losses[12] < losses[1] - 0.5
    assert [row["step"] for row in _rows(folder, "validation")] == [6, 12]
    assert _rows(folder, "end")[-1]["reason"] == "finished"
    assert _rows(folder, "start")[0]["world_size"] == 2
    assert json.loads((folder / "config.json").read_text())["layout"]["dp_shard"] == 2
    assert (folder / "checkpoints" / "step-00000012").is_dir()
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(folder / "tokenizer")) == 400
    lines = [line for line in out.splitlines() if line.startswith("step")]
    assert [
        int(line.split()[1]) for line in lines if " loss " in line and "validation" not in line
    ] == [1, 4, 8, 12]
    assert "\x1b" not in out, "no colours and no cursor movements in a pipe"


def test_every_process_calls_the_callbacks(place, whole):
    """Events arrive in the same order on both ranks."""
    events = [(place / f"events-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert events[0] == events[1]
    assert events[0][:2] == ["RunStarted ", "StepDone 1"] and events[0][-1] == "RunEnded 12"
    steps = [event for event in events[0] if event.startswith("StepDone")]
    assert steps == [f"StepDone {step}" for step in range(1, 13)]
    assert "CheckpointSaved 12" in events[0]


def test_trackers_record_the_losses_of_the_metrics(whole):
    """The first process writes the numbers of metrics.jsonl to each tracker."""
    folder, _ = whole
    expected = list(_losses(folder).items())
    with (folder / "csv_monitor" / "train_loss.csv").open(newline="") as stream:
        recorded = [(int(step), float(loss)) for step, loss in list(csv.reader(stream))[1:]]
    assert recorded == expected and len(expected) == 12
    assert (folder / "csv_monitor" / "validation_loss.csv").is_file()
    if "tensorboard" not in TRACKERS:
        return
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [step for step, _ in expected]
    assert [scalar.value for scalar in scalars] == pytest.approx([loss for _, loss in expected])


def test_the_same_command_says_that_it_is_complete(place, whole, capsys):
    folder, _ = whole
    before = (folder / "metrics.jsonl").read_bytes()
    assert _main(place, "--set", "run.folder=runs/whole") == 0
    out = capsys.readouterr().out
    assert "is complete: 12 of 12 steps" in out
    assert "--set run.steps=24" in out
    assert "--fresh" in out
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_readmes_commands_on_a_run(whole, tmp_path, monkeypatch, capsys):
    """List, verify and export, as docs/tutorials/first-run.md shows; what is exported is what was trained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    page = Path(__file__).parents[2] / "docs" / "tutorials" / "first-run.md"
    lines = [
        line.partition("  #")[0].split()
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"plait (checkpoint|export) ", line)
    ]
    assert [line[1] for line in lines] == ["checkpoint", "export"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(whole[0])
    monkeypatch.chdir(tmp_path)
    for line in [*lines, ["plait", "checkpoint", "verify", "runs/mine"]]:
        assert _code(line[1:]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "*  step-00000012  12 " in out and "good" in out
    assert "greedy tokens are equal, and logits agree within" in out and "vllm serve trained" in out
    assert "tensors are the checkpoint's" in out and "every byte of 2 files" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    mine = AutoModelForCausalLM.from_config(model.config)
    plait.load_trained(mine, tmp_path / "runs" / "mine" / "checkpoints")
    assert all(
        torch.equal(tensor, mine.state_dict()[name]) for name, tensor in model.state_dict().items()
    )
    assert model.state_dict()["model.norm.weight"].sub(1).abs().max() > 1e-3, (
        "as it was initialised"
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "trained")) == 400
    assert (
        _code(["export", "runs/mine", "--out", "trained"]) == 2
        and "exists; pass another name" in capsys.readouterr().err
    )
    again = ["export", "runs/mine", "--out", "other"]
    (tmp_path / ".linked.tmp").symlink_to(tmp_path / "trained")
    assert (
        _code([*again[:-1], "linked"]) == 2
        and "--out linked cannot be written: Not a directory" in capsys.readouterr().err
    )
    (tmp_path / ".other.tmp" / "left").mkdir(parents=True)
    held = os.open(tmp_path / ".other.tmp", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert (
        _code(again) == 2
        and "--out other: another export is writing it; wait until it ends"
        in capsys.readouterr().err
    )
    assert (tmp_path / ".other.tmp" / "left").is_dir()
    os.close(held)
    assert _code(again) == 0 and sorted(os.listdir("other")) == sorted(os.listdir("trained"))


def test_damage_is_named(whole, tmp_path, capsys):
    """Exit codes that scripts can use."""
    copy = tmp_path / "copy"
    shutil.copytree(whole[0] / "checkpoints", copy)
    (last,) = (path.name for path in copy.iterdir() if path.is_dir())
    assert _code(["checkpoint", "diff", str(copy / last), str(whole[0])]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    (copy / ".step-00000099.tmp").mkdir()
    shards = copy / last / "00001.safetensors"
    shards.write_bytes(shards.read_bytes()[:-1])
    for verb in ("verify", "ls"):
        assert _code(["checkpoint", verb, str(copy)]) == (4 if verb == "verify" else 0)
    assert "00001.safetensors has " in capsys.readouterr().err
    assert (
        _code(["export", str(copy), "--out", str(tmp_path / "out")]) == 4
        and not (tmp_path / "out").exists()
    )
    manifest = copy / last / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sequence"', '"Sequence"'))
    assert _code(["checkpoint", "ls", str(copy)]) == 4
    assert "was changed after it was written" in capsys.readouterr().out
    assert _code(["checkpoint", "prune", str(copy), "--keep", "1"]) == 0
    assert not (copy / ".step-00000099.tmp").exists()
    assert _code(["checkpoint", "ls", str(tmp_path / "none")]) == 2


def _code(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.mark.proof
def test_one_process_computes_the_same_and_two_go_on_with_it(place, whole):
    folder, *where = _folder(place, "alone")
    code, _, err = _run(place, *where, "--set", "run.processes=1", "--set", "run.steps=7")
    assert code == 0, err
    code, out, err = _run(place, *where)
    assert code == 0, err
    assert "changed since the last start: run.steps: 7 to 12" in out
    assert [row["world_size"] for row in _rows(folder, "start")] == [1, 2]
    assert _losses(folder) == pytest.approx(_losses(whole[0]), rel=1e-5)
    assert _rows(folder, "validation")[-1]["loss"] == pytest.approx(
        _rows(whole[0], "validation")[-1]["loss"], rel=1e-5
    )


@pytest.mark.proof
def test_ctrl_c_and_the_same_command_again(place, whole):
    folder, *where = _folder(place, "interrupted")
    process = _start(place, *where, "--set", "run.steps=100000")
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (folder / "metrics.jsonl").exists() or len(_rows(folder, "step")) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    end = _rows(folder, "end")[-1]
    assert end["reason"] == "interrupted"
    assert _rows(folder, "checkpoint")[-1]["step"] == end["step"]
    assert f"resume with: plait train small.json {' '.join(where)} --set run.steps=100000" in out
    code, out, err = _run(place, *where, "--set", f"run.steps={end['step'] + 3}")
    assert code == 0, err
    assert f"from step {end['step']}" in out
    losses, reference = _losses(folder), _losses(whole[0])
    assert len(losses) == end["step"] + 3
    common = losses.keys() & reference.keys()
    assert len(common) >= 6
    assert {step: losses[step] for step in common} == {step: reference[step] for step in common}, (
        "bit for bit"
    )


@pytest.mark.proof
def test_weights_of_a_folder_are_trained_on(place, whole):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = {
        name: value for name, value in SMALL["model"]["config"].items() if name != "model_type"
    }
    saved = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=400))
    saved.lm_head.weight.data.mul_(20)  # far from what any fresh initialisation gives
    saved.save_pretrained(place / "saved")
    folder, *_ = _folder(place, "weights")
    description = {
        **SMALL,
        "model": {"path": "saved"},
        "data": {**SMALL["data"], "tokenizer": str(whole[0] / "tokenizer")},
    }
    (place / "weights.json").write_text(
        json.dumps({**description, "run": {"steps": 1, "folder": "runs/weights"}})
    )
    code, _, err = _run(place, file="weights.json")
    assert code == 0, err

    from plait.config.resolving.resolve import load
    from plait.data.loader import Loader
    from plait.train.session import check

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        data = check(
            load("weights.json", ["run.folder=runs/other"]),
            world_size=2,
            cache=place / "cache",
            say=lambda text: None,
        ).data
    batch = Loader(data.train, 4, 0).at(0)
    with torch.no_grad():
        expected = float(saved(**batch).loss)
    assert _losses(folder)[1] == pytest.approx(expected, rel=1e-5)
    assert expected > 8


@pytest.mark.proof
def test_a_lost_loss_is_told_once(place):
    _, *where = _folder(place, "lost")
    huge = (
        "--set",
        "optimizer.params.lr=1e30",
        "--set",
        "gradient_clipping=0",
        "--set",
        "run.checkpoint_every=1",
    )
    code, out, err = _run(place, *where, *huge)
    assert code == 7, err
    assert err.count("is not finite; the gradient of") == 1
    assert "Traceback" not in err + out


def _main(place, *arguments, file="small.json"):
    """The command in this process: nothing may be started, so nothing is isolated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("PLAIT_CACHE", str(place / "cache"))
        patch.setattr("plait.cli.launch.run", lambda *_, **__: pytest.fail("a process was started"))
        with pytest.raises(SystemExit) as ended:
            main(["train", file, *arguments])
        return int(ended.value.code or 0)


def _refused(place, capsys, *settings):
    capsys.readouterr()
    assert _main(place, *(part for setting in settings for part in ("--set", setting))) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.paths=[missing.txt]"], "data.paths: 'missing.txt' names no file"),
        (
            ["data.source=jsonl", "data.paths=[rows.jsonl]"],
            "rows.jsonl, line 2: has no field 'text'; it has 'body'",
        ),
        (["data.paths=[empty.txt]"], "there is no text to train on"),
        (
            ["train_batch_size=100000"],
            "train_batch_size = 100000: one step takes 100000 sequences, but the text has",
        ),
        (["model.config.vocab_size=300"], "model vocab_size = 300: the tokenizer has 400 tokens"),
        (
            ["model.config.hiden_size=3"],
            "model.config.hiden_size = 3: a 'llama' configuration has no such field; use 'hidden_size'",
        ),
        (["model.config.model_type=lama"], "use 'llama'"),
        (
            ["data.tokenizer=./nowhere"],
            "data.tokenizer = './nowhere': there is no such file or folder",
        ),
        (["train_batch_size=3"], "3"),
    ],
)
def test_wrong_inputs(place, capsys, settings, said):
    (place / "rows.jsonl").write_text('{"text": "fine"}\n{"body": "not"}\n')
    (place / "empty.txt").write_text("")
    err = _refused(place, capsys, *settings, "run.folder=runs/refused")
    assert said in err
    assert "Traceback" not in err
    assert not (place / "runs" / "refused").exists()


def test_a_wrong_file_is_refused_before_the_text_is_read(place, capsys, monkeypatch):
    monkeypatch.setattr(
        "plait.train.session.prepare", lambda *_, **__: pytest.fail("the text was read")
    )
    assert "train_batch_size" in _refused(place, capsys, "train_batch_size=3")
    assert "use 'hidden_act'" in _refused(place, capsys, "model.config.hiden_act=gelu")


def test_a_missing_file_is_refused(place, capsys):
    assert _main(place, file="nothing.json") == 2
    assert "nothing.json" in capsys.readouterr().err


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_file_without_model_or_data_is_refused(place, capsys, section):
    (place / "part.json").write_text(
        json.dumps({name: value for name, value in SMALL.items() if name != section})
    )
    assert _main(place, file="part.json") == 2
    assert capsys.readouterr().err.startswith(f"plait: {section}")


def test_another_model_does_not_go_on(place, whole, capsys):
    err = _refused(
        place, capsys, "run.folder=runs/whole", "model.config.hidden_size=32", "run.seed=1"
    )
    assert "model.hidden_size = 32" in err
    assert "run.seed = 1" in err
    assert "was created with 64" in err
    assert "--fresh" in err


def test_a_refused_start_over_leaves_the_folder(place, whole):
    assert (
        _main(
            place,
            *["--set", "run.folder=runs/whole", "--set", "model.config.vocab_size=3", "--fresh"],
        )
        == 2
    )
    assert (whole[0] / "metrics.jsonl").is_file()


@pytest.mark.proof
def test_starting_over_keeps_the_earlier_run(place, whole):
    folder, *where = _folder(place, "over")
    shutil.copytree(whole[0], folder)
    code, out, err = _run(
        place,
        *where,
        *["--set", "run.processes=1", "--set", "run.steps=2", "--set", "run.seed=1", "--fresh"],
    )
    assert code == 0, err
    assert "runs/over.old-1" in out
    assert len(_losses(folder)) == 2
    assert len(_losses(folder.with_name("over.old-1"))) == 12


def test_the_quickstart_is_what_its_page_says(tmp_path, monkeypatch):
    """E14: also after `make quickstart`, whose run lies in the folder that the file names."""
    from plait.config.resolving.resolve import load
    from plait.train.session import check

    monkeypatch.chdir(tmp_path)
    # The real text takes seconds to tokenise, so this one is shorter; the embedding gets the rows that the real vocabulary would give it.
    vocabulary = load(QUICKSTART).data.vocab_size  # type: ignore[union-attr]
    shorter = [
        "data.source=files",
        f"data.paths=[{Path(email.__file__).parent}/*.py]",
        "data.vocab_size=600",
    ]
    config = load(QUICKSTART, [*shorter, f"model.config.vocab_size={vocabulary}"])
    checked = check(config, world_size=2, cache=tmp_path, say=lambda text: None)
    assert 9e6 < checked.parameters < 11e6
    assert checked.resolved.layout.dp == 2
    assert load(QUICKSTART).train_batch_size is None, (
        "a fixed batch would not divide over every number of GPUs"
    )
    assert checked.resolved.data_parallel.stage == 2
