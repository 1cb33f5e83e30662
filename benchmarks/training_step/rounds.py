"""The interleaved rounds: every baseline takes a turn in every round, in an order that rotates, while all others wait.

A turn during which other programs used more of the machine than allowed is repeated; where it stays disturbed it is left out of the
statistics and counted, never averaged in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common.load import ForeignMeter, wait_for_quiet
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.training_step.baselines import Baseline

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """How long to measure and how quiet it must be."""

    rounds: int = 9
    steps: int = 3
    warm: int = 1
    foreign_share: float = 0.05
    """A turn with more foreign work than this is disturbed."""
    repeats: int = 4
    wait_seconds: float = 60.0
    """Longest wait for a quiet machine before a turn."""
    turn_timeout_seconds: float = 600.0


@dataclass
class Record:
    """All that was seen of one baseline."""

    seconds: list[float | None] = field(default_factory=list)
    """Seconds a step, one entry a round; None where no turn of that round was undisturbed."""
    processor_seconds: list[float] = field(default_factory=list)
    """Processor seconds a step and rank, of every turn: what the step costs where nobody waits. Foreign work hardly moves it."""
    foreign: list[float] = field(default_factory=list)
    """Foreign share of every turn, repeated ones included."""
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, by step index."""
    norms: list[float | None] = field(default_factory=list)
    """None where the baseline does not tell it."""
    peak_bytes: int = 0
    """Largest resident size of a rank, libraries included."""
    failure: str | None = None

    @property
    def clean(self) -> list[float]:
        """Seconds a step of the undisturbed turns."""
        return [value for value in self.seconds if value is not None]


def order(names: Sequence[str], *, index: int) -> list[str]:
    """The order of round `index`: rotated, and turned around every other time, so that nobody always follows the same one."""
    shift = (index // 2) % len(names)
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if index % 2 else rotated


def run(
    worker_groups: Mapping[str, WorkerGroup],
    baselines: Mapping[str, Baseline],
    *,
    pace: Pace,
    say: Say,
) -> dict[str, Record]:
    """All rounds. A worker group that fails is stopped and noted in its record; the others go on."""
    records = {name: Record() for name in worker_groups}
    for index in range(pace.rounds):
        for name in order(list(worker_groups), index=index):
            if records[name].failure:
                continue
            try:
                _turn(worker_groups[name], baselines[name], records[name], pace=pace)
            except WorkerGroupError as error:
                records[name].failure = str(error)
                worker_groups[name].stop()
                say(f"{name}: failed in round {index + 1}; the others go on\n{error}")
        say(
            f"round {index + 1}/{pace.rounds}: "
            + ", ".join(_latest(name, record) for name, record in records.items())
        )
    return records


def _turn(worker_group: WorkerGroup, baseline: Baseline, record: Record, *, pace: Pace) -> None:
    value = None
    for _ in range(1 + pace.repeats):
        wait_for_quiet(share=pace.foreign_share, longest_seconds=pace.wait_seconds)
        meter = ForeignMeter((*worker_group.pids, os.getpid()))
        meter.start()
        answers = worker_group.ask(
            ("turn", {"warm": pace.warm, "steps": pace.steps}),
            timeout_seconds=pace.turn_timeout_seconds,
        )
        record.foreign.append(meter.stop())
        by_rank = [answer["losses"] for answer in answers]
        record.losses += (
            by_rank[0]
            if baseline.loss_is_global
            else [sum(each) / len(each) for each in zip(*by_rank, strict=True)]
        )
        record.norms += answers[0]["norms"]
        record.processor_seconds.append(
            sum(answer["processor_seconds"] for answer in answers) / len(answers)
        )
        record.peak_bytes = max([record.peak_bytes, *(answer["peak_bytes"] for answer in answers)])
        if record.foreign[-1] <= pace.foreign_share:
            value = max(answer["seconds"] for answer in answers)
            break
    record.seconds.append(value)


def _latest(name: str, record: Record) -> str:
    if record.failure:
        return f"{name} failed"
    value = record.seconds[-1]
    return f"{name} disturbed" if value is None else f"{name} {1000 * value:.0f}"
