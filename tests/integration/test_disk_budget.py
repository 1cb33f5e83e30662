"""The disk tier's promise: the memory of the process stays under a budget that its states exceed several times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BUDGET = 128 * 1024**2
"""4 pieces of 3 million float32 numbers are 46 MiB; the rest is for the blocks that are gathered, activations and the runtime."""


def run(folder: Path, where: str) -> dict[str, Any]:
    """One run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.disk_budget", str(folder), where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_budget_that_the_states_exceed_four_times(tmp_path: Path) -> None:
    """Same losses as in memory, which takes more than the states."""
    in_memory, on_disk = run(tmp_path, "memory"), run(tmp_path, "disk")
    assert on_disk["losses"] == in_memory["losses"]
    assert in_memory["resident"] > in_memory["states"] >= 4 * BUDGET
    assert on_disk["resident"] <= 1.1 * BUDGET
