"""The places of the package that order a device's work, or let it overlap: calls of `wait`, `wait_event`, `wait_stream`, `synchronize`,
`record`, `record_event`, `record_stream`, methods of these names that are passed on, and `non_blocking=True`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
"""Places (a part of the path, `:` and the beginning of the code) that wait for no device."""
ONLY_TIMED = {
    "parallel/data/compression.py": "a step's time ends when the device is done; only the choice of compression reads it",
    "validation/": "`plait doctor --validate` measures: a time begins and ends when the device is done, and nothing else reads what it did",
}
"""Places that only a measured time needs, which the simulated device has none of."""


@dataclass(frozen=True)
class Wait:
    """One place."""

    file: str
    line: int
    code: str
    """Of the call, on one line."""
    start: int
    end: int
    instead: str
    """The source between offsets `start` and `end` becomes this."""
    nth: int = 0
    """Of equal ones in a file."""

    @property
    def place(self) -> str:
        """Without the line, which moves."""
        return f"{self.file}:{self.code}" + (f" ({self.nth + 1})" if self.nth else "")

    @property
    def only_timed(self) -> bool:
        """Whether it is one of ONLY_TIMED."""
        return self.reason in ONLY_TIMED.values()

    @property
    def reason(self) -> str:
        """Why it is left out; empty for a device's."""
        for known, why in (OF_THE_HOST | ONLY_TIMED).items():
            path, _, code = known.partition(":")
            if path in self.file and (
                not code or self.code == code or self.code.startswith(f"{code}.")
            ):
                return why
        return ""


def waits() -> list[Wait]:
    """All places, in the order of files and lines."""
    found: list[Wait] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        counted: Counter[str] = Counter()
        for wait in sorted(_in_file(path), key=lambda wait: wait.start):
            found.append(replace(wait, nth=counted[wait.code]))
            counted[wait.code] += 1
    return found


def without(wait: Wait) -> str:
    """The source of its file that lacks it."""
    text = (PACKAGE / wait.file).read_text(encoding="utf-8")
    return text[: wait.start] + wait.instead + text[wait.end :]


def telling(file: str, places: Sequence[Wait], call: str) -> str:
    """The source of a file that calls `call` with the name of every place before it is evaluated."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    # An outer place opens before an inner one of the same start, and closes after one of the same end.
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

    def made(node: ast.expr | ast.stmt, instead: str) -> Wait:
        # Offsets of the syntax tree are bytes; sources with other letters in such a line would need more.
        start, end = (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )  # type: ignore[operator]
        return Wait(
            path.relative_to(PACKAGE).as_posix(),
            node.lineno,
            " ".join(text[start:end].split()),
            start,
            end,
            instead,
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "non_blocking":
                    yield replace(
                        made(keyword.value, "False"), code=f"non_blocking in {made(node, '').code}"
                    )
        if not (
            isinstance(node, ast.Attribute)
            and node.attr in NAMES
            and isinstance(node.ctx, ast.Load)
        ):
            continue
        call = parents[node]
        if not (isinstance(call, ast.Call) and call.func is node):
            if node.attr in (
                "wait",
                "synchronize",
            ):  # passed on as a function; a field of that name otherwise
                yield made(node, "(lambda: None)")
        elif isinstance(parents[call], ast.Expr):
            yield made(call, "None")
        elif node.attr == "record_event":  # an event of a stream that has no work
            yield made(call, "__import__('torch').cuda.Stream().record_event()")
        elif node.attr == "wait":
            yield made(
                call, f"{ast.unparse(node.value)}.tensors"
            )  # the one method of ours that returns what arrived
