"""Tests that `covered.py` names exist."""

from pathlib import Path

from tests.reports.covered import COVERED

PARITY = Path(__file__).parents[1] / "parity"


def test_tests_that_are_named_exist():
    missing = []
    for report, name in COVERED.items():
        file, _, test = name.partition("::")
        path = PARITY / file
        if not path.exists() or f"def {test}(" not in path.read_text(encoding="utf-8"):
            missing.append(f"{report}: {name}")
    assert not missing, missing
