"""`plait train` on conversations, whole ones in a row, and on a data set that is read as it is needed: a run that goes on with other
processes, also after it was killed, has the losses of one process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from plait.cli.main import main
from tests.integration.tiny import llama
from tests.unit.data.byte_tokenizer import tokenizer

STREAM_STEPS = 24


def conversation(number):
    """Of another length for each number."""
    turns = []
    for turn in range(1 + number % 2):
        answer = f"It is {number + turn}. " * (1 + number % 3)
        turns += [("user", f"{number} + {turn}?"), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def config_of(folder, data, **more):
    tokenizer().save_pretrained(folder / "tokenizer")
    common = {"tokenizer": str(folder / "tokenizer"), "sequence_length": 96}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {**llama(), "dtype": "float64"},
        "data": {**common, "validation_fraction": 0.1, **data},
        **more,
    }


@pytest.fixture
def chat(tmp_path):
    rows = tmp_path / "chat.jsonl"
    rows.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(40)))
    data = {"source": "jsonl", "paths": [str(rows)], "format": "chat", "packing": "documents"}
    return config_of(tmp_path, data)


@pytest.fixture
def stream(tmp_path):
    from datasets import Dataset

    texts = [f"{n} and {n + 1} make {2 * n + 1}. " * (1 + n % 5) for n in range(150)]
    Dataset.from_list([{"text": text} for text in texts]).save_to_disk(str(tmp_path / "rows"))
    data = {
        "source": "datasets",
        "paths": [str(tmp_path / "rows")],
        "streaming": True,
        "buffer_sequences": 16,
    }
    return config_of(tmp_path, data, train_batch_size=8, zero_optimization={"stage": 1})


def started(folder, config, run, processes, steps, **parallel):
    """A command of which one checkpoint is written every third step."""
    section = {"folder": str(folder / run), "steps": steps, "processes": processes}
    file = folder / f"{run}-{processes}-{steps}.json"
    saving = {**section, "checkpoint_every": 3}
    file.write_text(json.dumps({**config, "parallel": parallel, "run": saving}))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PLAIT_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "plait", "train", str(file)],
        env={**os.environ, **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]


def losses(folder, run):
    """By step, of everything that the run's folder has."""
    file, found = folder / run / "metrics.jsonl", dict[int, list[float]]()
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        if row["event"] == "step":
            found.setdefault(row["step"], []).append(row["loss"])
    return found


def assert_goes_on(folder, steps):
    """The run "parts" has every step of the run "one", which has learnt something."""
    wanted, found = losses(folder, "one"), losses(folder, "parts")
    assert sorted(found) == sorted(wanted) == list(range(1, steps + 1))
    for step, values in found.items():
        assert values == pytest.approx(wanted[step] * len(values), rel=1e-6), step
    assert wanted[steps][0] < 0.8 * wanted[1][0]


def said_of(config, folder, capsys):
    """What is said when the run "one" cannot go on so."""
    config["run"] = {"folder": str(folder / "one"), "steps": 30, "processes": 1}
    (folder / "again.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder / "again.json")])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.proof
def test_conversations_with_other_processes(tmp_path, chat):
    """In the middle of an epoch, and over its end."""
    for run, processes, steps in (("one", 1, 6), ("parts", 2, 3), ("parts", 1, 6)):
        ended(started(tmp_path, chat, run, processes, steps))
    assert_goes_on(tmp_path, 6)


@pytest.mark.proof
def test_a_killed_stream_on_other_layouts(tmp_path, stream):
    """Two data-parallel processes, then tp 2, then one; over the ends of blocks and of an epoch."""
    ended(started(tmp_path, stream, "one", 1, STREAM_STEPS))
    for step, parallel in ((7, {}), (16, {"tp": 2})):
        process = started(tmp_path, stream, "parts", 2, STREAM_STEPS, **parallel)
        deadline = time.monotonic() + 200
        while step not in losses(tmp_path, "parts") and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        assert step in losses(tmp_path, "parts"), output[-3000:]
    ended(started(tmp_path, stream, "parts", 1, STREAM_STEPS))
    assert_goes_on(tmp_path, STREAM_STEPS)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("chat", {"packing": None}, "data.packing"),
        ("chat", {"scored": "all"}, "data.format"),
        ("stream", {"buffer_sequences": 32}, "data.buffer_sequences"),
    ],
)
def test_other_sequences_are_another_run(tmp_path, request, kind, changes, said, capsys):
    config = request.getfixturevalue(kind)
    ended(started(tmp_path, config, "one", 1, 1))
    config["data"] |= changes
    assert said in said_of(config, tmp_path, capsys)


def test_a_model_that_may_see_other_documents_is_refused(tmp_path, chat, capsys):
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}
    said = said_of({**chat, "model": {"config": bloom}}, tmp_path, capsys)
    assert "data.packing = 'documents': bloom has not been tested to keep attention within" in said
