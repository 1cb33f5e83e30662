"""One run with a planted fault, and what is checked of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.faults.kinds import ALLOWED_SECONDS, EXIT_SECONDS, TIMEOUT_SECONDS, Kind

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
STEP = 3
LONGEST_SECONDS = 240.0


@dataclass
class Outcome:
    """What a run did."""

    kind: str
    rank: int
    ranks: int
    transport: str
    stage: int
    launcher: str
    told_seconds: float | None = None
    """From the fault to its first line."""
    ended_seconds: float | None = None
    """From that line to the end of the last process."""
    exit_code: int | None = None
    first_line: str = ""
    told: list[str] = field(default_factory=list)
    """All lines about it."""
    wrong: list[str] = field(default_factory=list)
    """What was not as promised; empty: passed."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if name != "told"}


def run(kind: Kind, *, rank: int, ranks: int, transport: str, stage: int = 2) -> Outcome:
    """A fault under `plait launch`."""
    outcome = Outcome(kind.name, rank, ranks, transport, stage, "plait launch")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        plan = {
            "kind": kind.name,
            "rank": rank,
            "step": STEP,
            "steps": 6,
            "timeout": TIMEOUT_SECONDS,
            "stage": stage,
        }
        lines, code, ended = _launched(
            plan | {"transport": transport, "log": str(log)}, ranks, stacks=Path(folder) / "logs"
        )
        notes = _notes(log)
    faults = [note for note in notes if note[0] == "fault"]
    if not faults:
        outcome.wrong.append(f"no fault happened; the run said {[text for _, text in lines][-5:]}")
        return outcome
    at = faults[0][4]
    after = [(when, text) for when, text in lines if when >= at and not text.startswith("[")]
    told = next(((when, text) for when, text in after if text.startswith("plait:")), None)
    outcome.exit_code = code
    if told is None:
        outcome.wrong.append("it told nothing")
        return outcome
    outcome.first_line, outcome.told = _portable(after[0][1]), [text for _, text in after]
    outcome.told_seconds, outcome.ended_seconds = told[0] - at, ended - told[0]
    limit = ALLOWED_SECONDS + (TIMEOUT_SECONDS if kind.hangs else 0)
    others = [other for other in range(ranks) if other != rank]
    filled = {
        "rank": str(rank),
        "step": str(STEP),
        "others": r"ranks? [\d, -]+" if len(others) > 1 else f"rank {others[0]}",
    }
    checks = {
        f"told after {outcome.told_seconds:.1f} s, allowed are {limit:g} s": outcome.told_seconds
        <= limit,
        f"ended {outcome.ended_seconds:.1f} s later, allowed are {EXIT_SECONDS:g} s": outcome.ended_seconds
        <= EXIT_SECONDS,
        f"exit code {code}, not {kind.exit_code}": code == kind.exit_code,
        "the first line is not its cause": re.match(_filled(kind.first_line, filled), after[0][1])
        is not None,
        f"no line has {kind.condition!r}": any(
            re.search(_filled(kind.condition, filled), text) for _, text in after
        ),
        f"alarmed {outcome.told_seconds:.1f} s after the fault, too early": not kind.hangs
        or outcome.told_seconds >= TIMEOUT_SECONDS,
    }
    outcome.wrong += [text for text, right in checks.items() if not right]
    left = [note[1] for note in notes if note[0] == "start" and _alive(note[1])]
    if left:
        outcome.wrong.append(f"processes left: {left}")
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, 9)
    return outcome


def run_slow(
    *, ranks: int, transport: str, seconds: float, stall: float = 4.0, seed: int = 0
) -> Outcome:
    """A healthy run whose ranks stall for less than the timeout."""
    outcome = Outcome("slow but healthy", -1, ranks, transport, 2, "plait launch")
    steps = max(2, round(2 * seconds / stall))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        plan = {
            "kind": "slow",
            "rank": -1,
            "step": -1,
            "steps": steps,
            "timeout": TIMEOUT_SECONDS,
            "stage": 2,
            "stall": stall,
            "seed": seed,
        }
        lines, outcome.exit_code, _ = _launched(
            plan | {"transport": transport, "log": str(log)}, ranks
        )
        ends = [note for note in _notes(log) if note[0] == "end"]
    alarms = [text for _, text in lines if text.startswith("plait:")]
    outcome.first_line = _portable(alarms[0]) if alarms else ""
    if alarms or outcome.exit_code or len(ends) != ranks:
        outcome.wrong.append(
            f"exit code {outcome.exit_code}, {len(ends)} ranks ended, told: {alarms[:2]}"
        )
    return outcome


def _portable(line: str) -> str:
    """Without the place of this checkout."""
    return line.replace(f"{ROOT}/", "")


def _launched(
    plan: dict[str, Any], ranks: int, *, stacks: Path | None = None
) -> tuple[list[tuple[float, str]], int, float]:
    """(lines of standard error with their times, exit code, when the launcher had ended)."""
    command = [sys.executable, "-m", "plait", "launch", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(stacks)] if stacks is not None else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(WORKER), json.dumps(plan)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    lines: list[tuple[float, str]] = []
    assert process.stderr is not None
    stream = process.stderr

    def follow() -> None:
        for text in stream:
            if text.strip():
                lines.append((time.monotonic(), text.rstrip()))

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        code = process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    ended = time.monotonic()
    reader.join(2)
    return lines, code, ended


def _filled(pattern: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        pattern = pattern.replace("{" + name + "}", value)
    return pattern


def _notes(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in (
            "Z",
            "X",
        )
    return False
