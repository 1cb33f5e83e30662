"""Predicts a table of measured runs with the planner that ships and says how far off it is. Rows with values that no run has are refused.

python -m benchmarks.planner_accuracy.evaluate RUNS.csv [--calibrate ROWS.csv] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planner_accuracy.possible import possible_rows
from benchmarks.planner_accuracy.predict import as_json, summary
from benchmarks.planner_accuracy.predict import evaluate as evaluate_rows
from plait.cli.options import write_text
from plait.cli.terminal import print_table
from plait.errors import InputError, PlaitError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_accuracy.evaluate", description=__doc__
    )
    parser.add_argument("runs", type=Path, metavar="RUNS.csv", help="measured runs, one a row")
    parser.add_argument(
        "--calibrate", type=Path, metavar="ROWS.csv", help="fit the constants to these rows first"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="write every prediction and the summary"
    )
    given = parser.parse_args(arguments)
    try:
        rows, refused = possible_rows(given.runs)
        calibrating, others = (
            possible_rows(given.calibrate) if given.calibrate is not None else ((), ())
        )
        for problem in (*refused, *others):
            print(f"refused: {problem}", file=sys.stderr)
        if not rows:
            raise InputError(f"{given.runs}: no row is left; correct those that were refused")
        found = evaluate_rows(rows, calibrate=calibrating)
        if given.json is not None:
            told = as_json(found) | {"refused": [str(problem) for problem in (*refused, *others)]}
            write_text("--json", given.json, json.dumps(told, indent=1, default=float) + "\n")
    except PlaitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    show(summary(found))
    return 0


def show(told: dict[str, Any]) -> None:
    """Errors by group, as tables."""
    console = Console(soft_wrap=True, highlight=False)
    print(
        f"{told['rows']} rows, {told['predicted']} predicted, {told['used_to_calibrate']} used to calibrate"
    )
    columns = ("", "", "rows", "median", "mean", "P90", "bias", "in 90 %")
    for key, title in (
        ("time", "step time"),
        ("time_experts", "step time, models with experts"),
        ("memory", "peak memory"),
    ):
        rows = [
            [
                group,
                name,
                str(e["rows"]),
                *(f"{e[k]:.1%}" for k in ("median", "mean", "p90", "bias", "coverage")),
            ]
            for group, table in told[key].items()
            for name, e in table.items()
        ]
        print_table(console, columns, rows, title=f"error of {title}")
    ranked, fit = told["ranking"], told["fit"]
    if ranked:
        print(
            f"ranking: in {ranked['top3_within_5_percent']:.1%} of {ranked['groups']} groups the best of the predicted top 3 is within 5 % "
            "of the best; "
            f"mean regret {ranked['mean_regret_1']:.1%} of the first, {ranked['mean_regret_3']:.1%} of the first three"
        )
    if fit["out_of_memory"]:
        print(
            f"fit: of {fit['out_of_memory']} rows that ran out of memory {fit['called_fits']} were called fitting ({fit['false_fits']:.1%})"
        )
    if fit["ran"]:
        print(
            f"fit: of {fit['ran']} rows that ran {fit['called_out_of_memory']} were called out of memory ({fit['false_alarms']:.1%})"
        )
    print_table(
        console,
        ("rows", "not priced because"),
        [[str(count), reason] for reason, count in told["not_priced"].items()],
    )


if __name__ == "__main__":
    sys.exit(main())
