"""Offload to files keeps the process within a budget that its states exceed several times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
BUDGET = 96 * 1024**2
"""Bytes for the larger of four buffers of 3 million float32 numbers (46 MiB) and a pool of five of
1.1 million (21 MiB). The remainder is for gathered blocks, activations and the runtime."""


def run(folder, placement):
    """Run `disk_budget.py` in a process, and return its result."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.disk_budget", str(folder), placement],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_offload_of_everything_keeps_the_budget(tmp_path):
    """The losses are those of a run in memory, which needs eight times the budget."""
    in_memory = run(tmp_path, "memory")
    on_disk = run(tmp_path, "everything")
    assert on_disk["losses"] == in_memory["losses"]
    assert in_memory["resident"]["training"] > in_memory["states"] >= 8 * BUDGET
    assert set(on_disk["resident"]) == {"building", "training", "evaluation"}
    assert max(on_disk["resident"].values()) <= 1.1 * BUDGET


# Parameters, gradients and two optimizer states have the same size.
@pytest.mark.parametrize(("placement", "in_memory"), [("parameters", 3), ("states", 1)])
def test_offload_of_one_kind_keeps_the_others_in_memory(tmp_path, placement, in_memory):
    result = run(tmp_path, placement)
    limit = in_memory * result["parameters"] + 1.1 * BUDGET
    assert result["resident"]["training"] <= limit
