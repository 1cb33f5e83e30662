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
    return [test for tests in statement["tests"].values() for test in tests]


def page(statements: list[Statement], results: Results) -> str:
    tested = {test for statement in statements for test in tests_of(statement)}
    dates = [results[test]["date"] for test in tested & set(results)]
    newest = f" The newest result is of {max(dates)}." if dates else ""
    passed = {test for test, row in results.items() if row["passed"] and not row["failed"]}
    rows = []
    for statement in statements:
        command = statement["command"] and f"`{statement['command']}`"
        tests = tests_of(statement)
        # A level passed if every test ran and none failed.
        levels = [
            level for level, of_it in statement["tests"].items() if of_it and passed >= {*of_it}
        ]
        rows.append([
            statement["id"],
            statement["statement"],
            command,
            "<br>".join(f"`{test}`" for test in tests),
            "<br>".join(_last_result(results.get(test)) for test in tests),
            ", ".join(levels),
        ])  # fmt: skip
    meanings = "\n".join(f"- **{level}** {meaning}" for level, meaning in LEVELS.items())
    header = ("id", "statement", "command", "tests", "last result", "passed")
    return f"""# Statements, tests and results

Written by `make coverage-docs` from `docs/development/mission.yaml` and the last test \
results; do not edit. Empty cells: no
test has run.{newest}

{meanings}

{markdown(header, rows, right=())}"""


def _last_result(row: dict[str, Any] | None) -> str:
    if row is None:
        return "never run"
    kinds = [kind for kind in ("failed", "passed", "skipped") if row[kind]]
    counts = ", ".join(f"{row[kind]} {kind}" for kind in kinds)
    return f"{counts} ({row['date']}, {row['commit']}, torch {row['torch']}, {row['machine']})"


def missing(statements: list[Statement], root: Path) -> list[str]:
    gone = []
    for statement in statements:
        for test in tests_of(statement):
            file, *names = test.split("[")[0].split("::")
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            exist = (f"def {name}(" in text or f"class {name}" in text for name in names)
            if not text or not all(exist):
                gone.append(f"{statement['id']}: {test}")
    return gone


def _recorded(paths: list[Path], tests: list[str]) -> Results:
    """Return the results of tests in JUnit files. The last run counts."""
    import torch

    machine = f"CPU {platform.machine()}"
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name(0)
    source = {"commit": revision() or "no commit", "torch": torch.__version__, "machine": machine}
    recorded = {}
    for path in sorted(paths, key=junit.began):
        results = list(junit.results([path]))
        for test in tests:
            # A name of a file, a class or a function stands for all of its tests.
            longer = (f"{test}::", f"{test}[")
            matches = [r for r in results if r.test == test or r.test.startswith(longer)]
            if matches:
                date = {"date": junit.began(path)[:10]}
                recorded[test] = junit.counts(matches) | date | source
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
        names = sorted({test for statement in statements for test in tests_of(statement)})
        results |= _recorded(options.results, names)
        results = {name: results[name] for name in names if name in results}
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        target.write_text(page(statements, results), encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
