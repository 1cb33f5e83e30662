"""Compare predictions of the planner with published runs, and write the tables of the docs.

    python -m benchmarks.planner_accuracy            errors on held-out sources, in minutes
    python -m benchmarks.planner_accuracy --learn    first learn the shipped constants from all

No training runs, so the result is the same on every machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.planner_accuracy import published, recorded
from benchmarks.planner_accuracy.held_out import left_out, with_widths_of_others
from benchmarks.planner_accuracy.learn import learn, rows_of, write
from benchmarks.planner_accuracy.predict import fit_of, summary
from benchmarks.planner_accuracy.report import markdown
from benchmarks.planner_accuracy.unseen import held

ROOT = Path(__file__).parents[2]
CONSTANTS = ROOT / "src/plait/planner/data/constants.json"
HELD = ROOT / "src/plait/planner/data/unseen.json"
PAGE = ROOT / "docs/explanation/planner_accuracy.md"


def main() -> None:
    arguments = command("planner_accuracy", __doc__)
    arguments.add_argument(
        "--learn", action="store_true", help="learn the shipped constants from all sources"
    )
    given = arguments.parse_args()
    if given.quick:
        print(markdown(recorded.load()))
        return
    if given.learn:
        write(with_widths_of_others(learn(rows_of("runs", "sweeps"))), CONSTANTS)
    runs, sweep, memory = rows_of("runs"), rows_of("sweeps"), rows_of("oom")
    tables = {
        "runs": [r for r in runs if r["tier"] == "A"],
        "sweep": sweep,
        "out of memory": [r for r in memory if r["status"] == "OOM"],
    }
    result: dict[str, Any] = {}
    for name, calibrated in (("left out", False), ("12 rows", True)):
        found = {table: left_out(rows, calibrated=calibrated) for table, rows in tables.items()}
        result[name] = {table: summary(evaluation) for table, evaluation in found.items()}
        fit = fit_of([p for evaluation in found.values() for p in evaluation.predictions])
        result[name]["fit"] = asdict(fit) | {
            "false_fits": fit.false_fits,
            "false_alarms": fit.false_alarms,
        }
        if not calibrated:
            experts = left_out([r for r in runs if r["moe"]], calibrated=False)
            result["experts"] = summary(experts)
            result["not named"] = summary(left_out(tables["runs"], calibrated=False, named=False))
    result["published"] = published.rows()
    result["again"] = {
        number: summary(
            left_out(
                [row for row in rows_of(f"unseen_{number}") if row["tier"] == "A"], calibrated=False
            )
        )
        for number in "2345"
    }
    HELD.write_text(json.dumps(held(recorded.scores()), indent=1) + "\n", encoding="utf-8")
    recorded.store(result)
    PAGE.write_text(markdown(recorded.load()), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
