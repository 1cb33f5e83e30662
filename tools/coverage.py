"""Write docs/development/coverage.md: every statement of mission.yaml with its command and its
tests, their last results, and the levels that it passed.

    python -m tools.coverage build/results/*.xml   record these JUnit results, and write the page
    python -m tools.coverage --check               fail if the page is old, or a test is gone

mission.yaml and results.json are in docs/development too. A result stays until the same tests run
again, so that a run of one file does not remove the others. A level counts if all of its tests ran
and none failed.
"""

import argparse
import json
import platform
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.report import ROOT, markdown, read, revision
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
Statement = dict[str, Any]
"""An entry of mission.yaml: id, statement, and either command and tests by level or neither."""


def read_statements(path: Path) -> list[Statement]:
    """Return the statements. Raises ValueError for an entry of another form."""
    statements = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        statement = {"command": "", "tests": {}, **entry}
        tests = statement["tests"]
        is_known = set(statement) == {"id", "statement", "command", "tests"}
        if not is_known or set(tests) - set(LEVELS) or bool(tests) != bool(statement["command"]):
            raise ValueError(
                f"{path}: {entry.get('id')}: an entry has id, statement, and either command and "
                f"tests by level ({', '.join(LEVELS)}) or neither"
            )
        statements.append(statement)
    return statements


def tests_of(statement: Statement) -> list[str]:
    return [*chain.from_iterable(statement["tests"].values())]


def page(statements: list[Statement], results: Results) -> str:
    newest = ""
    rows = []
    for statement in statements:
        command = statement["command"] and f"`{statement['command']}`"
        names = []
        outcomes = []
        for test in tests_of(statement):
            row = results.get(test)
            names.append(f"`{test}`")
            outcomes.append(_last_result(row))
            if row is not None:
                newest = max(newest, row["date"])
        levels = []
        for level, tests in statement["tests"].items():
            if tests and all(_has_passed(results.get(test)) for test in tests):
                levels.append(level)
        cells = ("<br>".join(names), "<br>".join(outcomes), ", ".join(levels))
        rows.append([statement["id"], statement["statement"], command, *cells])
    if newest:
        newest = f" The newest result is of {newest}."
    meanings = "\n".join(f"- **{level}** {meaning}" for level, meaning in LEVELS.items())
    header = ("id", "statement", "command", "tests", "last result", "passed")
    return f"""# Statements, tests and results

Written by `make coverage-docs` from `docs/development/mission.yaml` and the last test \
results; do not edit. Empty cells: no
test has run.{newest}

{meanings}

{markdown(header, rows, right=())}"""


def _has_passed(row: dict[str, Any] | None) -> bool:
    """Return whether a test ran and none of its cases failed."""
    return row is not None and row["passed"] > 0 and row["failed"] == 0


def _last_result(row: dict[str, Any] | None) -> str:
    if row is None:
        return "never run"
    kinds = ("failed", "passed", "skipped")
    counts = ", ".join(f"{row[kind]} {kind}" for kind in kinds if row[kind])
    return f"{counts} ({row['date']}, {row['commit']}, torch {row['torch']}, {row['machine']})"


def missing(statements: list[Statement], root: Path) -> list[str]:
    gone = []
    for statement in statements:
        for test in tests_of(statement):
            if not _exists(test, root):
                gone.append(f"{statement['id']}: {test}")
    return gone


def _exists(test: str, root: Path) -> bool:
    file, *names = test.split("[")[0].split("::")
    if not (root / file).is_file():
        return False
    text = (root / file).read_text(encoding="utf-8")
    return bool(text) and all(f"def {name}(" in text or f"class {name}" in text for name in names)


def _recorded(paths: list[Path], tests: list[str]) -> Results:
    """Return the results of tests in JUnit files. The last run counts."""
    import torch

    machine = f"CPU {platform.machine()}"
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name(0)
    source = {"commit": revision() or "no commit", "torch": torch.__version__, "machine": machine}
    recorded = {}
    for path in sorted(paths, key=junit.began):
        began = {"date": junit.began(path)[:10]}
        results = list(junit.results([path]))
        for test in tests:
            # A name of a file, a class or a function stands for all of its tests.
            longer = (f"{test}::", f"{test}[")
            matches = [r for r in results if r.test == test or r.test.startswith(longer)]
            if matches:
                recorded[test] = {**junit.counts(matches), **began, **source}
    return recorded


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="JUnit files of pytest")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    folder = root / "docs" / "development"
    target = folder / "coverage.md"
    statements = read_statements(folder / "mission.yaml")
    results: Results = read(folder / "results.json", {})
    problems = []
    for test in missing(statements, root):
        problems.append(f"docs/development/mission.yaml names a test that does not exist: {test}")
    if options.check:
        if not target.exists() or target.read_text(encoding="utf-8") != page(statements, results):
            problems.append(
                "docs/development/coverage.md is not what mission.yaml and results.json make; "
                "run `make coverage-docs`"
            )
    elif not problems:
        names = sorted({*chain.from_iterable(map(tests_of, statements))})
        results |= _recorded(options.results, names)
        results = {name: results[name] for name in names if name in results}
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        target.write_text(page(statements, results), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
