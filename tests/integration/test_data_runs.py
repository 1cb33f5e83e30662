"""`plait train` on conversations and on streamed data: runs that continue on other layouts.

A run that continues with another number of processes, even after it was killed, has the losses of a
run in one process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest

from tests.integration.commands import run_plait
from tests.integration.json_lines import rows_of_run, write_rows
from tests.integration.tiny import llama
from tests.unit.data.byte_tokenizer import tokenizer

STREAM_STEPS = 24


def conversation(number):
    """Return a conversation whose length depends on its number."""
    messages = []
    for turn in range(1 + number % 2):
        answer = f"It is {number + turn}. " * (1 + number % 3)
        messages.append({"role": "user", "content": f"{number} + {turn}?"})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def config_of(folder, data, **sections):
    tokenizer().save_pretrained(folder / "tokenizer")
    common = {"tokenizer": str(folder / "tokenizer"), "sequence_length": 96}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {**llama(), "dtype": "float64"},
        "data": {**common, "validation_fraction": 0.1, **data},
        **sections,
    }


@pytest.fixture
def chat(tmp_path):
    """Configuration for conversations, complete ones in each sequence."""
    rows = write_rows(tmp_path / "chat.jsonl", map(conversation, range(40)))
    data = {"source": "jsonl", "paths": [str(rows)], "format": "chat", "packing": "documents"}
    return config_of(tmp_path, data)


@pytest.fixture
def stream(tmp_path):
    """Configuration for a data set that is read while it is trained on."""
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


def start(folder, config, run, processes, steps, **parallel):
    """Start a run that writes a checkpoint every third step."""
    section = {"folder": str(folder / run), "steps": steps, "processes": processes}
    config = {**config, "parallel": parallel, "run": {**section, "checkpoint_every": 3}}
    file = folder / f"{run}-{processes}-{steps}.json"
    file.write_text(json.dumps(config))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PLAIT_CACHE": str(folder / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "plait", "train", str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(*arguments, **parallel):
    process = start(*arguments, **parallel)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]


def losses_of(folder, run):
    """Return the losses of every step. A step that was repeated has several."""
    losses = defaultdict(list)
    if (folder / run / "metrics.jsonl").exists():
        for row in rows_of_run(folder / run, "step"):
            losses[row["step"]].append(row["loss"])
    return losses


def assert_same_losses(folder, steps):
    """Compare the runs "reference" and "continued", whose losses have to fall."""
    expected = losses_of(folder, "reference")
    actual = losses_of(folder, "continued")
    assert sorted(actual) == sorted(expected) == list(range(1, steps + 1))
    for step, values in actual.items():
        assert values == pytest.approx(expected[step] * len(values), rel=1e-6), step
    assert expected[steps][0] < 0.8 * expected[1][0]


def error_of(config, folder, capsys):
    """Return the error if the run "reference" cannot continue with a configuration."""
    run = {"folder": str(folder / "reference"), "steps": 30, "processes": 1}
    (folder / "again.json").write_text(json.dumps({**config, "run": run}))
    run_plait("train", folder / "again.json", code=2)
    return capsys.readouterr().err


@pytest.mark.proof
def test_conversations_continue_with_other_processes(tmp_path, chat):
    """The change is in the middle of an epoch, and the second one is reached."""
    train(tmp_path, chat, "reference", 1, 6)
    train(tmp_path, chat, "continued", 2, 3)
    train(tmp_path, chat, "continued", 1, 6)
    assert_same_losses(tmp_path, 6)


@pytest.mark.proof
def test_killed_stream_continues_on_other_layouts(tmp_path, stream):
    """Two data-parallel processes, tp 2, and one process pass the ends of blocks and an epoch."""
    train(tmp_path, stream, "reference", 1, STREAM_STEPS)
    for step, parallel in ((7, {}), (16, {"tp": 2})):
        process = start(tmp_path, stream, "continued", 2, STREAM_STEPS, **parallel)
        deadline = time.monotonic() + 200
        while step not in losses_of(tmp_path, "continued") and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        assert step in losses_of(tmp_path, "continued"), output[-3000:]
    train(tmp_path, stream, "continued", 1, STREAM_STEPS)
    assert_same_losses(tmp_path, STREAM_STEPS)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("chat", {"packing": None}, "data.packing"),
        ("chat", {"scored": "all"}, "data.format"),
        ("stream", {"buffer_sequences": 32}, "data.buffer_sequences"),
    ],
)
def test_other_sequences_do_not_continue_a_run(tmp_path, request, kind, changes, message, capsys):
    config = request.getfixturevalue(kind)
    train(tmp_path, config, "reference", 1, 1)
    config["data"] |= changes
    assert message in error_of(config, tmp_path, capsys)


def test_model_that_may_attend_to_other_documents_is_refused(tmp_path, chat, capsys):
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}
    error = error_of({**chat, "model": {"config": bloom}}, tmp_path, capsys)
    assert "data.packing = 'documents': bloom has not been tested to keep attention within" in error
