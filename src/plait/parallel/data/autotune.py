"""Autotuning of gradient compression, where the user allows it: the first steps of a run are uncompressed and show what compression could
save; the next ones measure the candidates.

The costs of the links alone cannot decide it, because a step gains no more than its exposed communication time. So the run's own steps are
timed. Where the exposed communication of gradients is large enough, every candidate runs a few steps. A lossier candidate is activated if
its steps are 5 % shorter than the best before it; before that, uncompressed gradients run a few more steps, in case the first ones were
slow by chance. The decision is taken once, the same on every rank of the group, and saved in the checkpoint. The residual of a candidate is
dropped when another one is activated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from plait.parallel.hooks import StepEnd, StepHook

SHARE = 0.05
"""Of a step, which has to be saved."""
_WHOLE = "uncompressed"
_UNCOUNTED, _COUNTED = 2, 3
"""Steps: caches and buffers come into being first."""


def best_of(taken: Mapping[str, float]) -> str:
    """Of candidates (seconds per step, the least lossy first), the last that is shorter by SHARE than the best before it."""
    best, *others = taken
    for way in others:
        if taken[way] < (1 - SHARE) * taken[best]:
            best = way
    return best


@dataclass(frozen=True)
class Candidate:
    """A candidate for compression."""

    name: str
    code: int
    """In the checkpoint; positive."""
    take: Callable[[], object]
    """Go by it from the next step on. Between two steps, on every rank of the group."""


_DECISION = "autotune.decision"


@dataclass
class CompressionAutotuner(StepHook):
    """Counts steps, between two of them."""

    groups: tuple[dist.ProcessGroup, ...]
    """One along each axis whose ranks must take the same decision (see `deciding_groups`)."""
    waits_for: str
    """The name (`comm.waits`) of what gradients wait for."""
    whole: Callable[[], object]
    """Return to uncompressed gradients."""
    options: tuple[Candidate, ...]
    """The least lossy first."""
    decision: torch.Tensor = field(default_factory=lambda: torch.full((), -1, dtype=torch.int64))
    """-1: not decided; 0: uncompressed; else the code of a candidate. For a checkpoint."""
    _trying: list[Candidate] = field(default_factory=list)
    """What is tried; the first of it now."""
    _taken: dict[str, float] = field(default_factory=dict)
    """Candidate to seconds of its steps."""
    _again: float | None = None
    """Those of uncompressed gradients after the others."""
    _said: str = ""
    _now: Candidate | None = None
    """The candidate of the steps; None is uncompressed."""
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _before: float | None = None

    def state(self) -> dict[str, torch.Tensor]:
        """The decision."""
        return {_DECISION: self.decision}

    def load_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """A decision that was saved holds, if its candidate is one here."""
        decided = int(saved.get(_DECISION, torch.tensor(-1)))
        if decided in (0, *(option.code for option in self.options)):
            self.commit(decided)

    def after_step(self, end: StepEnd) -> str:
        """Count a step with its exposed communication time by collective. Returns a description of the decision after the step that takes
        it, else nothing. Collective over the group, at the end of every candidate's steps."""
        if int(self.decision) >= 0:
            return ""
        now = time.perf_counter()
        if self._before is not None:
            self._steps.append((now - self._before, end.waited_seconds.get(self.waits_for, 0.0)))
        self._before = now
        if len(self._steps) < _UNCOUNTED + _COUNTED:
            return ""
        taken, waited = self._slowest()
        self._steps = []
        if not self._taken:
            self._after_whole(taken, waited)
        elif self._trying:
            self._taken[self._trying.pop(0).name] = taken
        else:
            self._again = taken
            self._taken[_WHOLE] = min(taken, self._taken[_WHOLE])
        if self._trying:
            self._go_by(self._trying[0])
            return ""
        if self._again is None and best_of(self._taken) != _WHOLE:
            self._go_by(None)
            return ""
        return self._decide()

    def _slowest(self) -> tuple[float, float]:
        """(seconds of a step, its exposed communication time) of this candidate. The longest step, and the shortest wait: the rank that
        comes last waits for the links only."""
        taken, waited = (median(step[index] for step in self._steps[_UNCOUNTED:]) for index in (0, 1))
        most = torch.tensor([taken, -waited], dtype=torch.float64)
        for group in self.groups:  # one axis after the other: the most of all
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return float(most[0]), -float(most[1])

    def _after_whole(self, taken: float, waited: float) -> None:
        self._taken[_WHOLE] = taken
        self._trying = list(self.options) if waited > SHARE * taken else []
        self._said = f"a step takes {taken * 1e3:.3g} ms, {waited * 1e3:.3g} ms of them exposed communication of gradients"

    def _decide(self) -> str:
        name = best_of(self._taken)
        code = next((option.code for option in self.options if option.name == name), 0)
        self.commit(code)
        times = {way: seconds for way, seconds in self._taken.items() if way != _WHOLE}
        if self._again is not None:
            times["uncompressed again"] = self._again
        tried = ", ".join(f"{way} {seconds * 1e3:.3g} ms" for way, seconds in times.items())
        said = f"{self._said}; candidates: {tried}" if tried else f"{self._said}, less than {SHARE:.0%}"
        return f"gradients are sent as {name} from now on: {said}" if code else f"gradients stay uncompressed: {said}"

    def commit(self, code: int) -> None:
        """Decide, or restore an earlier decision; 0 leaves gradients uncompressed."""
        self.decision.fill_(code)
        self._go_by(next((option for option in self.options if option.code == code), None))

    def _go_by(self, option: Candidate | None) -> None:
        if option is self._now:
            return
        self._now = option
        (self.whole if option is None else option.take)()
