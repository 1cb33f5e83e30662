"""A fault of one rank under `plait launch`, and healthy runs that must not be stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.forks import Notes
from tools.mutants.project import ROOT, environment

Row = dict[str, Any]
WORKER = Path(__file__).with_name("worker.py")
TRANSPORTS = ("shared-memory", "torch")
STEP = 3
TIMEOUT_SECONDS = 5.0
REPORT_SECONDS = 3.0
"""Allowed from the fault, or from the end of the timeout, to its first line."""
EXIT_SECONDS = 10.0
"""Allowed from that line to the end of the last process."""
STALL_SECONDS = 4.0
LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Kind:
    """A fault, and what must be reported. {rank}, {step} and {other} are filled in."""

    name: str
    first_line: str
    """Pattern of the first line."""
    exit_code: int
    hangs: bool = False
    """Whether only the timeout can find it."""
    later_line: str = ""
    """Pattern in some line."""


_RAISED = r"plait: rank {rank} \(node .*, process \d+\) failed with exit code 1. Its traceback:"
_STUCK = (
    r"plait: rank {rank} is stuck in step {step}, (forward|backward|between steps): rank {other} "
    r"(has|have) waited [5-8]\.\d s in [a-z-]+ over [a-z_ ]+( \(dp_shard\))? "
    r"\(number \d+, \[.*\] \w+\) at .*worker\.py:\d+(, after .* began)?; the timeout is 5 s"
)
_KILLED = r"plait: rank {rank} \(node .*\) was killed by signal "
_SLEEPS = r"rank {rank} .*at .*worker\.py:\d+ in happen; the stacks"
_EXITED = r"plait: rank {rank} .*ended with exit code "
KINDS = (
    Kind("exception", _RAISED, 1, later_line="ValueError: a planted exception"),
    Kind("out of memory", _RAISED, 1, later_line="MemoryError: a planted lack"),
    Kind("disk full", _RAISED, 1, later_line="No space left on device"),
    Kind("bad batch", _RAISED, 1, later_line="RuntimeError: mat1 and mat2"),
    Kind("exit 0", f"{_EXITED}0 before the others", 5),
    Kind("exit 7", f"{_EXITED}7", 7),
    Kind("segmentation fault", f"{_KILLED}11 SIGSEGV", 139),
    Kind("abort", f"{_KILLED}6 SIGABRT", 134),
    Kind("SIGKILL", f"{_KILLED}9 SIGKILL", 137),
    Kind(
        "SIGSTOP",
        _STUCK,
        5,
        hangs=True,
        later_line=r"rank {rank} .*its process is stopped.*stacks of its threads are in",
    ),
    Kind("sleep", _STUCK, 5, hangs=True, later_line=_SLEEPS),
    Kind(
        "interpreter's lock",
        _STUCK,
        5,
        hangs=True,
        later_line=r"rank {rank} .*holds the interpreter's lock; the stacks",
    ),
    Kind("blocked read", _STUCK, 5, hangs=True, later_line=_SLEEPS),
    Kind("failed and does not end", _RAISED, 1, later_line="ValueError: a planted exception"),
)
SMALL = {
    "exception": (1, "torch"),
    "exit 0": (1, "shared-memory"),
    "segmentation fault": (0, "torch"),
    "SIGKILL": (0, "shared-memory"),
    "SIGSTOP": (1, "torch"),
    "interpreter's lock": (0, "shared-memory"),
    "sleep": (1, "shared-memory"),
}
"""Rank and transport of the faults of the small size."""


def faults(size: str, only: str = "") -> Iterator[Row]:
    """Run the faults whose name contains `only`, on each rank with each transport."""
    for kind in KINDS:
        if only not in kind.name:
            continue
        if size == "small":
            if kind.name in SMALL:
                yield fault(kind, *SMALL[kind.name])
            continue
        for transport in TRANSPORTS:
            for rank in range(2):
                for _ in range(5 if size == "release" else 1):
                    yield fault(kind, rank, transport)


def fault(kind: Kind, rank: int, transport: str) -> Row:
    """Run two ranks, of which one has the fault in its loss."""
    row: Row = {"kind": kind.name, "rank": rank, "transport": transport, "wrong": []}
    row |= {"told_seconds": None, "ended_seconds": None, "exit_code": None}
    plan = {"kind": kind.name, "rank": rank, "transport": transport, "steps": 6, "step": STEP}
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(plan, 2, Path(folder))
    faults = [note for note in run.notes if note[0] == "fault"]
    if not faults:
        row["wrong"].append(f"no fault happened; the run printed {run.lines[-5:]}")
        return row

    began = faults[0][1]
    later = [one for one in run.lines if one[0] >= began and not one[1].startswith("[")]
    reports = [when for when, text in later if text.startswith("plait:")]
    row["exit_code"] = run.exit_code
    if not reports:
        row["wrong"].append("nothing was reported")
        return row
    first_line = later[0][1]
    told = row["told_seconds"] = reports[0] - began
    ended = row["ended_seconds"] = run.ended - reports[0]
    limit = REPORT_SECONDS + (TIMEOUT_SECONDS if kind.hangs else 0)

    def matches(pattern: str, text: str) -> bool:
        for name, value in {"rank": rank, "step": STEP, "other": 1 - rank}.items():
            pattern = pattern.replace("{" + name + "}", str(value))
        return re.search(pattern, text) is not None

    promises = {
        f"reported after {told:.1f} s, allowed are {limit:g} s": told <= limit,
        f"ended {ended:.1f} s later, allowed are {EXIT_SECONDS:g} s": ended <= EXIT_SECONDS,
        f"exit code {run.exit_code}, not {kind.exit_code}": run.exit_code == kind.exit_code,
        f"the first line is {first_line!r}": matches("^" + kind.first_line, first_line),
        f"no line has {kind.later_line!r}": any(
            matches(kind.later_line, text) for _, text in later
        ),
        f"reported {told:.1f} s after the fault, too early": not kind.hangs
        or told >= TIMEOUT_SECONDS,
    }
    row["wrong"] += [text for text, holds in promises.items() if not holds]
    left = [note[2] for note in run.notes if note[0] == "start" and _is_alive(note[2])]
    if left:
        row["wrong"].append(f"processes left: {left}")
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, 9)
    return row


def healthy(size: str) -> Iterator[Row]:
    """Run twice as many ranks as cores, which stall for less than the timeout."""
    count, seconds = {"small": (1, 10.0), "nightly": (6, 60.0), "release": (100, 60.0)}[size]
    steps = max(2, round(2 * seconds / STALL_SECONDS))

    def run(seed: int) -> Row:
        plan = {"kind": "slow", "rank": -1, "step": -1, "steps": steps, "seed": seed}
        plan |= {"transport": TRANSPORTS[seed % 2], "stall": STALL_SECONDS}
        with tempfile.TemporaryDirectory() as folder:
            found = _Run(plan, 4, Path(folder))
        ended = sum(note[0] == "end" for note in found.notes)
        alarms = [text for _, text in found.lines if text.startswith("plait:")]
        wrong = []
        if alarms or found.exit_code or ended != 4:
            code = found.exit_code
            wrong = [f"exit code {code}, {ended} ranks ended, reported: {alarms[:2]}"]
        return {"kind": "slow but healthy", "wrong": wrong}

    with ThreadPoolExecutor(6) as pool:
        yield from pool.map(run, range(count))


class _Run:
    """A `plait launch` of the worker that has ended."""

    def __init__(self, plan: dict[str, Any], ranks: int, folder: Path) -> None:
        notes = Notes(folder / "notes")
        plan = {**plan, "timeout": TIMEOUT_SECONDS, "notes": str(notes.path)}
        command = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", str(ranks)]
        command += ["--log-dir", str(folder / "logs"), str(WORKER), json.dumps(plan)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self.lines: list[tuple[float, str]] = []
        """Lines of standard error with the times at which they came."""
        reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            self.exit_code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            self.exit_code = process.wait()
        self.ended = time.monotonic()
        reader.join(2)
        self.notes = notes.read()

    def _read(self, stream: Any) -> None:
        for text in stream:
            if text.strip():
                self.lines.append((time.monotonic(), text.rstrip()))


def _is_alive(process: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False
