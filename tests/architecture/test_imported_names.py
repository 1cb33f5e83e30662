"""Benchmarks, tools and tests import names that exist, and nothing from test modules.

Tests run only a part of them.
"""

from __future__ import annotations

import ast
from functools import cache

from tests.architecture.sources import OTHERS, ROOT, nodes

PLACES = {"plait": ROOT / "src", "benchmarks": ROOT, "tools": ROOT, "tests": ROOT}


def _file(module):
    """Return the file of a module of the project, or None for a folder without one."""
    base = PLACES[module.split(".")[0]].joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


@cache
def _names(path):
    """Return the names that a file binds."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def _imports(syntax_nodes):
    """Yield modules of the project and the names that are imported from them."""
    for node in syntax_nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PLACES:
            for alias in node.names:
                yield str(node.module), alias.name


def _missing(syntax_nodes):
    missing = []
    for module, name in _imports(syntax_nodes):
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
    """A change of a test would change others, and its file would be imported under two names."""
    imports = []
    for path in OTHERS:
        for module, name in _imports(nodes(path)):
            is_module = name.startswith("test_") and _file(f"{module}.{name}") is not None
            if is_module or module.rpartition(".")[2].startswith("test_"):
                imports.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert not imports


def test_missing_names_are_reported():
    text = """
from benchmarks.planner_accuracy.published import LAYOUTS, rows
from plait.no_such_module import anything
"""
    assert _missing(ast.walk(ast.parse(text))) == [
        "benchmarks.planner_accuracy.published.LAYOUTS",
        "plait.no_such_module.anything",
    ]
