"""Write docs/development/coverage.md: every statement of mission.yaml with its command and its
tests, their last results, and the levels that it passed.

    python -m tools.coverage build/results/*.xml    record these JUnit results, and write the page
    python -m tools.coverage --check                fail if the page is out of date, or a test is gone

mission.yaml and results.json are in docs/development too. A result stays until the same tests run
again, so that a run of one file does not remove the others. A level counts if all of its tests ran
and none failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.report import ROOT, revision
from tools import junit

LEVELS = {
    "L0": "processes on CPU, float64, equal to one process",
    "L1": "fake ranks: order, bytes and types of collectives equal to hand-written torch",
    "L2": "several ranks on one GPU",
    "L3": "one real rank of the layout on a GPU, the others fake",
    "L4": "2 to 8 GPUs",
}
Results = dict[str, dict[str, Any]]
"""Test, as mission.yaml names it, to counts of outcomes and where they come from."""


@dataclass(frozen=True)
class Statement:
    """One entry of mission.yaml."""

    id: str
    text: str
    command: str
    tests: dict[str, list[str]]
    """Tests by level."""

    @property
    def all_tests(self) -> list[str]:
        """Tests of all levels."""
        return [test for tests in self.tests.values() for test in tests]


def read(path: Path) -> list[Statement]:
    """Return the statements. Raises ValueError for an entry of another form."""
    statements = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        unknown = set(entry) - {"id", "statement", "command", "tests"}
        tests = entry.get("tests", {})
        command = entry.get("command", "")
        if unknown or not set(tests) <= set(LEVELS) or bool(tests) != bool(command):
            raise ValueError(
                f"{path}: {entry.get('id')}: an entry has id, statement, and either command and "
                f"tests by level ({', '.join(LEVELS)}) or neither"
            )
        statements.append(Statement(entry["id"], entry["statement"], command, tests))
    return statements


def matching(test: str, results: Iterable[junit.Result]) -> list[junit.Result]:
    """Return the results that a name of a file, a class or a function stands for."""
    longer = (f"{test}::", f"{test}[")
    return [one for one in results if one.test == test or one.test.startswith(longer)]


def passed_levels(statement: Statement, results: Results) -> list[str]:
    """Return the levels of which every test ran and none failed."""
    passed = {test for test, row in results.items() if row["passed"] and not row["failed"]}
    return [level for level, tests in statement.tests.items() if tests and passed >= {*tests}]


def page(statements: list[Statement], results: Results) -> str:
    """Return the text of docs/development/coverage.md."""
    tested = {test for statement in statements for test in statement.all_tests}
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
    for statement in statements:
        cells = [
            statement.id,
            statement.text,
            f"`{statement.command}`" if statement.command else "",
            "<br>".join(f"`{test}`" for test in statement.all_tests),
            "<br>".join(_last_result(results.get(test)) for test in statement.all_tests),
            ", ".join(passed_levels(statement, results)),
        ]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def _last_result(row: dict[str, Any] | None) -> str:
    if row is None:
        return "never run"
    counts = ", ".join(
        f"{row[kind]} {kind}" for kind in ("failed", "passed", "skipped") if row[kind]
    )
    return f"{counts} ({row['date']}, {row['commit']}, torch {row['torch']}, {row['machine']})"


def missing(statements: list[Statement], root: Path) -> list[str]:
    """Return tests of mission.yaml that do not exist."""
    gone = []
    for statement in statements:
        for test in statement.all_tests:
            file, *names = test.split("[")[0].split("::")
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            exist = (f"def {name}(" in text or f"class {name}" in text for name in names)
            if not text or not all(exist):
                gone.append(f"{statement.id}: {test}")
    return gone


def _source(path: Path) -> dict[str, str]:
    import torch

    machine = f"CPU {platform.machine()}"
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name(0)
    source = {"date": junit.began(path)[:10], "commit": revision() or "no commit"}
    return source | {"torch": torch.__version__, "machine": machine}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the page, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="JUnit files of pytest")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    folder = root / "docs" / "development"
    store = folder / "results.json"
    target = folder / "coverage.md"
    statements = read(folder / "mission.yaml")
    results: Results = json.loads(store.read_text()) if store.exists() else {}
    problems = [
        f"docs/development/mission.yaml names a test that does not exist: {test}"
        for test in missing(statements, root)
    ]
    if options.check:
        if not target.exists() or target.read_text(encoding="utf-8") != page(statements, results):
            problems.append(
                "docs/development/coverage.md is not what mission.yaml and results.json make; "
                "run `make coverage-docs`"
            )
    elif not problems:
        names = sorted({test for statement in statements for test in statement.all_tests})
        for path in sorted(options.results, key=junit.began):  # the last run counts
            found = list(junit.results([path]))
            for test in names:
                own = matching(test, found)
                if own:
                    results[test] = junit.counts(own) | _source(path)
        results = {name: results[name] for name in names if name in results}
        store.write_text(json.dumps(results, indent=1) + "\n")
        target.write_text(page(statements, results), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
