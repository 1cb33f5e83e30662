"""The results of the last runs, in benchmarks/results/mutants.json.

The file has three entries. "date" is the date of the last run. "noticed" maps a test file to its tests, a test to the mutants that it
was the first to notice, and a mutant to the seconds until that failure. "missed" maps the other mutants to what ran, the seconds, and
whether `plait verify` notices them. Grouping by test keeps the file below 20 KB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.machine import today
from tools.mutants.catalogue import ROOT

RESULTS = ROOT / "benchmarks/results/mutants.json"


def load(path: Path = RESULTS) -> tuple[dict[str, Any], str]:
    """Return the results keyed by mutant, and the date of the last run. Both are empty if nothing has run."""
    if not path.exists():
        return {}, ""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    results = {
        mutant: {"caught_by": "", **outcome} for mutant, outcome in recorded["missed"].items()
    }
    for file, tests in recorded["noticed"].items():
        for test, mutants in tests.items():
            caught_by = f"{file}::{test}" if test else file
            results |= {
                mutant: {"caught_by": caught_by, "seconds": seconds}
                for mutant, seconds in mutants.items()
            }
    return results, recorded["date"]


def store(results: dict[str, Any], path: Path = RESULTS, date: str | None = None) -> None:
    """Write results keyed by mutant, as of `date` (default: today)."""
    noticed: dict[str, dict[str, dict[str, float]]] = {}
    missed = {}
    for mutant, outcome in results.items():
        seconds = round(outcome["seconds"])
        if outcome["caught_by"]:
            file, _, test = outcome["caught_by"].partition("::")
            noticed.setdefault(file, {}).setdefault(test, {})[mutant] = seconds
        else:
            missed[mutant] = {
                "seconds": seconds,
                "ran": outcome["ran"],
                "verify": outcome.get("verify", False),
            }

    # One line per test file.
    lines = [f"  {json.dumps(file)}: {json.dumps(tests)}" for file, tests in noticed.items()]
    text = f'{{\n "date": {json.dumps(date or today())},\n "missed": {json.dumps(missed)},\n "noticed": {{\n'
    path.write_text(text + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
