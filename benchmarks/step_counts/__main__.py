"""Counts a training step of ten layouts, of Plait and of plain torch, on a simulated CUDA device.

    python -m benchmarks.step_counts                  about four minutes on two cores; needs g++
    python -m benchmarks.step_counts --layouts tp pp  only these, with the differences operator by operator
    python -m benchmarks.step_counts --as before      records the counts of the code on PYTHONPATH under that name

It writes `benchmarks/results/step_counts.json` and, from it, `docs/development/step_counts.md`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.report import aligned, facts
from benchmarks.step_counts import worker
from benchmarks.step_counts.counting import StepCounts
from benchmarks.step_counts.layouts import LAYOUTS, Layout
from benchmarks.step_counts.report import COUNTS, page
from tests.simulated_device.pool import SimulatedPool

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/step_counts.json"
PAGE = ROOT / "docs/development/step_counts.md"


def main() -> None:
    parser = command("step_counts", __doc__)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, help="only these, with the differences"
    )
    parser.add_argument(
        "--as",
        dest="name",
        default="after",
        choices=("before", "after"),
        help="where it is recorded",
    )
    arguments = parser.parse_args()

    names = ["zero-0"] if arguments.quick else arguments.layouts or list(LAYOUTS)
    # Workers of one number of ranks at a time.
    names.sort(key=lambda name: LAYOUTS[name].ranks)
    pool = SimulatedPool()
    try:
        for name in names:
            row = counted(pool, LAYOUTS[name], shows=bool(arguments.layouts))
            if not arguments.quick:
                write(arguments.name, name, row)
    finally:
        pool.close()


def write(side: str, name: str, row: dict[str, Any]) -> None:
    """Put one layout's row into the result file. A complete file makes a new page."""
    record = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    earlier = record.get(side, {"layouts": {}})["layouts"] | {name: row}
    # In the order of the layouts, however they were run.
    ordered = {layout: earlier[layout] for layout in LAYOUTS if layout in earlier}
    record[side] = {"machine": facts("torch", "transformers"), "layouts": ordered}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if all(
        len(record.get(each, {"layouts": ()})["layouts"]) == len(LAYOUTS)
        for each in ("before", "after")
    ):
        PAGE.write_text(page(record), encoding="utf-8")


def counted(pool: SimulatedPool, layout: Layout, *, shows: bool) -> dict[str, Any]:
    """Count one layout, print it, and return its row of the result."""
    ours = pool.run(layout.ranks, worker.plait_step, layout)
    sharding = ours[0][1]
    plait = [counts for counts, _ in ours]
    torch = pool.run(layout.ranks, worker.peer_step, layout, sharding)
    row = {"title": layout.title, "plait": totals(plait), "torch": totals(torch)}
    print(
        aligned(
            (layout.title, *COUNTS),
            [(side, *(str(row[side][name]) for name in COUNTS)) for side in ("plait", "torch")],
        )
    )
    if shows:
        for name, count in difference(plait, torch).most_common():
            print(f"  {count:+5d} {name}")
    return row


def totals(ranks: Sequence[StepCounts]) -> dict[str, int]:
    """Return the counts of all ranks together."""
    return {name: sum(getattr(counts, name) for counts in ranks) for name in COUNTS}


def difference(plait: Sequence[StepCounts], torch: Sequence[StepCounts]) -> Counter[str]:
    """Return how many more kernels of each operator Plait launches on all ranks together."""
    found: Counter[str] = Counter()
    for ours, theirs in zip(plait, torch, strict=True):
        found.update(ours.operators)
        found.subtract(theirs.operators)
    return Counter({name: count for name, count in found.items() if count})


if __name__ == "__main__":
    main()
