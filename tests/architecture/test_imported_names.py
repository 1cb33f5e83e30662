"""What benchmarks, tools and tests import from the project exists, and is no test: nothing else reads those that a test never runs."""

from __future__ import annotations

import ast
from functools import cache

from tests.architecture.sources import OTHERS, ROOT, nodes

PLACES = {"plait": ROOT / "src", "benchmarks": ROOT, "tools": ROOT, "tests": ROOT}


def _file(module):
    """The file of a module of the project; a folder without one has no names of its own."""
    bare = PLACES[module.split(".")[0]].joinpath(*module.split("."))
    return next(
        (path for path in (bare / "__init__.py", bare.with_suffix(".py")) if path.is_file()), None
    )


@cache
def _names(path):
    """That a file binds at its top, also in branches there."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def _imports(found):
    """Modules of the project and the names that are imported from them."""
    for node in found:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PLACES:
            yield from ((str(node.module), alias.name) for alias in node.names)


def _missing(found):
    missing = []
    for module, name in _imports(found):
        file = _file(module)
        names = _names(file) if file is not None else frozenset()
        known = "__getattr__" in names or name in names
        if not known and _file(f"{module}.{name}") is None:
            missing.append(f"{module}.{name}")
    return missing


def test_imported_names_exist():
    assert len(OTHERS) > 200
    missing = {str(path.relative_to(ROOT)): _missing(nodes(path)) for path in OTHERS}
    assert not {path: names for path, names in missing.items() if names}


def test_no_module_imports_a_test_module():
    """Or to change a test is to change others, and its file is imported under two names."""
    wrong = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in OTHERS
        for module, name in _imports(nodes(path))
        if module.rpartition(".")[2].startswith("test_")
        or (name.startswith("test_") and _file(f"{module}.{name}") is not None)
    ]
    assert not wrong


def test_a_name_that_is_gone_is_found():
    text = "from benchmarks.planner_accuracy.published import LAYOUTS, rows\nfrom plait.no_such_module import anything"
    found = list(ast.walk(ast.parse(text)))
    assert _missing(found) == [
        "benchmarks.planner_accuracy.published.LAYOUTS",
        "plait.no_such_module.anything",
    ]
