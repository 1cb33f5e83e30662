"""Times `plait plan` for Llama-3.1-405B on 16,384 H100: the closed form of the whole space, the search of the five best with pipelines
simulated, which is what the command does, and that of the 25 best.

    python -m benchmarks.planner_speed          seconds on a quiet machine

Wall and processor seconds of one process with one thread; the median of a few rounds. Imports are left out, and told beside.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.report import facts

RESULT = Path(__file__).parents[2] / "benchmarks/results/planner_speed.json"
_ROUNDS = 3
_AIMS = {"closed form": 2.0, "five best": 2.0, "25 best": 30.0}
_CASES = ((2048, 8192), (16384, 8192), (128, 131072))
"""(samples a step, tokens a sample): 16 Mi and 128 Mi tokens a step, and 16 Mi of long sequences, cut over ranks."""


def main() -> None:
    began = time.process_time()
    from plait.planner.calibrate import uncalibrated
    from plait.planner.hardware import cluster
    from plait.planner.models import find_model
    from plait.planner.request import Request
    from plait.planner.search import plan, price_space
    from plait.planner.space import space_of

    imports = time.process_time() - began
    calibration = uncalibrated()
    rows = []
    for batch, sequence in _CASES:
        request = Request(find_model("llama-3-405b"), cluster("h100", 16384), batch, sequence)
        found = plan(request, best=25)  # also warms caches
        timed = {
            "closed form": _timed(
                lambda asked=request: price_space(asked, space_of(asked), calibration)
            ),
            "five best": _timed(lambda asked=request: plan(asked)),
            "25 best": _timed(lambda asked=request: plan(asked, best=25)),
        }
        for what, (wall, processor) in timed.items():
            aim = _AIMS[what]
            rows.append(
                {
                    "batch": batch,
                    "sequence": sequence,
                    "layouts": found.candidates,
                    "what": what,
                    "wall_seconds": wall,
                    "processor_seconds": processor,
                    "aim": aim,
                }
            )
            print(
                f"batch {batch} x {sequence}: {found.candidates:,} layouts, {what}: {wall:.2f} s, {processor:.2f} s of processor"
            )
    print(f"imports: {imports:.2f} s of processor")
    RESULT.write_text(
        json.dumps({"machine": facts("numpy"), "imports_seconds": imports, "rows": rows}, indent=1)
        + "\n",
        encoding="utf-8",
    )


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
