"""The command: `python -m benchmarks.training_step`. Choose contestants, start their teams, run the rounds, print and write the result.

Exit code 0 when every chosen contestant ran and agreed, 1 when one failed or disagreed, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.machine import facts
from benchmarks.common.table import aligned
from benchmarks.common.workers import Team, TeamError
from benchmarks.training_step import agreement, deepspeed_peer, report, rounds
from benchmarks.training_step.contestants import ALL, BY_NAME, REFERENCE, Contestant
from benchmarks.training_step.phases import PHASES
from benchmarks.training_step.worker import start
from benchmarks.training_step.workload import Workload

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "transformers", "deepspeed", "plait")
START_SECONDS = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    workload, pace = _workload(options), _pace(options)
    chosen, skipped = _available([BY_NAME[name] for name in options.contestants])
    for name, why in skipped.items():
        say(f"{name} is left out: {why}")
    began = time.time()
    teams: dict[str, Team] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="training_step_") as logs:
            failures = _start(chosen, teams, workload=workload, logs=Path(logs))
            if options.profile:
                return 1 if failures else _profile(teams[options.profile], pace)
            return _measure(options, workload, pace, chosen, teams, {**skipped, **failures}) or bool(failures)
    finally:
        for team in teams.values():
            team.stop()
        deepspeed_peer.clean(started=began)


def say(line: str) -> None:
    """Progress, on stderr, so that stdout holds the tables."""
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [contestant.name for contestant in ALL]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contestants", nargs="+", choices=names, default=names, metavar="NAME", help="default: all of " + " ".join(names))
    parser.add_argument("--profile", choices=names, metavar="NAME", help="instead of rounds, profile one contestant")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and 2 rounds of 1 step, to see that everything runs; writes nothing"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for training_step.json and .md (default: %(default)s)")
    for owner in (rounds.Pace, Workload):
        for field in fields(owner):
            if isinstance(field.default, int | float):
                flag = "--" + field.name.replace("_", "-")
                parser.add_argument(flag, type=type(field.default), default=None, help=f"default: {field.default}")
    options = parser.parse_args(arguments)
    if options.profile:
        options.contestants = [options.profile]
    elif REFERENCE not in options.contestants:
        options.contestants = [REFERENCE, *options.contestants]
    return options


def _given(options: argparse.Namespace, owner: type) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(owner) if getattr(options, f.name, None) is not None}


def _workload(options: argparse.Namespace) -> Workload:
    small = {"layers": 2, "hidden": 128, "intermediate": 352, "heads": 4, "vocabulary": 512, "sequence": 64} if options.quick else {}
    return Workload(**{**small, **_given(options, Workload)})


def _pace(options: argparse.Namespace) -> rounds.Pace:
    # In a quick run the numbers mean nothing, so nothing waits for a quiet machine.
    short = {"rounds": 2, "steps": 1, "foreign_share": 1.0, "wait_seconds": 0.0} if options.quick else {}
    return rounds.Pace(**{**short, **_given(options, rounds.Pace)})


def _available(wanted: Sequence[Contestant]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The contestants that can run here, and why the others cannot."""
    skipped = {one.name: f"{one.missing} is not installed (pip install '.[bench]')" for one in wanted if one.missing}
    left = {one.name: one for one in wanted if one.name not in skipped}
    needs_operators = [name for name, one in left.items() if one.requires == "deepspeed"]
    if needs_operators:
        say("compiling DeepSpeed's operators (a minute the first time)")
        if problem := deepspeed_peer.prepare():
            skipped |= dict.fromkeys(needs_operators, problem)
    return {name: one for name, one in left.items() if name not in skipped}, skipped


def _start(chosen: Mapping[str, Contestant], teams: dict[str, Team], *, workload: Workload, logs: Path) -> dict[str, str]:
    """Start the teams one after the other into `teams`; returns the failures."""
    failures = {}
    for name, contestant in chosen.items():
        team = Team(
            name,
            ranks=workload.ranks,
            start=start,
            argument=(contestant, workload),
            logs=logs,
            environment={**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": str(workload.threads)},
        )
        try:
            team.ready(timeout_seconds=START_SECONDS)
        except TeamError as error:
            team.stop()
            failures[name] = f"did not start: {error}"
            say(f"{name} {failures[name]}")
            continue
        teams[name] = team
        free = psutil.virtual_memory().available
        say(f"{name} is ready; {free / 2**30:.1f} GiB of memory left")
        if free < 2**30:
            raise SystemExit("less than 1 GiB of memory left: choose fewer --contestants, so that their idle teams fit side by side")
    return failures


def _measure(
    options: argparse.Namespace,
    workload: Workload,
    pace: rounds.Pace,
    chosen: Mapping[str, Contestant],
    teams: Mapping[str, Team],
    skipped: Mapping[str, str],
) -> int:
    if REFERENCE not in teams:
        say(f"the reference, {REFERENCE}, did not start; nothing to compare with")
        return 1
    records = rounds.run(teams, chosen, pace=pace, say=say)
    running = {name: team for name, team in teams.items() if not records[name].failure}
    phases = {
        name: team.ask(("phases", {"warm": 1, "steps": pace.steps}), timeout_seconds=pace.turn_timeout_seconds)[0]
        for name, team in running.items()
    }
    agreements = agreement.check(records, reference=REFERENCE)
    found = report.document(
        machine=facts(*PACKAGES),
        workload=workload,
        pace=pace,
        contestants=chosen,
        records=records,
        agreements=agreements,
        phases=phases,
        skipped=skipped,
    )
    print(aligned(report.HEADER, report.rows(found)), end="\n\n")
    print("milliseconds a step on rank 0")
    print(aligned(report.PHASE_HEADER, report.phase_rows(found)), end="\n\n")
    print("\n".join(f"- {note}" for note in report.notes(found)))
    if not options.quick:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "training_step.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.output / "training_step.md").write_text(report.page(found))
        say(f"written to {options.output}/training_step.json and .md")
    return 0 if all(each.holds for each in agreements.values()) and len(running) == len(teams) else 1


def _profile(team: Team, pace: rounds.Pace) -> int:
    timeout = pace.turn_timeout_seconds
    found = team.ask(("phases", {"warm": 2, "steps": pace.steps}), timeout_seconds=timeout)
    for rank, seen in enumerate(found):
        header = ("phase", "ms/step", "of which waiting")
        rows = [(phase, f"{seen[phase]:.1f}", f"{seen[f'{phase} waiting']:.1f}") for phase in PHASES]
        print(f"{team.name}, rank {rank}: {seen['total']:.1f} ms/step; other threads {seen['threads']:.1f} ms\n{aligned(header, rows)}\n")
    tables = team.ask(("operators", {"warm": 0, "steps": pace.steps, "rows": 25}), timeout_seconds=timeout)[0]
    print(f"collectives on rank 0, profiler attached\n{tables['collectives']}\n\n{tables['operators']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
