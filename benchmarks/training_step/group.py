"""The worker groups that are compared with each other: those of one ZeRO stage, alive side by side from start to end of its rounds.

A group is small on purpose: its turns follow each other within seconds, and its processes fit into the memory of a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.load import wait_for_quiet
from benchmarks.common.report import aligned, facts, say
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.training_step import agreement, deepspeed_peer, report, rounds
from benchmarks.training_step.baselines import REFERENCE, Baseline
from benchmarks.training_step.phases import PHASES
from benchmarks.training_step.worker import start
from benchmarks.training_step.workload import Workload

PACKAGES = ("torch", "transformers", "deepspeed", "plait")
START_SECONDS = 600.0
LIBRARIES_BYTES = 400 * 2**20
"""Of a worker before it holds a model."""
COPIES = 7
"""Parameters, gradients, two moments, buckets or gathered parameters, and activations, in units of the parameters' bytes."""


def measure(
    stage: int,
    baselines: Sequence[Baseline],
    *,
    workload: Workload,
    pace: rounds.Pace,
    logs: Path,
    skipped: Mapping[str, str],
) -> dict[str, Any] | None:
    """Run the rounds of one stage. Returns the document of `report`, or None where there was nothing to compare; says why."""
    say(f"stage {stage}: {', '.join(one.name for one in baselines)}")
    by_name = {one.name: one for one in baselines}
    if problem := _too_large(len(by_name), workload):
        say(f"stage {stage} is left out: {problem}")
        return None
    worker_groups: dict[str, WorkerGroup] = {}
    try:
        failures = _start(by_name, worker_groups, workload=workload, logs=logs)
        if REFERENCE not in worker_groups:
            say(f"stage {stage} is left out: the reference, {REFERENCE}, did not start")
            return None
        records = rounds.run(worker_groups, by_name, pace=pace, say=say)
        records |= {name: rounds.Record(failure=why) for name, why in failures.items()}
        return report.document(
            stage=stage,
            machine=facts(*PACKAGES),
            workload=workload,
            pace=pace,
            baselines=by_name,
            records=records,
            agreements=agreement.check(
                {k: v for k, v in records.items() if not by_name[k].floor}, reference=REFERENCE
            ),
            phases=_phases(worker_groups, records, pace=pace),
            skipped=skipped,
        )
    finally:
        _stop(worker_groups)


def profile(baseline: Baseline, *, workload: Workload, pace: rounds.Pace, logs: Path) -> int:
    """Print where the time of one baseline goes. Returns the exit code."""
    worker_groups: dict[str, WorkerGroup] = {}
    try:
        if _start({baseline.name: baseline}, worker_groups, workload=workload, logs=logs):
            return 1
        show_profile(worker_groups[baseline.name], pace=pace)
        return 0
    except WorkerGroupError as error:
        say(str(error))
        return 1
    finally:
        _stop(worker_groups)


def show_profile(worker_group: WorkerGroup, *, pace: rounds.Pace) -> None:
    """Print the phases of every rank, and the collectives and operators of rank 0. Raises WorkerGroupError."""
    timeout = pace.turn_timeout_seconds
    for rank, seen in enumerate(
        worker_group.ask(("phases", {"warm": 2, "steps": pace.steps}), timeout_seconds=timeout)
    ):
        rows = [
            (phase, f"{seen[phase]:.1f}", f"{seen[f'{phase} waiting']:.1f}") for phase in PHASES
        ]
        print(
            f"{worker_group.name}, rank {rank}: {seen['total']:.1f} ms/step; other threads {seen['threads']:.1f} ms"
        )
        print(aligned(("phase", "ms/step", "of which waiting"), rows), end="\n\n")
    tables = worker_group.ask(
        ("operators", {"warm": 0, "steps": pace.steps, "rows": 25}), timeout_seconds=timeout
    )[0]
    print(
        f"collectives on rank 0, profiler attached\n{tables['collectives']}\n\n{tables['operators']}"
    )


def _too_large(worker_groups: int, workload: Workload) -> str | None:
    need = worker_groups * workload.ranks * (LIBRARIES_BYTES + 4 * COPIES * workload.parameters)
    free = psutil.virtual_memory().available
    if need <= free:
        return None
    return (
        f"{worker_groups} worker groups of {workload.ranks} ranks need about {need / 2**30:.1f} GiB of memory "
        f"together and {free / 2**30:.1f} GiB are free; name fewer --baselines, or choose a smaller model"
    )


def _start(
    baselines: Mapping[str, Baseline],
    worker_groups: dict[str, WorkerGroup],
    *,
    workload: Workload,
    logs: Path,
) -> dict[str, str]:
    """Start the worker groups one after the other into `worker_groups`; returns the failures."""
    failures = {}
    for name, baseline in baselines.items():
        worker_group = WorkerGroup(
            name,
            ranks=workload.ranks,
            start=start,
            argument=(baseline, workload),
            logs=logs,
            environment={**deepspeed_peer.ENVIRONMENT, "OMP_NUM_THREADS": str(workload.threads)},
        )
        try:
            worker_group.ready(timeout_seconds=START_SECONDS)
            worker_groups[name] = worker_group
        except WorkerGroupError as error:
            worker_group.stop()
            deepspeed_peer.clean(ports=[worker_group.port])
            failures[name] = f"did not start: {error}"
            say(f"{name} {failures[name]}")
        except BaseException:
            worker_group.stop(patience_seconds=0)
            raise
    return failures


def _stop(worker_groups: Mapping[str, WorkerGroup]) -> None:
    for worker_group in worker_groups.values():
        worker_group.stop()
    deepspeed_peer.clean(ports=[worker_group.port for worker_group in worker_groups.values()])


def _phases(
    worker_groups: Mapping[str, WorkerGroup],
    records: dict[str, rounds.Record],
    *,
    pace: rounds.Pace,
) -> dict[str, dict[str, float]]:
    """Rank 0's milliseconds a phase, of every worker group that is still running."""
    found = {}
    for name, worker_group in worker_groups.items():
        if records[name].failure:
            continue
        wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
        try:
            found[name] = worker_group.ask(
                ("phases", {"warm": 1, "steps": pace.steps}),
                timeout_seconds=pace.turn_timeout_seconds,
            )[0]
        except WorkerGroupError as error:
            records[name].failure = str(error)
    return found
