"""Compare predictions of the planner with published runs, and write the tables of the docs.

    python -m benchmarks.planner_accuracy            errors on held-out sources, in minutes
    python -m benchmarks.planner_accuracy --learn    first learn the shipped constants from all

No training runs, so the result is the same on every machine.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.planner_accuracy import published, recorded
from benchmarks.planner_accuracy.held_out import left_out, with_widths_of_others
from benchmarks.planner_accuracy.learn import learn, rows_of, write
from benchmarks.planner_accuracy.predict import Prediction, fit_of, summary
from benchmarks.planner_accuracy.report import PAGE, markdown
from benchmarks.planner_accuracy.runs import Row
from benchmarks.planner_accuracy.unseen import interval_coverage

PLANNER_DATA = Path(__file__).parents[2] / "src/plait/planner/data"
UNSEEN = PLANNER_DATA / "unseen.json"


def main() -> None:
    parser = command("planner_accuracy", __doc__)
    parser.add_argument(
        "--learn", action="store_true", help="learn the shipped constants from all sources"
    )
    options = parser.parse_args()
    if options.quick:
        print(markdown(recorded.load()))
        return
    if options.learn:
        learned = with_widths_of_others(learn(rows_of("runs", "sweeps")))
        write(learned, PLANNER_DATA / "constants.json")

    runs = rows_of("runs")
    tables = {
        "runs": _tier_a(runs),
        "sweep": rows_of("sweeps"),
        "out of memory": [row for row in rows_of("oom") if row["status"] == "OOM"],
    }
    result: dict[str, Any] = {}
    for name, calibrated in (("left out", False), ("12 rows", True)):
        result[name] = {}
        predictions: list[Prediction] = []
        for table, rows in tables.items():
            evaluation = left_out(rows, calibrated=calibrated)
            result[name][table] = summary(evaluation)
            predictions += evaluation.predictions
        result[name]["fit"] = fit_of(predictions)
    experts = [row for row in runs if row["moe"]]
    result["experts"] = summary(left_out(experts, calibrated=False))
    result["not named"] = summary(left_out(tables["runs"], calibrated=False, named=False))
    result["published"] = published.rows()
    result["again"] = {}
    for number in "2345":
        rows = _tier_a(rows_of(f"unseen_{number}"))
        result["again"][number] = summary(left_out(rows, calibrated=False))
    coverage = json.dumps(interval_coverage(recorded.scores()), indent=1)
    UNSEEN.write_text(coverage + "\n", encoding="utf-8")
    recorded.store(result)
    PAGE.write_text(markdown(recorded.load()), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


def _tier_a(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["tier"] == "A"]


if __name__ == "__main__":
    main()
