"""Which tests reach which mutant: before the statement that it changes stands a probe that leaves a file, in all processes of a test.

One run of the whole suite over a copy of the sources with all probes in it answers for all mutants. A test that reuses what an earlier
test computed does not reach the code by itself; mutants that survive are run against the whole suite for that reason.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants.catalogue import Mutant

MARKS = "PLAIT_MUTANT_MARKS"
"""The environment variable that names the folder of the files."""
PROBE = f"""
def _probe(mutant):
    import os
    folder = os.environ.get("{MARKS}")
    if folder and not os.path.exists(folder + "/" + mutant):
        open(folder + "/" + mutant, "w").close()
"""


def probed(text: str, mutants: list[Mutant]) -> str:
    """The source with a probe before each statement that a mutant changes."""
    tree = ast.parse(text)
    for mutant in mutants:
        body, index = _statement(tree, mutant.line(text))
        call = ast.parse(f"_probe({mutant.id!r})").body[0]
        body.insert(index, ast.copy_location(call, body[index]))
    after_future = next(
        (i for i, node in enumerate(tree.body) if not _is_prelude(node)), len(tree.body)
    )
    tree.body[after_future:after_future] = ast.parse(PROBE).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_prelude(node: ast.stmt) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _statement(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    """The innermost list of statements with a statement that covers `line`, and its index. A line between statements (a comment, `else:`)
    belongs to the next one."""
    body: list[ast.stmt] = tree.body
    while True:
        index = next(
            (i for i, node in enumerate(body) if (node.end_lineno or node.lineno) >= line),
            len(body) - 1,
        )
        inner = next(
            (
                block
                for block in _blocks(body[index])
                if block[0].lineno <= line <= (block[-1].end_lineno or 0)
            ),
            None,
        )
        if inner is None:
            return _after_docstring(body, index)
        body = inner


def _after_docstring(body: list[ast.stmt], index: int) -> tuple[list[ast.stmt], int]:
    node = body[index]
    if isinstance(node, ast.FunctionDef):  # its signature changes: whoever calls it reaches it
        first = node.body[0]
        documented = (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and len(node.body) > 1
        )
        return node.body, 1 if documented else 0
    return body, index


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block and isinstance(block, list):
            yield block
    for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield handler.body


class Attribution:
    """A pytest plugin: after every test, writes down the marks that it left and how it ended. One line of JSON a test."""

    def __init__(self, marks: Path, log: Path) -> None:
        self.marks, self.log = marks, log
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        reached = sorted(path.name for path in self.marks.iterdir())
        for name in reached:
            (self.marks / name).unlink()
        row = {
            "test": nodeid,
            "seconds": round(self._seconds.get(nodeid, 0.0), 3),
            "failed": nodeid in self._failed,
            "reached": reached,
        }
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: Any) -> None:
    """Registers the plugin where `-p tools.mutants.probes` names this module."""
    marks = os.environ.get(MARKS)
    if marks:
        folder = Path(marks) / str(os.getpid())  # suites that run side by side have a folder each
        folder.mkdir(parents=True)
        os.environ[MARKS] = str(folder)
        config.pluginmanager.register(Attribution(folder, Path(marks).with_suffix(".jsonl")))
