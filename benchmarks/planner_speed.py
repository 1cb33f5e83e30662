"""Time of `plait plan` for Llama-3.1-405B on 16,384 H100.

    python -m benchmarks.planner_speed [--quick]

Three cases: the closed form of the whole space; the five best layouts with their pipelines
simulated, which is what the command does; and the 25 best. Times are the medians of a few rounds in
one process with one thread. Imports are measured separately.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.common.command import command
from benchmarks.common.report import store

ROUNDS = 3
AIMS = {"closed form": 2.0, "five best": 2.0, "25 best": 30.0}
BATCHES: Sequence[tuple[int, int]] = ((2048, 8192), (16384, 8192), (128, 131072))
"""Samples per step and tokens per sample."""


def main() -> None:
    quick = command("planner_speed", __doc__).parse_args().quick
    began = time.process_time()
    from plait.planner.calibrate import uncalibrated
    from plait.planner.hardware import cluster
    from plait.planner.models import find_model
    from plait.planner.request import Request
    from plait.planner.search import estimate_space, plan
    from plait.planner.space import space_of

    imports = time.process_time() - began
    calibration = uncalibrated()

    def closed_form(request: Request) -> object:
        return estimate_space(request, space_of(request), calibration)

    batches = BATCHES
    names = list(AIMS)
    best = 25
    rounds = ROUNDS
    if quick:
        batches = BATCHES[:1]
        names = names[:1]
        best = 5
        rounds = 1
    rows = []
    for batch, sequence in batches:
        request = Request(find_model("llama-3-405b"), cluster("h100", 16384), batch, sequence)
        layouts = plan(request, best=best).candidates  # also fills caches
        cases: dict[str, Callable[[], object]] = {
            "closed form": partial(closed_form, request),
            "five best": partial(plan, request),
            "25 best": partial(plan, request, best=25),
        }
        for name in names:
            wall, processor = _medians(cases[name], rounds)
            row = {"batch": batch, "sequence": sequence, "layouts": layouts, "what": name}
            times = {"wall_seconds": wall, "processor_seconds": processor, "aim": AIMS[name]}
            rows.append(row | times)
            print(
                f"batch {batch} x {sequence}: {layouts:,} layouts, {name}: {wall:.2f} s, "
                f"{processor:.2f} s of processor time"
            )
    print(f"imports: {imports:.2f} s of processor time")
    if not quick:
        store("planner_speed", {"imports_seconds": imports, "rows": rows}, "numpy")


def _medians(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        wall = time.perf_counter()
        processor = time.process_time()
        work()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    walls, processors = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(processors)


if __name__ == "__main__":
    main()
