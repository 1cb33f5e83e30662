"""Score rows that nothing was learned from, once, by the constants that ship.

    python -m benchmarks.planner_accuracy.unseen ROWS.csv --json RESULT.json

RESULT.json is benchmarks/results/planner_unseen_N.json. The score has the commit of the constants
and stays (see `docs/explanation/planner_accuracy.md`).
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import dumps, revision
from benchmarks.planner_accuracy.frameworks import without_name
from benchmarks.planner_accuracy.predict import evaluate, source_of, summary
from benchmarks.planner_accuracy.recorded import packed_score
from benchmarks.planner_accuracy.runs import Row

KEYS = ("time", "time_experts", "memory", "fit")


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the errors of each tier, and of tier A without the names of frameworks."""
    tiers: dict[str, list[Row]] = {"tier A": [], "tier B": [], "tier A, framework not named": []}
    for row in rows:
        if row["tier"] in ("A", "B"):
            tiers[f"tier {row['tier']}"].append(row)
        if row["tier"] == "A":
            unnamed = {**row, "framework": without_name(row["framework"])}
            tiers["tier A, framework not named"].append(unnamed)
    scores: dict[str, Any] = {"rows": len(rows), "sources": len(set(map(source_of, rows)))}
    for name, members in tiers.items():
        errors = summary(evaluate(members))
        scores[name] = {key: errors[key] for key in KEYS}
    return scores


def interval_coverage(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of rows of tier A and the share in their intervals, for the planner."""
    coverage = {}
    for key in KEYS[:3]:
        rows = 0
        covered = 0.0
        for score in scores:
            entry = score["tier A"][key]["all"].get("all")
            if entry:
                rows += entry["rows"]
                covered += entry["rows"] * entry["coverage"]
        coverage[key] = (rows, round(covered / rows, 4))
    return {
        "source": "benchmarks/results/planner_unseen_*.json: [rows, share in the 90 % interval]",
        "held": coverage,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, metavar="ROWS.csv")
    parser.add_argument("--json", type=Path, required=True, help="a file that does not exist")
    options = parser.parse_args()
    if options.json.exists():
        parser.error(f"{options.json} exists: a second score would not be of unseen rows")
    with options.rows.open(encoding="utf-8", newline="") as file:
        scores = {"commit": revision(), **score(list(csv.DictReader(file)))}
    options.json.write_text(dumps(packed_score(scores)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
