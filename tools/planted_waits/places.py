"""Places in the package that order the work of a device, or let it overlap.

These are calls of `NAMES`, methods of these names that are passed on, and `non_blocking=True`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.planted.project import ROOT

PACKAGE = ROOT / "src" / "plait"
NAMES = (
    "wait",
    "wait_event",
    "wait_stream",
    "synchronize",
    "record",
    "record_event",
    "record_stream",
)
OF_THE_HOST = {
    "checkpoint/save.py:self.wait()": "a thread that writes",
    "engine/engine.py:self._writer.wait()": "a thread that writes",
    "cli/launching/": "processes",
    "cluster/staged_group.py:": "gloo, on copies in host memory",
    "validation/runner.py:": "processes",
    "comm/shared_memory/": "memory that processes of one machine share",
    "parallel/data/buffers.py:work.wait": "the CPU's branch: gloo",
    "comm/failures.py:": "a key of the store",
    "comm/watch.py:": "threads",
    "hf/accelerator.py:": "a setting of Accelerate's that is passed on",
    "comm/hang.py:": "a field: what a rank waits for",
}
"""What waits for no device: part of the path, `:` and the beginning of the code."""
ONLY_TIMED = {
    "parallel/data/compression.py": "a step's time ends when the device is done; only the choice "
    "of compression reads it",
    "validation/": "`plait doctor --validate` measures: a time begins and ends when the device is "
    "done, and nothing else reads what it did",
}
"""Places that only a measured time needs. The simulated device has no times."""


@dataclass(frozen=True)
class Wait:
    """One place."""

    file: str
    line: int
    code: str
    """The call, on one line."""
    start: int
    end: int
    replacement: str
    """Replaces the source between the offsets `start` and `end`."""
    number: int = 0
    """Counts equal places of a file."""

    @property
    def place(self) -> str:
        """Name without the line number, which changes often."""
        return f"{self.file}:{self.code}" + (f" ({self.number + 1})" if self.number else "")

    @property
    def only_timed(self) -> bool:
        """Whether it is one of ONLY_TIMED."""
        return self.reason in ONLY_TIMED.values()

    @property
    def reason(self) -> str:
        """Why it is left out, or empty if it waits for a device."""
        for known, reason in (OF_THE_HOST | ONLY_TIMED).items():
            path, _, code = known.partition(":")
            same_code = not code or self.code == code or self.code.startswith(f"{code}.")
            if path in self.file and same_code:
                return reason
        return ""


def waits() -> list[Wait]:
    """Return all places, in the order of files and lines."""
    places: list[Wait] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        counts: Counter[str] = Counter()
        for wait in sorted(_in_file(path), key=lambda wait: wait.start):
            places.append(replace(wait, number=counts[wait.code]))
            counts[wait.code] += 1
    return places


def without(wait: Wait) -> str:
    """Return the source of its file without the wait."""
    text = (PACKAGE / wait.file).read_text(encoding="utf-8")
    return text[: wait.start] + wait.replacement + text[wait.end :]


def recording(file: str, places: Sequence[Wait], call: str) -> str:
    """Return the source of a file that calls `call` with the name of each place it comes to."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    # An outer place opens before an inner one of the same start, and closes after one of the same
    # end.
    opened = [(wait.start, 1, -wait.end, f"({call}({wait.place!r}), ") for wait in places]
    closed = [(wait.end, 0, -wait.start, ")[1]") for wait in places]
    for offset, *_, piece in sorted([*opened, *closed], reverse=True):
        text = text[:offset] + piece + text[offset:]
    return text


def _in_file(path: Path) -> Iterator[Wait]:
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def place(node: ast.expr, replacement: str, label: str = "") -> Wait:
        # Offsets of the syntax tree are bytes. Such lines have ASCII letters only.
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        code = " ".join(text[start:end].split())
        file = path.relative_to(PACKAGE).as_posix()
        return Wait(file, node.lineno, label or code, start, end, replacement)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "non_blocking":
                    label = f"non_blocking in {place(node, '').code}"
                    yield place(keyword.value, "False", label)
        if not isinstance(node, ast.Attribute) or node.attr not in NAMES:
            continue
        if not isinstance(node.ctx, ast.Load):
            continue
        call = parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            if node.attr in ("wait", "synchronize"):  # others are fields of that name
                yield place(node, "(lambda: None)")
        elif isinstance(parents[call], ast.Expr):
            yield place(call, "None")
        elif node.attr == "record_event":
            # An event of a stream without work.
            yield place(call, "__import__('torch').cuda.Stream().record_event()")
        elif node.attr == "wait":
            # The one method of Plait that returns what arrived.
            yield place(call, f"{ast.unparse(node.value)}.tensors")
