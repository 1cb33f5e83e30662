"""Measures of style that keep `src/plait` readable, with the limits that the tests enforce.

    python -m tools.style                       the whole package
    python -m tools.style src/plait/sharded     one folder

A good number is no proof of good prose. A bad one is a reason to read the file again.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
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
_VAGUE = re.compile(
    r"_*(found|asked|given|kept|told|said|whole|own|here|held|made|wanted|taken|words|tell|apart"
    r"|beside|pieces?|ways?|ones?|rest)_*"
)
"""Names that say which part a value plays in a sentence, and not what it is."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstring of a module, class or function, and those of its attributes."""
    if not isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)):
        return
    docstring = ast.get_docstring(node)
    if docstring:
        yield docstring
    if isinstance(node, _FUNCTIONS):
        return
    for before, after in zip(node.body, node.body[1:], strict=False):
        if not isinstance(before, ast.AnnAssign | ast.Assign) or not isinstance(after, ast.Expr):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield after.value.value.strip()


def _is_nested(node: ast.IfExp) -> bool:
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def measure(folder: Path) -> dict[str, float]:
    """Return the measures of all Python files below a folder. Those of `LIMITS` come first."""
    counts = Counter[str]()
    class_names = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        counts["lines"] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            for docstring in _docstrings(node):
                counts["docstrings"] += 1
                counts["fragments"] += _FRAGMENT.match(docstring) is not None
            counts["comprehensions"] += isinstance(node, _COMPREHENSIONS)
            if isinstance(node, ast.IfExp):
                counts["conditions"] += 1
                counts["nested"] += _is_nested(node)
            elif isinstance(node, ast.Name):
                counts["names"] += 1
                counts["vague"] += _VAGUE.fullmatch(node.id) is not None
            elif isinstance(node, ast.ClassDef):
                class_names.append(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                counts["tuples"] += isinstance(node.value, ast.Tuple)

    repeated = sum(count > 1 for count in Counter(class_names).values())
    thousand_lines = max(counts["lines"], 1) / 1000
    return {
        "fragments per 100 docstrings": 100 * counts["fragments"] / max(counts["docstrings"], 1),
        "conditional expressions per 1,000 lines": counts["conditions"] / thousand_lines,
        "nested conditional expressions": float(counts["nested"]),
        "tuple assignments per 1,000 lines": counts["tuples"] / thousand_lines,
        "vague names per 1,000 names": 1000 * counts["vague"] / max(counts["names"], 1),
        "class names that are not unique": float(repeated),
        "comprehensions per 1,000 lines": counts["comprehensions"] / thousand_lines,
        "lines": float(counts["lines"]),
    }


def main(arguments: list[str]) -> int:
    code = 0
    for folder in map(Path, arguments or [str(PACKAGE)]):
        print(folder)
        for name, value in measure(folder).items():
            note = ""
            if value > LIMITS.get(name, value):
                note = f"  above the limit of {LIMITS[name]:g}"
                code = 1
            print(f"  {name:42}{value:10,.1f}{note}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
