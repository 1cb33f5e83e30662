"""A run with its states in files that is killed, in its steps, in its checkpoints and at any time, goes on from its last checkpoint and
ends with the bits of one that was not."""

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
from tests.integration.killed import PLACES
from tests.integration.tiny import llama

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(580), pytest.mark.proof]

STEPS = 10


def configuration(folder):
    """Pieces are smaller than the states; checkpoints every third step."""
    return {
        "train_batch_size": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder / "files"),
                "buffer_size": 20000,
            },
        },
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
    """What was killed where."""
    command = [
        sys.executable,
        "-m",
        "tests.integration.killed",
        str(places),
        str(kills),
        name,
        "run.json",
    ]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PLAIT_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}:{root / 'src'}",
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=550)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its forks too
    assert process.returncode == 0, err[-2000:]
    return list(json.loads(out.splitlines()[-1]))


def checkpoint(folder):
    """Every tensor of the last one, generators too."""
    found = find_checkpoint(folder / "checkpoints")
    assert found is not None and found.manifest.tag == f"step-{STEPS:08d}"
    reader = Reader(found)
    tensors = {
        name: torch.empty(record.shape, dtype=dtype_of(record))
        for name, record in reader.tensors.items()
    }
    reader.fill(tensors)
    return tensors | {
        f"{rank}.{name}": tensor
        for rank in range(2)
        for name, tensor in reader.rank_tensors(rank).items()
    }


def losses(folder):
    """As the run's metrics say, every step once."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]


def test_a_killed_run_loses_nothing(tmp_path):
    """Deaths in a step over the files, in all stages of a checkpoint, and at random times."""
    (tmp_path / "files").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(configuration(tmp_path)))
    train(tmp_path, "whole", places=0, kills=0)
    deaths = train(tmp_path, "killed", places=len(PLACES), kills=1)
    assert [death.split()[0] for death in deaths[: len(PLACES)]] == [name for name, _ in PLACES], (
        "every place was reached"
    )
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == STEPS
    expected, found = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "killed")
    assert set(expected) == set(found)
    assert any(name.startswith("optimizer.") for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert not list((tmp_path / "files").iterdir()), "files of a process that died are gone with it"
