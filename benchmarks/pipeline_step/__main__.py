"""The command: `python -m benchmarks.pipeline_step`. For each layout: start its worker groups, run the rounds, print and write the result.

Exit code 0 when every baseline was measured and agreed, 1 when one failed, disagreed or never had an undisturbed turn, 2 for a wrong
argument. A ratio above the target is reported, and is not a failure. A layout measured alone replaces that layout's result only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.common.command import command
from benchmarks.common.report import say, write
from benchmarks.common.workers import WorkerGroupError
from benchmarks.pipeline_step import group, report
from benchmarks.pipeline_step.baselines import BY_NAME, LAYOUTS, Layout
from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step.rounds import Pace

RESULTS = Path(__file__).parents[1] / "results"
MODEL = ("layers", "hidden", "intermediate", "heads", "vocabulary", "sequence")
SETTABLE = (*MODEL, "micro_batch", "micro_batches", "threads", "clip", "seed")
"""What the command line may change of a workload; ranks and slices are the layout's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    pace, good = _pace(options), True
    with tempfile.TemporaryDirectory(prefix="pipeline_step_") as logs:
        if options.profile:
            layout, one = BY_NAME[options.profile]
            try:
                group.profile(one, workload=_workload(options, layout), pace=pace, logs=Path(logs))
            except WorkerGroupError as error:
                say(str(error))
                return 1
            return 0
        for layout in (one for one in LAYOUTS if one.name in options.layouts):
            try:
                found = group.measure(
                    layout, workload=_workload(options, layout), pace=pace, logs=Path(logs)
                )
            except WorkerGroupError as error:
                say(f"{layout.title} is left out: {error}")
                good = False
                continue
            good = good and report.is_good(found)
            print(report.terminal(found), flush=True)
            if not options.quick:
                _write(options.output, found)
    return 0 if good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [layout.name for layout in LAYOUTS]
    parser = command("pipeline_step", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--profile",
        choices=list(BY_NAME),
        metavar="NAME",
        help=f"instead, profile one of {' '.join(BY_NAME)}",
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)"
    )
    for field in fields(Pace):
        _add(parser, field.name, type(field.default), f"default: {field.default}")
    for field in fields(Workload):
        if field.name in SETTABLE:
            of_layout = field.name in ("micro_batch", "micro_batches")
            _add(
                parser,
                field.name,
                type(field.default),
                "default: the layout's" if of_layout else f"default: {field.default}",
            )
    return parser.parse_args(arguments)


def _add(parser: argparse.ArgumentParser, name: str, kind: type, said: str) -> None:
    parser.add_argument("--" + name.replace("_", "-"), type=kind, default=None, help=said)


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _workload(options: argparse.Namespace, layout: Layout) -> Workload:
    sizes: dict[str, Any] = {
        "ranks": layout.ranks,
        "slices": layout.slices,
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.micro_batches,
    }
    if options.quick:
        sizes |= {
            "layers": 2,
            "hidden": 128,
            "intermediate": 352,
            "heads": 4,
            "vocabulary": 512,
            "sequence": 64,
        }
    return Workload(**{**sizes, **_given(options, SETTABLE)})


def _pace(options: argparse.Namespace) -> Pace:
    # In a quick run the numbers mean nothing, so nothing waits for a quiet machine.
    short: dict[str, Any] = (
        {"rounds": 2, "steps": 1, "foreign_share": 1.0, "wait_seconds": 0.0}
        if options.quick
        else {}
    )
    return Pace(**{**short, **_given(options, [field.name for field in fields(Pace)])})


def _write(folder: Path, found: dict[str, Any]) -> None:
    results = folder / "pipeline_step"
    results.mkdir(parents=True, exist_ok=True)
    write(results / f"{found['layout']}.json", found, digits=7)
    paths = [results / f"{layout.name}.json" for layout in LAYOUTS]
    (folder / "pipeline_step.md").write_text(
        report.page([json.loads(path.read_text()) for path in paths if path.exists()])
    )
    say(f"written to {results}/{found['layout']}.json and {folder}/pipeline_step.md")


if __name__ == "__main__":
    raise SystemExit(main())
