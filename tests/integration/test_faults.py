"""The page of planted faults is generated from its results, and the small runs pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.report import read
from tools.faults import report

ROOT = Path(__file__).parents[2]


def test_page_has_the_results():
    results = read(report.RESULTS)
    assert set(results) == set(report.SECTIONS)
    assert report.PAGE.read_text(encoding="utf-8") == report.page(results)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_kills_of_saves_and_damages():
    arguments = "-m tools.faults small --part saves --part damage --no-write"
    done = subprocess.run(
        [sys.executable, *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, mixed 0" in done.stdout
