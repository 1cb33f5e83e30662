"""Rounds in which every baseline has one turn, in an order that rotates, while all others wait.

A turn during which other programs used more of the machine than allowed is repeated. If it is
disturbed every time, it is counted and left out of the statistics.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from benchmarks.common.load import undisturbed
from benchmarks.common.report import say
from benchmarks.common.workers import WorkerGroup, WorkerGroupError
from benchmarks.steps.baselines import Baseline


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
    """Seconds per step, one entry per round, or None if all turns of the round were disturbed."""
    processor_seconds: list[float] = field(default_factory=list)
    """Processor seconds per step and rank, of every turn. Foreign work hardly changes them."""
    foreign: list[float] = field(default_factory=list)
    """Foreign share of every turn, repeated ones included."""
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, for each step."""
    norms: list[float | None] = field(default_factory=list)
    """Gradient norms, for each step."""
    peak_bytes: int = 0
    """Largest resident size of a rank, libraries included."""
    failure: str | None = None

    @property
    def clean(self) -> list[float]:
        return [value for value in self.seconds if value is not None]


def order(names: Sequence[str], *, index: int) -> list[str]:
    """Return the order of round `index`: rotated, and reversed in every other round."""
    shift = (index // 2) % len(names)
    direction = (1, -1)[index % 2]
    return [*names[shift:], *names[:shift]][::direction]


def run(
    groups: Mapping[str, WorkerGroup], baselines: Mapping[str, Baseline], *, pace: Pace
) -> dict[str, Record]:
    """Run all rounds. A worker group that fails is stopped, and the others continue."""
    records = {name: Record() for name in groups}
    for index in range(pace.rounds):
        for name in order(list(groups), index=index):
            if records[name].failure:
                continue
            try:
                _turn(groups[name], baselines[name], records[name], pace=pace)
            except WorkerGroupError as error:
                records[name].failure = str(error)
                groups[name].stop()
                say(f"{name}: failed in round {index + 1}; the others go on\n{error}")
        latest = ", ".join(_latest(name, record) for name, record in records.items())
        say(f"round {index + 1}/{pace.rounds}: {latest}")
    return records


def _turn(group: WorkerGroup, baseline: Baseline, record: Record, *, pace: Pace) -> None:
    value = None
    for share, answers in undisturbed(
        group,
        ("turn", {"warm": pace.warm, "steps": pace.steps}),
        share=pace.foreign_share,
        repeats=pace.repeats,
        wait_seconds=pace.wait_seconds,
        timeout_seconds=pace.turn_timeout_seconds,
    ):
        record.foreign.append(share)
        by_rank: dict[str, list[Any]] = defaultdict(list)
        for answer in answers:
            for name, measured in answer.items():
                by_rank[name].append(measured)
        if baseline.loss_is_global:
            record.losses += by_rank["losses"][0]
        else:
            record.losses += map(mean, zip(*by_rank["losses"], strict=True))
        record.norms += by_rank["norms"][0]
        record.processor_seconds.append(mean(by_rank["processor_seconds"]))
        record.peak_bytes = max(record.peak_bytes, *by_rank["peak_bytes"])
        if share <= pace.foreign_share:
            value = max(by_rank["seconds"])
    record.seconds.append(value)


def _latest(name: str, record: Record) -> str:
    if record.failure:
        return f"{name} failed"
    value = record.seconds[-1]
    if value is None:
        return f"{name} disturbed"
    return f"{name} {1000 * value:.0f}"
