"""Plants faults in runs and in checkpoints, and checks what becomes of them: one scoreboard.

    python -m tools.faults [small | nightly | release] [--part NAME ...] [--only WORD] [--show] [--no-write]

ranks      a fault of one rank under `plait launch`: how soon it is told, in which words, with which exit code, and that nothing is left
slow       slow but healthy runs, which must not be stopped
restarts   `plait train`: ranks killed and started again, ended by signals, gone back from numbers that are not finite
saves      checkpoints killed at every call of a save to the file system and at random times
damage     files of a checkpoint flipped, cut, deleted, swapped; a file system that fails in a save
overhead   what the watchdog and the checks cost a step
others     what torch's distributed checkpoints and the Transformers Trainer do with some of these faults

`small` has all of them in some minutes on two cores, `nightly` the full matrix, and `release` repeats it. Writes
benchmarks/results/faults.json, a part at a time, and the table of docs/how-to/faults.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import write
from tools.faults import damage, forks, others, overhead, restarts, saves
from tools.faults.kinds import KINDS
from tools.faults.runs import ROOT, run, run_slow
from tools.faults.table import PAGE, with_table

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
TRANSPORTS = ("shared-memory", "torch")
SMALL = {
    "exception": (1, "torch"),
    "exit 0": (1, "shared-memory"),
    "segmentation fault": (0, "torch"),
    "SIGKILL": (0, "shared-memory"),
    "SIGSTOP": (1, "torch"),
    "interpreter's lock": (0, "shared-memory"),
    "sleep": (1, "shared-memory"),
}
STORED = {
    "ranks": ("kind", "told_seconds", "ended_seconds", "exit_code", "wrong"),
    "slow": ("kind", "wrong"),
}
"""Fields of the rows that are stored; all fields of the other parts."""
Row = dict[str, Any]
"""Of a part; `wrong` is empty where all was as promised."""


def ranks(size: str, only: str) -> Iterator[Row]:
    """A run for each fault; each rank and transport, but in the small size."""
    for kind in KINDS:
        if only not in kind.name:
            continue
        if size == "small":
            if kind.name in SMALL:
                rank, transport = SMALL[kind.name]
                yield run(kind, rank=rank, ranks=2, transport=transport).plain()
            continue
        for transport in TRANSPORTS:
            for rank in range(2):
                for _ in range(5 if size == "release" else 1):
                    yield run(kind, rank=rank, ranks=2, transport=transport).plain()


def slow(size: str, only: str) -> Iterator[Row]:
    """Twice as many ranks as cores, six runs side by side."""
    count, seconds = {"small": (1, 10.0), "nightly": (6, 60.0), "release": (100, 60.0)}[size]
    with ThreadPoolExecutor(6) as pool:
        for done in pool.map(
            lambda seed: run_slow(
                ranks=4, transport=TRANSPORTS[seed % 2], seconds=seconds, seed=seed
            ),
            range(count),
        ):
            yield done.plain()


def restarted(size: str, only: str) -> Iterator[Row]:
    """Every one against the same run that nothing happens to."""
    repeat, kills = {"small": (1, 2), "nightly": (2, 4), "release": (10, 10)}[size]
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        yield restarts.roll_back(at, rank_of_it=0).plain()
        yield restarts.roll_back(at, rank_of_it=1).plain()
        reference = restarts.undisturbed(at)
        for seed in range(repeat):
            yield restarts.killed(at, reference, kills=kills, seed=seed).plain()
        if size != "small":
            longer = restarts.undisturbed(at, steps=restarts.STANDBY_STEPS)
            yield restarts.killed(at, longer, kills=kills, seed=0, standby=True).plain()
        for number in signals[: 1 if size == "small" else 3]:
            yield restarts.signalled(at, reference, number).plain()
        yield restarts.signalled(at, reference, signal.SIGUSR1, one_rank=True, restarts=2).plain()


def killed_saves(size: str, only: str) -> Iterator[Row]:
    """All kills of a size in one row."""
    options: dict[str, Any] = {
        "small": {"at_calls": 1, "most": 14, "random_kills": 4, "steps": 8},
        "nightly": {"at_calls": 3, "random_kills": 80, "steps": 12},
        "release": {"at_calls": 14, "random_kills": 400, "steps": 12},
    }[size]
    with tempfile.TemporaryDirectory() as folder:
        yield saves.kill_saves(Path(folder), **options).plain()


def damaged(size: str, only: str) -> Iterator[Row]:
    """A row for each kind."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        yield from forks.alone(
            damage.damages,
            at / "files",
            {"small": 500, "nightly": 3000, "release": 10_000}[size],
            folder=at,
        )
        yield from forks.alone(damage.failing_saves, at / "saves", folder=at)


def cost(size: str, only: str) -> Iterator[Row]:
    """One row."""
    found = overhead.measure({"small": 20, "nightly": 100, "release": 300}[size]).plain()
    yield found | {
        "wrong": []
        if found["wall"] <= 1.01 or found["cpu"] <= 1.01 or size == "small"
        else ["more than 1 %"]
    }


def scored(size: str, only: str) -> Iterator[Row]:
    """A row for each library."""
    with tempfile.TemporaryDirectory() as folder:
        yield from others.rows(Path(folder), {"small": 4, "nightly": 12, "release": 200}[size])


PARTS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    "damage": damaged,
    "saves": killed_saves,
    "restarts": restarted,
    "ranks": ranks,
    "slow": slow,
    "overhead": cost,
    "others": scored,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="?", choices=("small", "nightly", "release"), default="small")
    parser.add_argument(
        "--part", action="append", choices=tuple(PARTS), metavar="NAME", help="Only these parts."
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="Of the faults of ranks only those with this word in their name.",
    )
    parser.add_argument("--show", action="store_true", help="Print every row in full.")
    parser.add_argument(
        "--no-write", action="store_true", help="Leave the result and the page as they are."
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="Only write the page's table from the result that is there.",
    )
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if options.table:
        PAGE.write_text(with_table(PAGE.read_text(), known))
        return 0
    forks.load()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and so would what is started here
    failed = 0
    for name in options.part or PARTS:
        began, found = time.monotonic(), _others_of(known.get(name), options.only)
        for row in PARTS[name](options.size, options.only):
            found.append(row)
            failed += bool(row["wrong"])
            print(f"{name}: {_line(row) if not options.show else json.dumps(row)}", flush=True)
        print(
            f"{name}: {sum(not row['wrong'] for row in found)} of {len(found)} passed, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        known[name] = {
            "size": options.size,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "seconds": round(time.monotonic() - began),
            "rows": found,
        }
        if not options.no_write:
            write(RESULT, {part: recorded(part, content) for part, content in known.items()})
            PAGE.write_text(with_table(PAGE.read_text(), known))
    return 1 if failed else 0


def recorded(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a part. Of its many similar runs that is only what the page reads."""
    fields = STORED.get(name)
    if fields is None:
        return part
    return {**part, "rows": [{field: row[field] for field in fields} for row in part["rows"]]}


def _others_of(part: dict[str, Any] | None, only: str) -> list[Row]:
    """What is known of the faults that are not run again."""
    return (
        [row for row in part["rows"] if only not in row.get("kind", "")]
        if part is not None and only
        else []
    )


def _line(row: Row) -> str:
    shown = {
        name: value
        for name, value in row.items()
        if value not in (None, "", [], {}) and name not in ("wrong", "names", "first_line")
    }
    text = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown.items()
    )
    return text + (
        "; passed" if not row["wrong"] else "; WRONG: " + "\n    ".join(map(str, row["wrong"]))
    )


if __name__ == "__main__":
    sys.exit(main())
