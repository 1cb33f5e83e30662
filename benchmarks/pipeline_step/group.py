"""The teams of one layout, alive side by side from start to end of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.load import wait_for_quiet
from benchmarks.common.machine import facts
from benchmarks.common.workers import Team
from benchmarks.pipeline_step import report
from benchmarks.pipeline_step.contestants import Layout
from benchmarks.pipeline_step.worker import start
from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step import agreement, rounds
from benchmarks.training_step.contestants import Contestant
from benchmarks.training_step.group import START_SECONDS, say, show_profile

PACKAGES = ("torch", "transformers", "plait")


def measure(layout: Layout, *, workload: Workload, pace: rounds.Pace, logs: Path) -> dict[str, Any]:
    """Run the rounds of one layout and return the document of `report`. Raises TeamError where a contestant does not start."""
    by_name = {one.name: one for one in layout.contestants}
    say(f"{layout.title}: {', '.join(by_name)}")
    with _teams(layout.contestants, workload=workload, logs=logs) as teams:
        records = rounds.run(teams, by_name, pace=pace, say=say)
        reference = layout.contestants[0].name
        phases = {}
        for name, team in teams.items():
            if records[name].failure is None:
                wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
                phases[name] = team.ask(("phases", {"warm": 1, "steps": pace.steps}), timeout_seconds=pace.turn_timeout_seconds)
    return report.document(
        layout,
        machine=facts(*PACKAGES),
        workload=workload,
        pace=pace,
        records=records,
        agreements=agreement.check(records, reference=reference),
        phases=phases,
    )


def profile(contestant: Contestant, *, workload: Workload, pace: rounds.Pace, logs: Path) -> None:
    """Print where the time of one contestant goes. Raises TeamError."""
    with _teams([contestant], workload=workload, logs=logs) as teams:
        show_profile(teams[contestant.name], pace=pace)


@contextmanager
def _teams(contestants: Sequence[Contestant], *, workload: Workload, logs: Path) -> Iterator[dict[str, Team]]:
    teams: dict[str, Team] = {}
    environment = {"OMP_NUM_THREADS": str(workload.threads)}
    try:
        for one in contestants:
            teams[one.name] = Team(
                one.name, ranks=workload.ranks, start=start, argument=(one, workload), logs=logs, environment=environment
            )
            teams[one.name].ready(timeout_seconds=START_SECONDS)
        yield teams
    finally:
        for team in teams.values():
            team.stop()
