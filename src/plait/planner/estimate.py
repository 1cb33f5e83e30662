"""Time and memory of candidate layouts in one call, every term named. The public interface of the
closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.constants import Rates, knowledge
from plait.planner.hardware import Numbers
from plait.planner.job import Job
from plait.planner.memory import Memory, States, memory_bytes
from plait.planner.step import Step, step_seconds


@dataclass(frozen=True)
class Estimate:
    """What candidates cost; arrays with one entry each."""

    step: Step
    memory: Memory

    @property
    def seconds(self) -> Numbers:
        """Of an optimizer step."""
        return self.step.seconds


def estimate(job: Job, rates: Rates | None = None, states: States | None = None) -> Estimate:
    """Price every candidate of `job`. `states` replaces the framework's bytes of model states."""
    rates = rates or knowledge().rates
    return Estimate(step_seconds(job, rates), memory_bytes(job, rates, states))


def lower_end(value: float, high: float) -> float:
    """Of an interval around `value` whose upper end is `high`: intervals are symmetric in the
    logarithm.
    """
    return value**2 / high
