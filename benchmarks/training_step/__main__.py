"""The command: `python -m benchmarks.training_step`. For each stage: start its worker groups, run the rounds, print and write the result.

Exit code 0 when every chosen baseline was measured and agreed, 1 when one failed, disagreed or never had an undisturbed turn, 2 for a
wrong argument. A stage measured alone replaces that stage's result and leaves the others.
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
from benchmarks.training_step import deepspeed_peer, group, report, rounds
from benchmarks.training_step.baselines import ALL, BY_NAME, STAGES, Baseline, of_stage
from benchmarks.training_step.workload import Workload

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    workload, pace = _workload(options), _pace(options)
    skipped = _unavailable([BY_NAME[name] for name in options.baselines])
    for name, why in skipped.items():
        say(f"{name} is left out: {why}")
    with tempfile.TemporaryDirectory(prefix="training_step_") as logs:
        if options.profile:
            return (
                1
                if skipped
                else group.profile(
                    BY_NAME[options.profile], workload=workload, pace=pace, logs=Path(logs)
                )
            )
        good = True
        for stage in options.stages:
            named = [
                one for one in of_stage(stage, names=options.baselines) if one.name not in skipped
            ]
            left_out = {
                one.name: skipped[one.name]
                for one in of_stage(stage, names=options.baselines)
                if one.name in skipped
            }
            found = group.measure(
                stage, named, workload=workload, pace=pace, logs=Path(logs), skipped=left_out
            )
            good = good and found is not None and report.is_good(found)
            if found is not None:
                print(report.terminal(found), flush=True)
                if not options.quick:
                    _write(options.output, found)
    return 0 if good else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [baseline.name for baseline in ALL]
    parser = command("training_step", __doc__)
    parser.add_argument(
        "--stages",
        nargs="+",
        type=int,
        choices=STAGES,
        default=list(STAGES),
        help="ZeRO stages to measure (default: all)",
    )
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="default: all of " + " ".join(names),
    )
    parser.add_argument(
        "--profile", choices=names, metavar="NAME", help="instead of rounds, profile one baseline"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)"
    )
    for owner in (rounds.Pace, Workload):
        for field in fields(owner):
            if isinstance(field.default, int | float):
                flag = "--" + field.name.replace("_", "-")
                parser.add_argument(
                    flag, type=type(field.default), default=None, help=f"default: {field.default}"
                )
    options = parser.parse_args(arguments)
    if options.profile:
        options.baselines = [options.profile]
    return options


def _given(options: argparse.Namespace, owner: type) -> dict[str, Any]:
    return {
        f.name: getattr(options, f.name)
        for f in fields(owner)
        if getattr(options, f.name, None) is not None
    }


def _workload(options: argparse.Namespace) -> Workload:
    small = (
        {
            "layers": 2,
            "hidden": 128,
            "intermediate": 352,
            "heads": 4,
            "vocabulary": 512,
            "sequence": 64,
        }
        if options.quick
        else {}
    )
    return Workload(**{**small, **_given(options, Workload)})


def _pace(options: argparse.Namespace) -> rounds.Pace:
    # In a quick run the numbers mean nothing, so nothing waits for a quiet machine.
    short: dict[str, Any] = (
        {"rounds": 2, "steps": 1, "foreign_share": 1.0, "wait_seconds": 0.0}
        if options.quick
        else {}
    )
    return rounds.Pace(**{**short, **_given(options, rounds.Pace)})


def _unavailable(wanted: Sequence[Baseline]) -> dict[str, str]:
    """Which baselines cannot run here, and why."""
    skipped = {
        one.name: f"{one.missing} is not installed (pip install '.[bench]')"
        for one in wanted
        if one.missing
    }
    deepspeed = [
        one.name for one in wanted if one.requires == "deepspeed" and one.name not in skipped
    ]
    if deepspeed:
        say("compiling DeepSpeed's operators (a minute the first time)")
        if problem := deepspeed_peer.prepare():
            skipped |= dict.fromkeys(deepspeed, problem)
    return skipped


def _write(folder: Path, found: dict[str, Any]) -> None:
    stages = folder / "training_step"
    stages.mkdir(parents=True, exist_ok=True)
    write(stages / f"stage_{found['stage']}.json", found, digits=7)
    everything = [json.loads(path.read_text()) for path in sorted(stages.glob("stage_*.json"))]
    (folder / "training_step.md").write_text(report.page(everything))
    say(f"written to {stages}/stage_{found['stage']}.json and {folder}/training_step.md")


if __name__ == "__main__":
    raise SystemExit(main())
