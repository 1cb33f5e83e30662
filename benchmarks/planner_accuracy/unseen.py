"""Scores rows that nothing was learned from, once: predictions by the constants that ship, with the commit that they are of.

    python -m benchmarks.planner_accuracy.unseen ROWS.csv --json benchmarks/results/planner_unseen_N.json

A source is predicted once and then learned from like the others; the score stays (see `docs/explanation/planner_accuracy.md`).
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import dumps
from benchmarks.planner_accuracy.frameworks import without_name
from benchmarks.planner_accuracy.predict import evaluate, source_of, summary
from benchmarks.planner_accuracy.recorded import packed_score
from benchmarks.planner_accuracy.runs import Row, read_rows
from plait.cli.options import write_text

ROOT = Path(__file__).parents[2]
KEYS = ("time", "time_experts", "memory", "fit")


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of the rows of each tier, and of tier A without the framework's name."""
    tiers = {f"tier {tier}": [row for row in rows if row["tier"] == tier] for tier in ("A", "B")}
    tiers["tier A, framework not named"] = [
        {**row, "framework": without_name(row["framework"])} for row in tiers["tier A"]
    ]
    found = {
        name: {key: value for key, value in summary(evaluate(part)).items() if key in KEYS}
        for name, part in tiers.items()
    }
    return {"rows": len(rows), "sources": len({source_of(row) for row in rows}), **found}


def held(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of tier A of all sets, and the share of them in their intervals, as `plait.planner.constants.interval_coverage` reads it."""
    found: dict[str, tuple[int, float]] = {}
    for key in KEYS[:3]:
        entries = [entry for score in scores if (entry := score["tier A"][key]["all"].get("all"))]
        rows = sum(entry["rows"] for entry in entries)
        found[key] = (
            rows,
            round(sum(entry["rows"] * entry["coverage"] for entry in entries) / rows, 4),
        )
    return {
        "source": "benchmarks/results/planner_unseen_*.json: [rows, share in the 90 % interval]",
        "held": found,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("rows", type=Path, metavar="ROWS.csv")
    arguments.add_argument(
        "--json",
        type=Path,
        required=True,
        metavar="OUT",
        help="an existing file is kept: a score is made once",
    )
    given = arguments.parse_args()
    if given.json.exists():
        arguments.error(
            f"{given.json} exists: these rows were scored, and a second score would not be of rows that nobody has seen"
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = {"commit": commit, **score(read_rows(given.rows))}
    write_text("--json", given.json, dumps(packed_score(found)) + "\n")
    for tier in ("tier A", "tier B"):
        for key in KEYS[:3]:
            if entry := found[tier][key]["all"].get("all"):
                print(
                    f"{tier}, {key}: {entry['rows']} rows, median {entry['median']:.1%}, coverage {entry['coverage']:.0%}"
                )


if __name__ == "__main__":
    main()
