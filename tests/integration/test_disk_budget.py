"""The disk tier's promise: the memory of the process stays under a budget that its states exceed several times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
BUDGET = 96 * 1024**2
"""The larger of 4 pieces of 3 million float32 numbers (46 MiB) and a pool of 5 x 1.1 million (21 MiB); the rest is for the blocks that are
gathered, activations and the runtime."""


def run(folder, where):
    """One run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.disk_budget", str(folder), where]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_budget_that_parameters_and_states_exceed_eight_times(tmp_path):
    """Same losses as in memory, which takes more than the states: while the model is built, trained and evaluated."""
    in_memory, on_disk = run(tmp_path, "memory"), run(tmp_path, "everything")
    assert on_disk["losses"] == in_memory["losses"]
    assert in_memory["resident"]["training"] > in_memory["states"] >= 8 * BUDGET
    assert set(on_disk["resident"]) == {"building", "training", "evaluation"}
    assert max(on_disk["resident"].values()) <= 1.1 * BUDGET


@pytest.mark.parametrize(("where", "left"), [("parameters", 3), ("states", 1)])
def test_one_tier_takes_what_it_names(tmp_path, where, left):
    """Of four parts (parameters, gradients, two states) those that are not named stay in memory, and no more."""
    found = run(tmp_path, where)
    assert found["resident"]["training"] <= left * found["parameters"] + 1.1 * BUDGET
