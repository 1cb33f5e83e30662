"""Times `plait plan` for Llama-3.1-405B on 16,384 H100: the closed form of the whole space, and the search with the best 50 simulated.

    python -m benchmarks.planner_speed          seconds on a quiet machine

Wall and processor seconds of one process with one thread; the median of a few rounds. Imports are left out, and told beside.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.machine import facts

RESULT = Path(__file__).parents[2] / "benchmarks/results/planner_speed.json"
_ROUNDS = 3
_AIMS = {"closed form": 2.0, "with the best simulated": 30.0}


def main() -> None:
    began = time.process_time()
    from plait.planner.calibrate import uncalibrated
    from plait.planner.hardware import cluster
    from plait.planner.models import find_model
    from plait.planner.request import Request, space_of
    from plait.planner.search import plan, price_space

    imports = time.process_time() - began
    calibration = uncalibrated()
    rows = []
    for batch in (2048, 16384):  # samples of 8192 tokens: 16 Mi and 128 Mi tokens a step
        request = Request(find_model("llama-3-405b"), cluster("h100", 16384), batch, 8192)
        found = plan(request, best=25)  # also warms caches
        timed = {
            "closed form": _timed(lambda asked=request: price_space(asked, space_of(asked), calibration)),
            "with the best simulated": _timed(lambda asked=request: plan(asked, best=25)),
        }
        for what, (wall, processor) in timed.items():
            aim = _AIMS[what]
            rows.append(
                {
                    "batch": batch,
                    "layouts": found.candidates,
                    "what": what,
                    "wall_seconds": wall,
                    "processor_seconds": processor,
                    "aim": aim,
                }
            )
            print(f"batch {batch}: {found.candidates:,} layouts, {what}: {wall:.2f} s ({processor:.2f} s of processor), aim {aim:g} s")
    print(f"imports: {imports:.2f} s of processor")
    RESULT.write_text(json.dumps({"machine": facts("numpy"), "imports_seconds": imports, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Medians of (wall, processor) seconds."""
    walls, processors = [], []
    for _ in range(_ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return statistics.median(walls), statistics.median(processors)


if __name__ == "__main__":
    main()
