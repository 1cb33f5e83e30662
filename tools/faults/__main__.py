"""Plant faults in runs and in checkpoints, and check the outcome.

    python -m tools.faults [small | nightly | release] [--part NAME ...] [--no-write]

    damage     files of a checkpoint are damaged; the file system fails in a save
    saves      checkpoints are killed at every call of a save, and at random times
    restarts   `plait train`: ranks are killed and restart, end by signals, roll back from NaN
    ranks      a fault of one rank under `plait launch`
    slow       slow but healthy runs, which must not be stopped
    overhead   cost of the watchdog and of the checks of every step

`small` takes some minutes on two cores, `nightly` has the full matrix, and `release` repeats it.
The command writes benchmarks/results/faults.json and docs/development/faults.md.
"""

import argparse
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import read, rounded, write
from tools.faults import damage, forks, overhead, ranks, report, restarts, saves

PARTS = ("damage", "saves", "restarts", "ranks", "slow", "overhead")
KILLS: dict[str, dict[str, Any]] = {
    "small": {"per_call": 1, "most": 14, "random_kills": 4, "steps": 8},
    "nightly": {"per_call": 3, "random_kills": 80, "steps": 12},
    "release": {"per_call": 14, "random_kills": 400, "steps": 12},
}
DAMAGES = {"small": 500, "nightly": 3000, "release": 10_000}
ROUNDS = {"small": 20, "nightly": 100, "release": 300}
Row = dict[str, Any]
"""Outcome of some runs. `wrong` is empty if all was as promised."""


def run(part: str, size: str, folder: Path) -> Iterator[Row]:
    if part == "damage":
        files = (damage.damaged_files, folder / "files", DAMAGES[size])
        yield from forks.in_process(*files, folder=folder)
        yield from forks.in_process(damage.failing_saves, folder / "saves", folder=folder)
    elif part == "saves":
        yield saves.kill_saves(folder, **KILLS[size])
    elif part == "restarts":
        yield from restarts.all_restarts(size, folder)
    elif part == "ranks":
        yield from ranks.faults(size)
    elif part == "slow":
        yield from ranks.healthy(size)
    else:
        row = overhead.measure(ROUNDS[size])
        row["wrong"] = []
        # 20 rounds are too few to resolve 1 %.
        if min(row["wall"], row["cpu"]) > 1.01 and size != "small":
            row["wrong"].append("more than 1 %")
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", nargs="?", choices=tuple(KILLS), default="small")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these parts")
    parser.add_argument("--no-write", action="store_true", help="leave result and page as they are")
    options = parser.parse_args()

    parts: dict[str, Any] = read(report.RESULTS, {})
    forks.load()
    # The background jobs of a shell ignore SIGINT, and their children would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = False
    for name in options.part or PARTS:
        began = time.monotonic()
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for row in run(name, options.size, Path(folder)):
                rows.append(row)
                print(f"{name}: {_line(row)}", flush=True)
        passed = report.passed(rows)
        failed |= passed < len(rows)
        seconds = round(time.monotonic() - began)
        print(f"{name}: {passed} of {len(rows)} passed, {seconds} s", flush=True)
        part = {"size": options.size, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        part |= {"torch": torch.__version__, "machine": platform.machine()}
        parts[name] = {**part, "seconds": seconds, "rows": rows}
        if not options.no_write:
            write(report.RESULTS, parts)
            report.PAGE.write_text(report.page(parts), encoding="utf-8")
    return int(failed)


def _line(row: Row) -> str:
    cells = []
    for name, value in row.items():
        if value not in (None, "", [], {}) and name not in ("wrong", "names"):
            cells.append(f"{name} {rounded(value, 3)}")
    outcome = "passed"
    if row["wrong"]:
        outcome = "WRONG: " + "\n    ".join(row["wrong"])
    return f"{', '.join(cells)}; {outcome}"


if __name__ == "__main__":
    sys.exit(main())
