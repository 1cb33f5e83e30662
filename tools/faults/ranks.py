"""A fault of one rank under `plait launch`, and healthy runs that must not be stopped."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from plait.comm import stacks
from tools.faults.forks import Notes, broken
from tools.mutants.project import ROOT, environment

Row = dict[str, Any]
TRANSPORTS = ("shared-memory", "torch")
STEP = 3
TIMEOUT_SECONDS = 5.0
REPORT_SECONDS = 3.0
"""Allowed from the fault, or from the end of the timeout, to its first line."""
EXIT_SECONDS = 10.0
"""Allowed from that line to the end of the last process."""
STALL_SECONDS = 4.0
LIMIT_SECONDS = 240.0


class Kind(NamedTuple):
    """A fault, and what must be reported. {rank}, {step} and {other} are filled in.

    Attributes:
        first_line: Pattern of the first line.
        exit_code: Exit code of the launcher.
        later_line: Pattern in some line.
        small: Rank and transport of the fault in the small size.
    """

    first_line: str
    exit_code: int
    later_line: str = ""
    small: tuple[int, str] | None = None


_RAISED = r"plait: rank {rank} \(node .*, process \d+\) failed with exit code 1. Its traceback:"
_STUCK = (
    r"plait: rank {rank} is stuck in step {step}, (forward|backward|between steps): rank {other} "
    r"(has|have) waited [5-8]\.\d s in [a-z-]+ over [a-z_ ]+( \(dp_shard\))? "
    r"\(number \d+, \[.*\] \w+\) at .*worker\.py:\d+(, after .* began)?; the timeout is 5 s"
)
_KILLED = r"plait: rank {rank} \(node .*\) was killed by signal "
_SLEEPS = r"rank {rank} .*at .*worker\.py:\d+ in happen; the stacks"
_STOPPED = r"rank {rank} .*its process is stopped.*stacks of its threads are in"
_LOCKED = r"rank {rank} .*holds the interpreter's lock; the stacks"
_EXITED = r"plait: rank {rank} .*ended with exit code "
_PLANTED = "ValueError: a planted exception"
KINDS = {
    "exception": Kind(_RAISED, 1, _PLANTED, (1, "torch")),
    "out of memory": Kind(_RAISED, 1, "MemoryError: a planted lack"),
    "disk full": Kind(_RAISED, 1, "No space left on device"),
    "bad batch": Kind(_RAISED, 1, "RuntimeError: mat1 and mat2"),
    "exit 0": Kind(f"{_EXITED}0 before the others", 5, small=(1, "shared-memory")),
    "exit 7": Kind(f"{_EXITED}7", 7),
    "segmentation fault": Kind(f"{_KILLED}11 SIGSEGV", 139, small=(0, "torch")),
    "abort": Kind(f"{_KILLED}6 SIGABRT", 134),
    "SIGKILL": Kind(f"{_KILLED}9 SIGKILL", 137, small=(0, "shared-memory")),
    "SIGSTOP": Kind(_STUCK, 5, _STOPPED, (1, "torch")),
    "sleep": Kind(_STUCK, 5, _SLEEPS, (1, "shared-memory")),
    "interpreter's lock": Kind(_STUCK, 5, _LOCKED, (0, "shared-memory")),
    "blocked read": Kind(_STUCK, 5, _SLEEPS),
    "failed and does not end": Kind(_RAISED, 1, _PLANTED),
}


def faults(size: str) -> Iterator[Row]:
    """Run each fault on each rank with each transport."""
    for name, kind in KINDS.items():
        if size == "small":
            if kind.small:
                yield fault(name, *kind.small)
            continue
        repeats = {"nightly": 1, "release": 5}[size]
        for _, transport, rank in product(range(repeats), TRANSPORTS, range(2)):
            yield fault(name, rank, transport)


def fault(name: str, rank: int, transport: str) -> Row:
    """Run two ranks, of which one has the fault in its loss."""
    kind = KINDS[name]
    row: Row = {"kind": name, "told_seconds": None, "ended_seconds": None, "exit_code": None}
    plan = {"kind": name, "rank": rank, "transport": transport, "steps": 6, "step": STEP}
    run = _Run(plan, 2)
    if "fault" not in run.notes:
        return row | {"wrong": [f"no fault happened; the run printed {run.lines[-5:]}"]}

    row["exit_code"] = run.exit_code
    began = run.notes["fault"][0][0]
    reported = None
    later = []
    for when, text in run.lines:
        if when >= began and not text.startswith("["):
            later.append(text)
            if reported is None and text.startswith("plait:"):
                reported = when
    if reported is None:
        return row | {"wrong": [f"rank {rank}, {transport}: nothing was reported"]}
    seconds = row["told_seconds"] = reported - began
    ended = row["ended_seconds"] = run.ended - reported
    # Only the timeout can find a rank that hangs.
    least = TIMEOUT_SECONDS * (kind.first_line == _STUCK)
    limit = least + REPORT_SECONDS

    def matches(pattern: str, text: str) -> bool:
        for field, value in {"rank": rank, "step": STEP, "other": 1 - rank}.items():
            pattern = pattern.replace("{" + field + "}", str(value))
        return re.search(pattern, text) is not None

    left = []
    for _, process in run.notes["start"]:
        if stacks.state(process) not in stacks.ENDED:
            left.append(process)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, 9)
    promises = {
        f"reported after {seconds:.1f} s, not {least:g} to {limit:g} s": least <= seconds <= limit,
        f"ended {ended:.1f} s later, allowed are {EXIT_SECONDS:g} s": ended <= EXIT_SECONDS,
        f"exit code {run.exit_code}, not {kind.exit_code}": run.exit_code == kind.exit_code,
        f"the first line is {later[0]!r}": matches("^" + kind.first_line, later[0]),
        f"no line has {kind.later_line!r}": any(matches(kind.later_line, text) for text in later),
        f"processes {left} are left": not left,
    }
    return row | {"wrong": [f"rank {rank}, {transport}: {text}" for text in broken(promises)]}


def healthy(size: str) -> Iterator[Row]:
    """Run twice as many ranks as cores, which stall for less than the timeout."""
    count, seconds = {"small": (1, 10.0), "nightly": (6, 60.0), "release": (100, 60.0)}[size]
    steps = max(2, round(2 * seconds / STALL_SECONDS))

    def run(seed: int) -> Row:
        plan = {"kind": "slow", "rank": -1, "step": -1, "steps": steps, "seed": seed}
        plan |= {"transport": TRANSPORTS[seed % 2], "stall": STALL_SECONDS}
        run = _Run(plan, 4)
        ended = len(run.notes["end"])
        alarms = [text for _, text in run.lines if text.startswith("plait:")]
        wrong = []
        if alarms or run.exit_code or ended != 4:
            text = f"exit code {run.exit_code}, {ended} ranks ended, reported: {alarms[:2]}"
            wrong.append(text)
        return {"kind": "slow but healthy", "wrong": wrong}

    with ThreadPoolExecutor(6) as pool:
        yield from pool.map(run, range(count))


class _Run:
    """A `plait launch` of the worker that has ended."""

    def __init__(self, plan: dict[str, Any], ranks: int) -> None:
        self.lines: list[tuple[float, str]] = []
        """Lines of standard error with the times at which they came."""
        self.notes: dict[str, list[list[Any]]] = defaultdict(list)
        """Times and values of events, by the name of the event."""
        with tempfile.TemporaryDirectory() as folder:
            notes = Notes(Path(folder, "notes"))
            plan = {**plan, "timeout": TIMEOUT_SECONDS, "notes": str(notes.path)}
            command = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", str(ranks)]
            command += ["--log-dir", f"{folder}/logs"]
            command += ["-m", "tools.faults.worker", json.dumps(plan)]
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
                cwd=ROOT,
            )
            reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
            reader.start()
            try:
                self.exit_code = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                self.exit_code = process.wait()
            self.ended = time.monotonic()
            reader.join(2)
            for event, *values in notes.read():
                self.notes[event].append(values)

    def _read(self, stream: Any) -> None:
        for text in stream:
            if text.strip():
                self.lines.append((time.monotonic(), text.rstrip()))
