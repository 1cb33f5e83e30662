"""Measures of style that keep `src/plait` readable, with the limits that the tests enforce.

    python -m tools.style                       the whole package
    python -m tools.style src/plait/sharded     one folder

A good number is no proof of good prose. A bad one is a reason to read the file again.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "plait"
LIMITS = {
    "fragments per 100 docstrings": 0.5,
    "conditional expressions per 1,000 lines": 7.5,
    "nested conditional expressions": 0.0,
    "tuple assignments per 1,000 lines": 0.5,
    "vague names per 1,000 names": 0.5,
    "class names that are not unique": 1.0,
}
"""Largest values that the tests accept."""
_FRAGMENT = re.compile(
    r"(of|as|that|those|these|what|which|who|where|when|whether|in|on|at|by|from|to|for|with"
    r"|without|beside|besides|before|after|until|since|so|because|not|no|none|one|its|their"
    r"|the same|be it)\b",
    re.IGNORECASE,
)
"""First words that leave the subject of a docstring to the name above it."""
_VAGUE = frozenset(
    [
        "found",
        "asked",
        "given",
        "kept",
        "told",
        "said",
        "whole",
        "own",
        "here",
        "held",
        "made",
        "wanted",
        "taken",
        "words",
        "tell",
        "apart",
        "beside",
        "pieces",
        "piece",
        "ways",
        "way",
        "one",
        "ones",
        "rest",
    ]
)
"""Names that say which part a value plays in a sentence, and not what it is."""
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Measures:
    """Counts over some files."""

    lines: int = 0
    statements: int = 0
    comments: int = 0
    docstrings: list[str] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    nodes: Counter[type] = field(default_factory=Counter)
    nested_conditions: int = 0
    tuple_assignments: int = 0
    classes: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path) -> None:
        """Add the counts of one file."""
        text = path.read_text(encoding="utf-8")
        self.lines += text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments += sum(
            token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
            for token in tokens
        )
        for node in ast.walk(ast.parse(text)):
            self._count(node)

    def _count(self, node: ast.AST) -> None:
        self.nodes[type(node)] += 1
        self.docstrings.extend(_docstrings(node))
        if isinstance(node, ast.Name):
            self.names[node.id.strip("_")] += 1
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] += 1
        elif isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            self.nested_conditions += any(isinstance(part, ast.IfExp) for part in parts)
        elif isinstance(node, ast.Assign):
            both = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            self.tuple_assignments += both
        if isinstance(node, ast.stmt):
            is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            self.statements += not is_string

    def values(self) -> dict[str, float]:
        """Return the measures by name. Those of `LIMITS` come first."""
        thousand_lines = max(self.lines, 1) / 1000
        fragments = sum(bool(_FRAGMENT.match(text)) for text in self.docstrings)
        vague = sum(count for name, count in self.names.items() if name in _VAGUE)
        repeated = sum(count > 1 for count in self.classes.values())
        comprehensions = sum(self.nodes[kind] for kind in _COMPREHENSIONS)
        return {
            "fragments per 100 docstrings": 100 * fragments / max(len(self.docstrings), 1),
            "conditional expressions per 1,000 lines": self.nodes[ast.IfExp] / thousand_lines,
            "nested conditional expressions": float(self.nested_conditions),
            "tuple assignments per 1,000 lines": self.tuple_assignments / thousand_lines,
            "vague names per 1,000 names": 1000 * vague / max(sum(self.names.values()), 1),
            "class names that are not unique": float(repeated),
            "comprehensions per 1,000 lines": comprehensions / thousand_lines,
            "comment lines per 1,000 lines": self.comments / thousand_lines,
            "statements": float(self.statements),
            "lines": float(self.lines),
        }


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstring of a module, class or function, and those of its attributes."""
    if not isinstance(node, _SCOPES):
        return
    docstring = ast.get_docstring(node)
    if docstring:
        yield docstring
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for before, after in zip(node.body, node.body[1:], strict=False):
        if not isinstance(before, ast.AnnAssign | ast.Assign) or not isinstance(after, ast.Expr):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield after.value.value.strip()


def measure(folder: Path) -> dict[str, float]:
    """Return the measures of all Python files below a folder."""
    measures = Measures()
    for path in sorted(folder.rglob("*.py")):
        measures.read(path)
    return measures.values()


def main(arguments: list[str]) -> int:
    """Print the measures, and return 1 if a limit is exceeded."""
    code = 0
    for folder in map(Path, arguments or [str(PACKAGE)]):
        print(folder)
        for name, value in measure(folder).items():
            limit = LIMITS.get(name)
            is_exceeded = limit is not None and value > limit
            note = f"  above the limit of {limit:g}" if is_exceeded else ""
            print(f"  {name:42}{value:10,.1f}{note}")
            code = 1 if is_exceeded else code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
