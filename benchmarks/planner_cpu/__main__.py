"""Calibrate the planner on some layouts on this machine, and compare its predictions of others.

    python -m benchmarks.planner_cpu [--quick]    under eight minutes on a quiet machine, two cores

Layouts take turns in rounds. A turn during which other programs used more than 5 % of the machine
is repeated, and left out if it is disturbed again. The time of a layout is the median of its steps.
Exit code 1 if a layout has no undisturbed turn.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common.command import command
from benchmarks.common.load import undisturbed
from benchmarks.common.report import RESULTS, ROOT, facts, say, with_sections, write
from benchmarks.common.workers import WorkerGroup
from benchmarks.planner_cpu import report
from benchmarks.planner_cpu.layouts import CASES, QUICK, Case, start
from benchmarks.steps.rounds import order

PAGE = ROOT / "docs/explanation/planner_cpu.md"
ROUNDS = 5
STEPS = 2
"""Steps of a turn, after one that is not counted."""
BUDGET_SECONDS = 440.0
"""Rounds that would end later do not begin."""
FOREIGN_SHARE = 0.05
REPEATS = 2
WAIT_SECONDS = 5.0


def main() -> int:
    quick = command("planner_cpu", __doc__).parse_args().quick
    cases = list(CASES)
    rounds = ROUNDS
    foreign_share = FOREIGN_SHARE
    if quick:
        cases = [case for case in CASES if case.name in QUICK]
        rounds = 1
        foreign_share = 1.0
    with tempfile.TemporaryDirectory() as logs:
        seconds = _measure(cases, rounds, foreign_share, logs)
    medians = {}
    disturbed = []
    for name, values in seconds.items():
        if values:
            medians[name] = median(values)
        else:
            disturbed.append(name)
    if disturbed:
        say(f"no undisturbed turn of: {'; '.join(disturbed)}. Run it again on a quiet machine")
        return 1
    facts_of_run = {"machine": facts("torch", "transformers"), "steps": STEPS}
    result = report.compare(cases, medians) | facts_of_run
    section = report.section(result)
    print(section)
    if not quick:
        write(RESULTS / "planner_cpu.json", result, digits=7)
        PAGE.write_text(with_sections(PAGE, {"results": section}), encoding="utf-8")
    return 0


def _measure(
    cases: list[Case], rounds: int, foreign_share: float, logs: str
) -> dict[str, list[float]]:
    """Return the seconds of the steps of all undisturbed turns, by the name of the layout."""
    seconds: dict[str, list[float]] = {}
    by_name = {}
    for case in cases:
        seconds[case.name] = []
        by_name[case.name] = case
    groups: dict[int, WorkerGroup] = {}
    try:
        for processes in sorted({case.processes for case in cases}):
            groups[processes] = WorkerGroup(
                f"{processes}-processes",
                ranks=processes,
                start=start,
                argument=processes,
                logs=Path(logs),
                environment={"OMP_NUM_THREADS": "1"},
            )
            groups[processes].ready(timeout_seconds=180)
        began = time.perf_counter()
        longest = 0.0
        for index in range(rounds):
            round_began = time.perf_counter()
            if index and round_began - began + longest > BUDGET_SECONDS:
                say(f"{index} rounds, the time is used up")
                break
            for name in order(list(by_name), index=index):
                case = by_name[name]
                for share, answers in undisturbed(
                    groups[case.processes],
                    (case.layout, STEPS),
                    share=foreign_share,
                    repeats=REPEATS,
                    wait_seconds=WAIT_SECONDS,
                    timeout_seconds=300,
                ):
                    if share <= foreign_share:
                        seconds[name] += answers[0]  # all ranks report those of the slowest
            longest = max(longest, time.perf_counter() - round_began)
            say(f"round {index + 1}: {time.perf_counter() - round_began:.0f} s")
    finally:
        for group in groups.values():
            group.stop()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
