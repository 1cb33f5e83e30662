"""A run with states in files that is killed ends with the bits of a run that is not.

It is killed in updates, in checkpoints and at random times, and continues from its last checkpoint.
"""

import email
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from plait.checkpoint.folder import find_checkpoint
from plait.checkpoint.load import Reader
from plait.checkpoint.windows import dtype_of
from tests.integration.json_lines import rows_of_run
from tests.integration.killed import PLACES
from tests.integration.tiny import llama

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(580), pytest.mark.proof]

ROOT = Path(__file__).parents[2]
STEPS = 10


def config_of(folder):
    """Return a run whose states need several buffers, with a checkpoint every third step."""
    offload = {"device": "nvme", "nvme_path": str(folder / "files"), "buffer_size": 20000}
    return {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "model": llama(max_position_embeddings=32),
        "data": {
            "source": "files",
            "paths": [f"{Path(email.__file__).parent}/*.py"],
            "vocab_size": 300,
            "sequence_length": 24,
        },
        "run": {"steps": STEPS, "checkpoint_every": 3, "keep": 2, "validate_sequences": 4},
    }


def train(folder, name, *, places, kills):
    """Run `killed.py` in a process, and return the names of its kills."""
    arguments = [str(places), str(kills), name, "run.json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.killed", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PLAIT_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=550)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # includes its forks
    assert process.returncode == 0, error[-2000:]
    return json.loads(output.splitlines()[-1])


def last_checkpoint(folder):
    """Return every tensor of the last checkpoint, including states of generators."""
    checkpoint = find_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and checkpoint.manifest.tag == f"step-{STEPS:08d}"
    reader = Reader(checkpoint)
    tensors = {
        name: torch.empty(record.shape, dtype=dtype_of(record))
        for name, record in reader.tensors.items()
    }
    reader.fill(tensors)
    for rank in range(2):
        for name, tensor in reader.rank_tensors(rank).items():
            tensors[f"{rank}.{name}"] = tensor
    return tensors


def losses_of(folder):
    """Return the step and the loss of every step in the metrics."""
    return [(row["step"], row["loss"]) for row in rows_of_run(folder, "step")]


def test_killed_run_loses_nothing(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(config_of(tmp_path)))
    train(tmp_path, "undisturbed", places=0, kills=0)
    kills = train(tmp_path, "killed", places=len(PLACES), kills=1)
    places = [kill.split()[0] for kill in kills[: len(PLACES)]]
    assert places == [name for name, _ in PLACES], "every place is reached"

    expected_losses = losses_of(tmp_path / "undisturbed")
    assert losses_of(tmp_path / "killed") == expected_losses
    assert len(expected_losses) == STEPS
    expected = last_checkpoint(tmp_path / "undisturbed")
    actual = last_checkpoint(tmp_path / "killed")
    assert set(expected) == set(actual)
    assert any(name.startswith("optimizer.") for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    assert not list((tmp_path / "files").iterdir()), "files of killed processes are removed"
