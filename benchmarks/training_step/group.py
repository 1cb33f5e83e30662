"""The teams that are compared with each other: those of one ZeRO stage, alive side by side from start to end of its rounds.

A group is small on purpose: its turns follow each other within seconds, and its processes fit into the memory of a laptop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.load import wait_for_quiet
from benchmarks.common.machine import facts
from benchmarks.common.table import aligned
from benchmarks.common.workers import Team, TeamError
from benchmarks.training_step import agreement, deepspeed_peer, report, rounds
from benchmarks.training_step.contestants import REFERENCE, Contestant
from benchmarks.training_step.phases import PHASES
from benchmarks.training_step.worker import start
from benchmarks.training_step.workload import Workload

PACKAGES = ("torch", "transformers", "deepspeed", "plait")
START_SECONDS = 600.0
LIBRARIES_BYTES = 400 * 2**20
"""Of a worker before it holds a model."""
COPIES = 7
"""Parameters, gradients, two moments, buckets or gathered parameters, and activations, in units of the parameters' bytes."""


def say(line: str) -> None:
    """Progress, on stderr, so that stdout holds the tables."""
    print(line, file=sys.stderr, flush=True)


def measure(
    stage: int,
    contestants: Sequence[Contestant],
    *,
    workload: Workload,
    pace: rounds.Pace,
    logs: Path,
    skipped: Mapping[str, str],
) -> dict[str, Any] | None:
    """Run the rounds of one stage. Returns the document of `report`, or None where there was nothing to compare; says why."""
    say(f"stage {stage}: {', '.join(one.name for one in contestants)}")
    by_name = {one.name: one for one in contestants}
    if problem := _too_large(len(by_name), workload):
        say(f"stage {stage} is left out: {problem}")
        return None
    teams: dict[str, Team] = {}
    try:
        failures = _start(by_name, teams, workload=workload, logs=logs)
        if REFERENCE not in teams:
            say(f"stage {stage} is left out: the reference, {REFERENCE}, did not start")
            return None
        records = rounds.run(teams, by_name, pace=pace, say=say)
        records |= {name: rounds.Record(failure=why) for name, why in failures.items()}
        return report.document(
            stage=stage,
            machine=facts(*PACKAGES),
            workload=workload,
            pace=pace,
            contestants=by_name,
            records=records,
            agreements=agreement.check({k: v for k, v in records.items() if not by_name[k].floor}, reference=REFERENCE),
            phases=_phases(teams, records, pace=pace),
            skipped=skipped,
        )
    finally:
        _stop(teams)


def profile(contestant: Contestant, *, workload: Workload, pace: rounds.Pace, logs: Path) -> int:
    """Print where the time of one contestant goes. Returns the exit code."""
    teams: dict[str, Team] = {}
    try:
        if _start({contestant.name: contestant}, teams, workload=workload, logs=logs):
            return 1
        show_profile(teams[contestant.name], pace=pace)
        return 0
    except TeamError as error:
        say(str(error))
        return 1
    finally:
        _stop(teams)


def show_profile(team: Team, *, pace: rounds.Pace) -> None:
    """Print the phases of every rank, and the collectives and operators of rank 0. Raises TeamError."""
    timeout = pace.turn_timeout_seconds
    for rank, seen in enumerate(team.ask(("phases", {"warm": 2, "steps": pace.steps}), timeout_seconds=timeout)):
        rows = [(phase, f"{seen[phase]:.1f}", f"{seen[f'{phase} waiting']:.1f}") for phase in PHASES]
        print(f"{team.name}, rank {rank}: {seen['total']:.1f} ms/step; other threads {seen['threads']:.1f} ms")
        print(aligned(("phase", "ms/step", "of which waiting"), rows), end="\n\n")
    tables = team.ask(("operators", {"warm": 0, "steps": pace.steps, "rows": 25}), timeout_seconds=timeout)[0]
    print(f"collectives on rank 0, profiler attached\n{tables['collectives']}\n\n{tables['operators']}")


def _too_large(teams: int, workload: Workload) -> str | None:
    need = teams * workload.ranks * (LIBRARIES_BYTES + 4 * COPIES * workload.parameters)
    free = psutil.virtual_memory().available
    if need <= free:
        return None
    return (
        f"{teams} teams of {workload.ranks} ranks need about {need / 2**30:.1f} GiB of memory side by side and {free / 2**30:.1f} GiB are "
        "free; name fewer --contestants, or choose a smaller model"
    )


def _start(contestants: Mapping[str, Contestant], teams: dict[str, Team], *, workload: Workload, logs: Path) -> dict[str, str]:
    """Start the teams one after the other into `teams`; returns the failures."""
    failures = {}
    for name, contestant in contestants.items():
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
            teams[name] = team
        except TeamError as error:
            team.stop()
            deepspeed_peer.clean(ports=[team.port])
            failures[name] = f"did not start: {error}"
            say(f"{name} {failures[name]}")
        except BaseException:
            team.stop(patience_seconds=0)
            raise
    return failures


def _stop(teams: Mapping[str, Team]) -> None:
    for team in teams.values():
        team.stop()
    deepspeed_peer.clean(ports=[team.port for team in teams.values()])


def _phases(teams: Mapping[str, Team], records: dict[str, rounds.Record], *, pace: rounds.Pace) -> dict[str, dict[str, float]]:
    """Rank 0's milliseconds a phase, of every team that is still running."""
    found = {}
    for name, team in teams.items():
        if records[name].failure:
            continue
        wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
        try:
            found[name] = team.ask(("phases", {"warm": 1, "steps": pace.steps}), timeout_seconds=pace.turn_timeout_seconds)[0]
        except TeamError as error:
            records[name].failure = str(error)
    return found
