"""The worker groups of one layout, alive side by side from start to end of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.load import wait_for_quiet
from benchmarks.common.report import facts, say
from benchmarks.common.workers import WorkerGroup
from benchmarks.pipeline_step import report
from benchmarks.pipeline_step.baselines import Layout
from benchmarks.pipeline_step.worker import start
from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step import agreement, rounds
from benchmarks.training_step.baselines import Baseline
from benchmarks.training_step.group import START_SECONDS, show_profile

PACKAGES = ("torch", "transformers", "plait")


def measure(layout: Layout, *, workload: Workload, pace: rounds.Pace, logs: Path) -> dict[str, Any]:
    """Run the rounds of one layout and return the document of `report`. Raises WorkerGroupError where a baseline does not start."""
    by_name = {one.name: one for one in layout.baselines}
    say(f"{layout.title}: {', '.join(by_name)}")
    with _worker_groups(layout.baselines, workload=workload, logs=logs) as worker_groups:
        records = rounds.run(worker_groups, by_name, pace=pace, say=say)
        reference = layout.baselines[0].name
        phases = {}
        for name, worker_group in worker_groups.items():
            if records[name].failure is None:
                wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
                phases[name] = worker_group.ask(
                    ("phases", {"warm": 1, "steps": pace.steps}),
                    timeout_seconds=pace.turn_timeout_seconds,
                )
    return report.document(
        layout,
        machine=facts(*PACKAGES),
        workload=workload,
        pace=pace,
        records=records,
        agreements=agreement.check(records, reference=reference),
        phases=phases,
    )


def profile(baseline: Baseline, *, workload: Workload, pace: rounds.Pace, logs: Path) -> None:
    """Print where the time of one baseline goes. Raises WorkerGroupError."""
    with _worker_groups([baseline], workload=workload, logs=logs) as worker_groups:
        show_profile(worker_groups[baseline.name], pace=pace)


@contextmanager
def _worker_groups(
    baselines: Sequence[Baseline], *, workload: Workload, logs: Path
) -> Iterator[dict[str, WorkerGroup]]:
    worker_groups: dict[str, WorkerGroup] = {}
    environment = {"OMP_NUM_THREADS": str(workload.threads)}
    try:
        for one in baselines:
            worker_groups[one.name] = WorkerGroup(
                one.name,
                ranks=workload.ranks,
                start=start,
                argument=(one, workload),
                logs=logs,
                environment=environment,
            )
            worker_groups[one.name].ready(timeout_seconds=START_SECONDS)
        yield worker_groups
    finally:
        for worker_group in worker_groups.values():
            worker_group.stop()
