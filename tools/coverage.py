"""Write docs/development/coverage.md: every statement of mission.yaml with its command, tests, last result and the levels it passed.

    python tools/coverage.py build/results/*.xml     take these pytest results (junit) in, and write the page
    python tools/coverage.py --check                 fail when the page is not what data and results make, or a named test is gone

mission.yaml and results.json are in docs/development too. Results stay in results.json until a later run of the same tests replaces
them, so that a run on a machine with GPUs or of one file does not blank the others. A test that was never run has no result, and a level
counts only when all its tests ran and none failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LEVELS = {
    "L0": "processes on CPU, float64, equal to one process",
    "L1": "fake ranks: order, bytes and types of collectives equal to hand-written torch",
    "L2": "several ranks on one GPU",
    "L3": "one real rank of the layout on a GPU, the others fake",
    "L4": "2 to 8 GPUs",
}


@dataclass(frozen=True)
class Row:
    """One statement."""

    id: str
    statement: str
    command: str
    tests: dict[str, list[str]]


Results = dict[str, dict[str, Any]]
"""Test, as mission.yaml names it, to counts of outcomes and where they come from."""


def rows(path: Path) -> list[Row]:
    """The statements. Raises ValueError for a row of another form."""
    found = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        unknown = set(entry) - {"id", "statement", "command", "tests"}
        levels = entry.get("tests", {})
        if unknown or not set(levels) <= set(LEVELS) or bool(levels) != bool(entry.get("command")):
            raise ValueError(
                f"{path}: {entry.get('id')}: id, statement, and either command and tests by level ({', '.join(LEVELS)}) or neither"
            )
        found.append(Row(entry["id"], entry["statement"], entry.get("command", ""), levels))
    return found


def outcomes(path: Path) -> dict[str, str]:
    """pytest's name of every test in a junit file (family xunit1) to passed, failed or skipped."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file", "")
        owner = (
            case.get("classname", "")
            .removeprefix(file.removesuffix(".py").replace("/", "."))
            .strip(".")
            .replace(".", "::")
        )
        name = "::".join(part for part in (file, owner, case.get("name", "")) if part)
        children = {child.tag for child in case}
        found[name] = (
            "failed"
            if children & {"failure", "error"}
            else "skipped"
            if "skipped" in children
            else "passed"
        )
    return found


def count(test: str, found: dict[str, str]) -> dict[str, int] | None:
    """Outcomes of the tests that `test` (a file, a class, a function) stands for; None when none ran."""
    mine = [
        outcome
        for name, outcome in found.items()
        if name == test or name.startswith((f"{test}::", f"{test}["))
    ]
    return {kind: mine.count(kind) for kind in ("passed", "failed", "skipped")} if mine else None


def update(
    results: Results, names: Iterable[str], found: dict[str, str], source: dict[str, str]
) -> Results:
    """The results with those of one run in place of older ones of the same tests."""
    return {
        **results,
        **{
            name: {**counts, **source}
            for name in names
            if (counts := count(name, found)) is not None
        },
    }


def passed_levels(row: Row, results: Results) -> list[str]:
    """The levels of which every test ran and none failed."""
    return [
        level
        for level, tests in row.tests.items()
        if tests
        and all(
            test in results and results[test]["passed"] and not results[test]["failed"]
            for test in tests
        )
    ]


def page(statements: list[Row], results: Results) -> str:
    """The text of docs/development/coverage.md."""
    tested = {test for row in statements for tests in row.tests.values() for test in tests}
    dates = sorted(results[test]["date"] for test in tested & set(results))
    newest = f" The newest result is of {dates[-1]}." if dates else ""
    lines = [
        "# Statements, tests and results",
        "",
        "Written by `make coverage-docs` from `docs/development/mission.yaml` and the last test results; do not edit. Empty cells: no",
        f"test has run.{newest}",
        "",
        *(f"- **{level}** {meaning}" for level, meaning in LEVELS.items()),
        "",
        "| id | statement | command | tests | last result | passed |",
        "|---|---|---|---|---|---|",
    ]
    for row in statements:
        tests = [test for level in row.tests.values() for test in level]
        cells = [
            row.id,
            row.statement,
            f"`{row.command}`" if row.command else "",
            "<br>".join(f"`{test}`" for test in tests),
            "<br>".join(_result(results.get(test)) for test in tests),
            ", ".join(passed_levels(row, results)),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _result(result: dict[str, Any] | None) -> str:
    if result is None:
        return "never run"
    counts = ", ".join(
        f"{result[kind]} {kind}" for kind in ("failed", "passed", "skipped") if result[kind]
    )
    return f"{counts} ({result['date']}, {result['commit']}, torch {result['torch']}, {result['machine']})"


def missing(statements: list[Row], root: Path) -> list[str]:
    """Tests that mission.yaml names and that are not there."""
    gone = []
    for row in statements:
        for test in (test for level in row.tests.values() for test in level):
            file, *names = test.split("[")[0].split("::")
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else None
            if text is None or not all(
                f"def {name}(" in text or f"class {name}" in text for name in names
            ):
                gone.append(f"{row.id}: {test}")
    return gone


def _time(path: Path) -> str:
    """When a run began, as a text that sorts."""
    return next(ElementTree.parse(path).iter("testsuite")).get("timestamp", "")


def _source(path: Path) -> dict[str, str]:
    import torch

    suite = next(ElementTree.parse(path).iter("testsuite"))
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    device = (
        torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU {platform.machine()}"
    )
    return {
        "date": suite.get("timestamp", "")[:10],
        "commit": described or "no commit",
        "torch": torch.__version__,
        "machine": device,
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        help="junit files of pytest runs; of a test in several the last run counts",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 when something is out of date",
    )
    given = parser.parse_args(arguments)
    folder = root / "docs" / "development"
    statements = rows(folder / "mission.yaml")
    store, target = folder / "results.json", folder / "coverage.md"
    results: Results = json.loads(store.read_text()) if store.exists() else {}
    wrong = [
        f"docs/development/mission.yaml names a test that is not there: {test}"
        for test in missing(statements, root)
    ]
    if given.check:
        if not target.exists() or target.read_text(encoding="utf-8") != page(statements, results):
            wrong.append(
                "docs/development/coverage.md is not what mission.yaml and results.json make; run `make coverage-docs`"
            )
    elif not wrong:
        named = [test for row in statements for level in row.tests.values() for test in level]
        for path in sorted(given.results, key=_time):
            results = update(results, named, outcomes(path), _source(path))
        results = {name: results[name] for name in sorted(set(named) & set(results))}
        store.write_text(json.dumps(results, indent=1) + "\n")
        target.write_text(page(statements, results), encoding="utf-8")
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
