"""Takes every wait for a device out of the package, one at a time, and reports which test of `tests/simulated_device` notices.

    python -m tools.planted_waits                  all of them; writes docs/waits.md and docs/waits.json (15 minutes on two cores)
    python -m tools.planted_waits --only buffers   those whose place contains this
    python -m tools.planted_waits --list           what would be taken out, and what is left out for what reason

The places are listed from the syntax tree: calls of `wait`, `wait_event`, `wait_stream`, `synchronize`, `record`, `record_event`,
`record_stream`, methods of these names that are passed on, and `non_blocking=True`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "plait"
PAGE, NUMBERS = ROOT / "docs" / "waits.md", ROOT / "docs" / "waits.json"
TESTS = "tests/simulated_device/test_waits.py"
NAMES = ("wait", "wait_event", "wait_stream", "synchronize", "record", "record_event", "record_stream")
NOTICED = re.compile(r"^FAILED (\S+)", re.MULTILINE)

OF_THE_HOST = {
    "checkpoint/writer.py:self.wait()": "a thread that writes",
    "cli/launching/": "processes",
    "comm/host": "memory that processes of one machine share",
    "comm/buckets.py:self._host": "memory that processes of one machine share",
    "parallel/buffers.py:work.wait": "the CPU's branch: gloo",
}
"""Places (a part of the path, `:` and the beginning of the code) that wait for no device."""

TESTS_OF = {
    "activation_store": "stores",
    "algorithms": "composed",
    "device_rates": "composed_and_measured",
    "measure": "composed_and_measured",
    "single_rank": "composed_and_measured",
    "buckets": "reductions or composed",
    "buffers": "test_buffers",
    "compress": "compressed",
    "clock": "seconds",
    "messages": "messages",
    "micro_batches": "batches",
    "overlap": "overlapped",
    "pending": "pending",
    "runtime": "messages",
    "weight_check": "weights_of_a_loss",
}
"""File to the tests that reach it, as pytest's -k; all of them for others."""

_AT_ONCE = "only a time follows from it: kernels of the simulated device are done when they are called"
STILL_ORDERED = {
    "engine/device_rates.py:torch.cuda.synchronize(device)": _AT_ONCE,
    "engine/single_rank.py:torch.cuda.synchronize(self._at)": _AT_ONCE,
    "engine/single_rank.py:torch.cuda.synchronize(self._at) (2)": _AT_ONCE,
    "train/clock.py:ended.synchronize()": "`taken.stop.item()` in `train/loop.py`, which is read before and is later on the same stream",
}
"""Place to the edge that orders what a wait that nobody misses ordered."""


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
    def reason(self) -> str:
        """Why it is left out; empty for a device's."""
        for known, why in OF_THE_HOST.items():
            path, _, code = known.partition(":")
            if path in self.file and (not code or self.code == code or self.code.startswith(f"{code}.")):
                return why
        return ""


@dataclass(frozen=True)
class Found:
    """What became of one place."""

    place: str
    line: int
    noticed: str
    """The first test that failed."""
    told: str


def waits() -> list[Wait]:
    """All places, in the order of files and lines."""
    found: list[Wait] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        counted: Counter[str] = Counter()
        for wait in sorted(_in_file(path), key=lambda wait: wait.start):
            found.append(replace(wait, nth=counted[wait.code]))
            counted[wait.code] += 1
    return found


def _in_file(path: Path) -> Iterator[Wait]:
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def made(node: ast.expr | ast.stmt, instead: str) -> Wait:
        # Offsets of the syntax tree are bytes; sources with other letters in such a line would need more.
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        return Wait(path.relative_to(PACKAGE).as_posix(), node.lineno, " ".join(text[start:end].split()), start, end, instead)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "non_blocking":
                    yield replace(made(keyword.value, "False"), code=f"non_blocking in {made(node, '').code}")
        if not (isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.ctx, ast.Load)):
            continue
        call = parents[node]
        if not (isinstance(call, ast.Call) and call.func is node):
            if node.attr in ("wait", "synchronize"):  # passed on as a function; a field of that name otherwise
                yield made(node, "(lambda: None)")
        elif isinstance(parents[call], ast.Expr):
            yield made(call, "None")
        elif node.attr == "record_event":  # an event of a stream that has no work
            yield made(call, "__import__('torch').cuda.Stream().record_event()")
        elif node.attr == "wait":
            yield made(call, f"{ast.unparse(node.value)}.tensors")  # the one method of ours that returns what arrived


def without(wait: Wait) -> Found:
    """Run the tests on a copy of the package that lacks it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder, "plait"), ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder, "plait", wait.file)
        text = target.read_text(encoding="utf-8")
        target.write_text(text[: wait.start] + wait.instead + text[wait.end :], encoding="utf-8")
        which = next((["-k", tests] for name, tests in TESTS_OF.items() if Path(wait.file).stem == name), [])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", TESTS, *which]
        environment = {**os.environ, "PYTHONPATH": folder, "SIMULATED_DEVICE_TIMEOUT": "20"}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise SystemExit(f"{wait.place}: pytest ended with {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-2000:]}")
    noticed = NOTICED.search(ran.stdout)
    errors = [line[1:].strip() for line in ran.stdout.splitlines() if line.startswith("E  ")]
    told = next((line for line in errors if " x rank " in line or "assert" in line or "Error" in line), errors[0] if errors else "")
    return Found(wait.place, wait.line, noticed[1].removeprefix(TESTS + "::") if noticed else "", told[:160])


def page(results: dict[str, Found]) -> str:
    """docs/waits.md."""
    places = waits()
    device = [wait for wait in places if not wait.reason]
    known = [wait for wait in device if wait.place in results]
    noticed = sum(bool(results[wait.place].noticed) for wait in known)
    lines = [
        "# Waits for a device",
        "",
        "Written by `python -m tools.planted_waits`; do not edit. Every call in the package that orders a device's work, or lets it",
        "overlap, listed from the syntax tree. Each was taken out alone, and `tests/simulated_device/test_waits.py` was run.",
        "",
        f"**{noticed} of {len(device)} are noticed.** Not run yet: {len(device) - len(known)}.",
        "",
        "| place | what is taken out | noticed by | or still ordered by |",
        "|---|---|---|---|",
    ]
    for wait in device:
        found = results.get(wait.place)
        by = f"`{found.noticed}`" if found and found.noticed else "not run" if found is None else "nothing"
        still = "" if found is None or found.noticed else STILL_ORDERED.get(wait.place, "not looked into yet")
        lines.append(f"| `{wait.file}` | `{wait.code}` | {by} | {still} |")
    lines += ["", "Waits that are not for a device:", "", "| place | what it is | waits for |", "|---|---|---|"]
    lines += [f"| `{wait.file}` | `{wait.code}` | {wait.reason} |" for wait in places if wait.reason]
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the place")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    results = {entry["place"]: Found(**entry) for entry in json.loads(NUMBERS.read_text())} if NUMBERS.exists() else {}
    for wait in waits():
        if given.only not in wait.place:
            continue
        if given.list or wait.reason:
            print(f"{wait.file}:{wait.line}: {wait.code}" + (f"   (left out: {wait.reason})" if wait.reason else ""))
            continue
        results[wait.place] = without(wait)
        print(
            f"{wait.file}:{wait.line}: {wait.code}: {results[wait.place].noticed or 'NOT NOTICED'}   {results[wait.place].told}", flush=True
        )
        here = {wait.place for wait in waits()}
        NUMBERS.write_text(json.dumps([asdict(found) for place, found in sorted(results.items()) if place in here], indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
