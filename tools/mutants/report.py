"""Results of the last runs, and their pages.

A JSON file has three entries. "date" is the date of the last run. "noticed" maps a test file
below `tests` to its tests, and a test to the mutants that it was the first to notice. "missed" maps
the other mutants to what ran. Grouping by test keeps the file below 20 KB.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import RESULTS, ROOT, markdown, today, with_sections
from tools.mutants.catalogue import Mutant

Outcome = dict[str, Any]
"""`caught_by` (empty if no test failed), `seconds`, and `ran`: `reaching` or `everything`."""


class Record(NamedTuple):
    """Files of a catalogue: its results, and the page with their section."""

    results: Path
    page: Path


DEFECTS = Record(RESULTS / "mutants.json", ROOT / "docs/development/mutants.md")
WAITS = Record(ROOT / "docs/development/waits.json", ROOT / "docs/development/waits.md")
TITLES = {
    "fresh": "Planted without knowledge of the tests",
    "known": "Defects that Plait once had, and similar ones",
    "stale": "Checkpoints that hold another state than that of the call",
    "compat": "Interfaces of other libraries",
    "context": "Context parallelism",
    "experts": "Experts",
    "inference": "Inference",
    "standby": "Standby processes",
    "trainer": "Trainer of Transformers",
    "waits": "Calls",
}


def load(path: Path = DEFECTS.results) -> tuple[dict[str, Outcome], str]:
    """Return the results keyed by mutant, and the date of the last run, or ({}, "")."""
    if not path.exists():
        return {}, ""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    results = {}
    for mutant, outcome in recorded["missed"].items():
        results[mutant] = {"caught_by": "", **outcome}
    for file, tests in recorded["noticed"].items():
        for test, mutants in tests.items():
            # Without a test it is a file that did not start, or how the tests ended.
            caught_by = f"tests/{file}::{test}" if test else file
            for mutant in mutants:
                results[mutant] = {"caught_by": caught_by}
    return results, recorded["date"]


def store(results: dict[str, Outcome], path: Path, date: str | None = None) -> None:
    """Write results keyed by mutant, as of `date` (default: today)."""
    noticed: dict[str, dict[str, list[str]]] = {}
    missed = {}
    for mutant, outcome in results.items():
        if outcome["caught_by"]:
            file, _, test = outcome["caught_by"].partition("::")
            place = file.removeprefix("tests/") if test else file
            noticed.setdefault(place, {}).setdefault(test, []).append(mutant)
        else:
            missed[mutant] = {"ran": outcome["ran"]}

    # One line per test file.
    lines = [f" {json.dumps(file)}: {json.dumps(tests)}" for file, tests in noticed.items()]
    head = f'{{\n "date": {json.dumps(date or today())},\n "missed": {json.dumps(missed)},\n'
    text = f'{head} "noticed": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def page(
    mutants: list[Mutant], results: dict[str, Outcome], date: str, record: Record = DEFECTS
) -> str:
    """Return the page for results of which the newest are of `date`."""
    rows: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    missed: dict[str, list[str]] = defaultdict(list)
    recorded = noticed = 0
    for mutant in mutants:
        rows[mutant.author].append(_row(mutant, results))
        result = results.get(mutant.id)
        if result is not None:
            recorded += 1
            if result["caught_by"]:
                noticed += 1
            else:
                missed[result["ran"]].append(mutant.id)
    lines = [
        f"**{noticed} of {recorded} are noticed.** "
        f"Not noticed: {', '.join(missed['everything']) or 'none'}. "
        "Not noticed by the tests that reach them, and not run against all tests yet: "
        f"{', '.join(missed['reaching']) or 'none'}. "
        f"Not run yet: {len(mutants) - recorded} of {len(mutants)}. Last run: {date}."
    ]
    for author, title in TITLES.items():
        if author in rows:
            table = markdown(("defect", "what goes wrong", "noticed by"), rows[author], right=())
            lines += ["", f"## {title}", "", table.rstrip()]
    return with_sections(record.page, {"results": "\n".join(lines) + "\n"})


def _row(mutant: Mutant, results: dict[str, Outcome]) -> tuple[str, ...]:
    result = results.get(mutant.id)
    if result is None:
        by = "not run yet"
    elif result["caught_by"]:
        by = f"`{result['caught_by']}`"
    elif result["ran"] == "everything":
        by = "**nothing**"
    else:
        by = "no test that reaches it; not run against everything yet"
    return mutant.id, f"{mutant.what} (`{mutant.file}`)", by
