"""Defects that are found in the sources: each is a call that orders the work of a device, or lets
it overlap, and is taken out.

These are calls of `NAMES`, methods of these names that are passed on, and `non_blocking=True`.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tools.mutants.catalogue import Mutant
from tools.mutants.project import ROOT

PACKAGE = ROOT / "src" / "plait"
NAMES = (
    *("wait", "wait_event", "wait_stream", "synchronize"),
    *("record", "record_event", "record_stream"),
)
TESTS = tuple(
    f"tests/simulated_device/test_{name}.py"
    for name in ("waits", "ahead", "generation", "context", "cover")
)
"""Tests on the simulated device that need the waits."""
LEFT_OUT = {
    "checkpoint/save.py:self.wait()": "a thread that writes",
    "engine/engine.py:self._writer.wait()": "a thread that writes",
    "cli/launching/": "processes",
    "cluster/staged_group.py:": "gloo, on copies in host memory",
    "validation/": "processes, and times of `plait doctor --validate`",
    "comm/shared_memory/": "memory that processes of one machine share",
    "parallel/data/buffers.py:work.wait": "the CPU's branch: gloo",
    "parallel/data/compression.py": "a time by which compression is selected",
    "comm/failures.py:": "a key of the store",
    "comm/watch.py:": "threads",
    "hf/accelerator.py:": "a setting of Accelerate that is passed on",
    "comm/hang.py:": "a field: what a rank waits for",
}
"""Code that orders no work of a device, or that only a measured time needs: part of a path, `:`,
and the beginning of the code. The value is the reason."""


def waits() -> list[Mutant]:
    mutants: list[Mutant] = []
    numbers = Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        file = path.relative_to(PACKAGE).as_posix()
        for start, end, replacement, label in sorted(_in_text(text)):
            code = " ".join(text[start:end].split())
            if _is_left_out(file, code):
                continue
            old_start, old_end = _unique_lines(text, start, end)
            old = text[old_start:old_end]
            new = text[old_start:start] + replacement + text[end:old_end]
            place = f"{file.removesuffix('.py')} {label or code}"
            name = "-".join(re.findall(r"\w+", place))[:80].strip("-_")
            numbers[name] += 1
            what = f"`{label or code}` is taken out"
            source = path.relative_to(ROOT).as_posix()
            mutants.append(Mutant(f"{name}-{numbers[name]}", what, source, old, new, "waits"))
    return mutants


def _is_left_out(file: str, code: str) -> bool:
    for known in LEFT_OUT:
        path, _, beginning = known.partition(":")
        same_code = not beginning or code == beginning or code.startswith(f"{beginning}.")
        if path in file and same_code:
            return True
    return False


def _unique_lines(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the offsets of the fewest whole lines around a place that occur once in the text."""
    while True:
        start = text.rfind("\n", 0, max(start - 1, 0)) + 1
        end = text.find("\n", end)
        if text.count(text[start:end]) == 1:
            return start, end
        end += 1


def _in_text(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield offsets, what replaces the source between them, and a label instead of that source."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def span(node: ast.expr) -> tuple[int, int]:
        # Offsets of the syntax tree are bytes. Such lines have ASCII letters only.
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            start, end = span(node)
            label = f"non_blocking in {' '.join(text[start:end].split())}"
            for keyword in node.keywords:
                if keyword.arg == "non_blocking":
                    yield *span(keyword.value), "False", label
        if not isinstance(node, ast.Attribute) or node.attr not in NAMES:
            continue
        if not isinstance(node.ctx, ast.Load):
            continue
        call = parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            if node.attr in ("wait", "synchronize"):  # others are fields of that name
                yield *span(node), "(lambda: None)", ""
        elif isinstance(parents[call], ast.Expr):
            yield *span(call), "None", ""
        elif node.attr == "record_event":
            # An event of a stream without work.
            yield *span(call), "__import__('torch').cuda.Stream().record_event()", ""
        elif node.attr == "wait":
            # The one method of Plait that returns what arrived.
            yield *span(call), f"{ast.unparse(node.value)}.tensors", ""
