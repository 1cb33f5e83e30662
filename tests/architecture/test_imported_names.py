"""What benchmarks, tools and tests import from the project exists: nothing else reads those of them that a test never runs."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "tools", "tests")
PLACES = {"plait": ROOT / "src", "benchmarks": ROOT, "tools": ROOT, "tests": ROOT}


def _file(module: str) -> Path | None:
    """The file of a module of the project; a folder without one has no names of its own."""
    bare = PLACES[module.split(".")[0]].joinpath(*module.split("."))
    return next(
        (path for path in (bare / "__init__.py", bare.with_suffix(".py")) if path.is_file()), None
    )


@cache
def _names(path: Path) -> frozenset[str]:
    """That a file binds at its top, also in branches there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def _missing(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if (
            not isinstance(node, ast.ImportFrom)
            or node.module is None
            or node.module.split(".")[0] not in PLACES
        ):
            continue
        file = _file(node.module)
        names = _names(file) if file is not None else frozenset()
        if "__getattr__" in names:
            continue
        found += [
            name
            for a in node.names
            if a.name not in names and _file(name := f"{node.module}.{a.name}") is None
        ]
    return found


def test_imported_names_exist():
    folders = [sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS]
    assert all(folders)
    files = [path for folder in folders for path in folder]
    missing = {
        str(path.relative_to(ROOT)): names
        for path in files
        if (names := _missing(path.read_text(encoding="utf-8")))
    }
    assert not missing


def test_a_name_that_is_gone_is_found():
    assert _missing("from benchmarks.planner_accuracy.published import LAYOUTS, rows") == [
        "benchmarks.planner_accuracy.published.LAYOUTS"
    ]
    assert _missing("from plait.no_such_module import anything") == [
        "plait.no_such_module.anything"
    ]
