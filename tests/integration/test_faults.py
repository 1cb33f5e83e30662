"""The scoreboard's harness works: kills of saves and damages at the small size; `make faults` has the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_kills_of_saves_and_damages() -> None:
    command = [
        sys.executable,
        *["-m", "tools.faults", "small", "--part", "saves", "--part", "damage", "--no-write"],
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, mixed 0" in done.stdout
