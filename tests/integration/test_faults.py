"""The page of planted faults follows its results, and saves and damages work at the small size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.report import read
from tools.faults import report

ROOT = Path(__file__).parents[2]


def test_page_has_the_results():
    parts = read(report.RESULTS)
    assert set(parts) == set(report.SECTIONS)
    assert report.PAGE.read_text(encoding="utf-8") == report.page(parts)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_kills_of_saves_and_damages():
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
