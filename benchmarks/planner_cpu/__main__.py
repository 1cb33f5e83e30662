"""Calibrates the planner on some layouts of this machine and compares what it says of others with what they take.

    python -m benchmarks.planner_cpu            the figures of the docs: under eight minutes on a quiet machine with two cores
    python -m benchmarks.planner_cpu --quick    shows that it runs: a minute

Layouts take turns in rounds, in an order that rotates. A turn during which other programs took more than a twentieth of the machine is
repeated, and left out where it stays disturbed. The step of a layout is the median of its undisturbed turns' steps. Exit code 1 where a
layout has no undisturbed turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.load import ForeignMeter, wait_for_quiet
from benchmarks.common.report import facts, write
from benchmarks.common.workers import WorkerGroup
from benchmarks.planner_cpu import report
from benchmarks.planner_cpu.layouts import CASES, QUICK, Case
from benchmarks.planner_cpu.worker import start
from benchmarks.steps.rounds import order

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/planner_cpu.json"
PAGE = ROOT / "docs/explanation/planner_cpu.md"
_REPEATS = 2
_WAIT_SECONDS = 5.0


def main() -> None:
    arguments = command("planner_cpu", __doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument(
        "--steps", type=int, default=2, help="steps of a turn, after one that does not count"
    )
    arguments.add_argument(
        "--seconds", type=float, default=440, help="no round begins that would end later"
    )
    arguments.add_argument(
        "--foreign",
        type=float,
        default=0.05,
        help="share of the machine that others may take during a turn",
    )
    arguments.add_argument("--out", type=Path, default=RESULT)
    given = arguments.parse_args()
    cases = [case for case in CASES if not given.quick or case.name in QUICK]
    rounds, foreign = (1, 1.0) if given.quick else (given.rounds, given.foreign)
    with tempfile.TemporaryDirectory() as logs:
        turns = _measure(
            cases,
            rounds=rounds,
            steps=given.steps,
            foreign=foreign,
            budget_seconds=given.seconds,
            logs=Path(logs),
        )
    disturbed = [case.name for case in cases if not turns[case.name]["seconds"]]
    if disturbed:
        print(
            f"no undisturbed turn of: {'; '.join(disturbed)}. Run it again on a quiet machine",
            file=sys.stderr,
        )
        raise SystemExit(1)
    seconds = {name: median(found["seconds"]) for name, found in turns.items()}
    result = report.compare(cases, seconds) | {
        "machine": facts("torch", "transformers"),
        "steps": given.steps,
    }
    print(report.markdown(result))
    if not given.quick:
        write(given.out, result, digits=7)
        PAGE.write_text(report.markdown(result), encoding="utf-8")


def _measure(
    cases: list[Case], *, rounds: int, steps: int, foreign: float, budget_seconds: float, logs: Path
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        case.name: {"seconds": [], "foreign": [], "processor_seconds": []} for case in cases
    }
    by_name = {case.name: case for case in cases}
    environment = {"OMP_NUM_THREADS": "1"}
    worker_groups: dict[int, WorkerGroup] = {}
    try:
        for n in sorted({case.processes for case in cases}):
            worker_groups[n] = WorkerGroup(
                f"{n}-processes",
                ranks=n,
                start=start,
                argument=n,
                logs=logs,
                environment=environment,
            )
            worker_groups[n].ready(timeout_seconds=180)
        began, longest = time.perf_counter(), 0.0
        for index in range(rounds):
            round_began = time.perf_counter()
            if index and round_began - began + longest > budget_seconds:
                print(f"{index} rounds, the time is used up", file=sys.stderr)
                break
            for name in order(list(by_name), index=index):
                _turn(
                    worker_groups[by_name[name].processes],
                    by_name[name],
                    found[name],
                    steps=steps,
                    foreign=foreign,
                )
            longest = max(longest, time.perf_counter() - round_began)
            print(
                f"round {index + 1}: {time.perf_counter() - round_began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    finally:
        for worker_group in worker_groups.values():
            worker_group.stop()
    return found


def _turn(
    worker_group: WorkerGroup, case: Case, found: dict[str, Any], *, steps: int, foreign: float
) -> None:
    for _ in range(1 + _REPEATS):
        if foreign < 1:
            wait_for_quiet(share=foreign, longest_seconds=_WAIT_SECONDS, window_seconds=0.25)
        meter = ForeignMeter((*worker_group.pids, os.getpid()))
        meter.start()
        answers = worker_group.ask((case.layout, steps), timeout_seconds=300)
        found["foreign"].append(meter.stop())
        found["processor_seconds"].append(median(answers[0]["processor_seconds"]))
        if found["foreign"][-1] <= foreign:
            found["seconds"] += answers[0]["seconds"]  # all ranks say that of the slowest
            return


if __name__ == "__main__":
    main()
