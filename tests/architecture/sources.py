"""Files of the project, parsed once per session."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "plait"
FILES = sorted(SOURCE.rglob("*.py"))
"""Modules of the package."""
OTHERS = [
    path for folder in ("benchmarks", "tools", "tests") for path in (ROOT / folder).rglob("*.py")
]
"""Files that import the package."""


@cache
def tree(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path):
    """Return all nodes of a file."""
    return tuple(ast.walk(tree(path)))
