"""Find the tests that reach each mutant.

One run of all tests over a copy with a probe before each statement that a mutant changes answers
for all mutants. A probe leaves a file, in all processes of a test. A test that reuses what an
earlier test computed does not reach the code by itself, so survivors run against all tests.
"""

import ast
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants.catalogue import Mutant
from tools.mutants.project import ROOT, ProjectCopy

MARKS = "PLAIT_MUTANT_MARKS"
"""Environment variable with the folder of the files that probes leave."""
PROBE = f"""
def _probe(mutant):
    import os
    folder = os.environ.get("{MARKS}")
    if folder and not os.path.exists(folder + "/" + mutant):
        open(folder + "/" + mutant, "w").close()
"""


def find(
    mutants: list[Mutant], build: Path, command: tuple[str, ...], *, limit_seconds: float
) -> Path:
    """Run all tests with probes, and return a file with one line of JSON per test.

    Args:
        mutants: Where the probes are.
        build: Folder of the copy of the project and of the result.
        command: Arguments of Python that run all tests, and take options of pytest.
        limit_seconds: Time for all tests.
    """
    copy = ProjectCopy(build / "probed")
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for name, members in by_file.items():
        copy.write(name, probed((ROOT / name).read_text(encoding="utf-8"), members))
    marks = build / "marks"
    lines = marks.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    log = build / "probed.log"
    print("which tests reach which mutant: one run of all tests with probes ...", flush=True)
    plugin = ("-p", "tools.mutants.reach")
    copy.run(*command, *plugin, limit_seconds=limit_seconds, log=log, **{MARKS: str(marks)})
    if not lines.exists():
        raise SystemExit(f"the tests did not start; {log} says why")
    return lines


def tests_by_mutant(lines: Path) -> dict[str, list[str]]:
    """Return the tests that reach a mutant and pass without it, those of quick files first."""
    passed: dict[str, list[str]] = defaultdict(list)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if not row["failed"]:
            file = row["test"].partition("::")[0]
            for mutant in row["reached"]:
                passed[mutant].append(row["test"])
                seconds[mutant, file] += row["seconds"]
    for mutant, tests in passed.items():
        tests.sort(key=lambda test: seconds[mutant, test.partition("::")[0]])
    return passed


def probed(text: str, mutants: list[Mutant]) -> str:
    """Return the source with a probe before each statement that a mutant changes."""
    tree = ast.parse(text)
    for mutant in mutants:
        body, index = _statement(tree, mutant.line(text))
        call = ast.parse(f"_probe({mutant.id!r})").body[0]
        body.insert(index, ast.copy_location(call, body[index]))
    after_prelude = [*itertools.dropwhile(_is_prelude, tree.body)]
    prelude = tree.body[: len(tree.body) - len(after_prelude)]
    tree.body = [*prelude, *ast.parse(PROBE).body, *after_prelude]
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_prelude(node: ast.stmt) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _statement(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    """Return the innermost block with a statement that covers `line`, and its index there.

    A line between statements (a comment, `else:`) belongs to the next one.
    """
    body: list[ast.stmt] = tree.body
    while True:
        index = 0
        while index + 1 < len(body) and (body[index].end_lineno or 0) < line:
            index += 1
        node = body[index]
        blocks = [b for b in _blocks(node) if b[0].lineno <= line <= (b[-1].end_lineno or 0)]
        if blocks:
            body = blocks[0]
        elif isinstance(node, ast.FunctionDef):
            # The signature changes, and whoever calls the function reaches it.
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            return node.body, int(documented)
        else:
            return body, index


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block and isinstance(block, list):
            yield block
    for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield handler.body


class Attribution:
    """A plugin of pytest that records the marks of each test and how it ended."""

    def __init__(self, marks: Path, log: Path) -> None:
        self.marks = marks
        self.log = log
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        reached = sorted(os.listdir(self.marks))
        for name in reached:
            (self.marks / name).unlink()
        row = {
            "test": nodeid,
            "seconds": round(self._seconds[nodeid], 3),
            "failed": nodeid in self._failed,
            "reached": reached,
        }
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: Any) -> None:
    """Register the plugin if `-p tools.mutants.reach` names this module."""
    marks = os.environ.get(MARKS)
    if marks:
        folder = Path(marks) / str(os.getpid())  # the two parts of `make test` run side by side
        folder.mkdir(parents=True)
        os.environ[MARKS] = str(folder)
        config.pluginmanager.register(Attribution(folder, Path(marks).with_suffix(".jsonl")))
