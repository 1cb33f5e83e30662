"""Time and memory of candidate layouts in one call. Public interface of the closed forms."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.constants import Rates, knowledge
from plait.planner.hardware import Numbers
from plait.planner.job import Job
from plait.planner.memory import Memory, States, memory_bytes
from plait.planner.step import Step, step_seconds


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of candidates; arrays with one entry each."""

    step: Step
    memory: Memory

    @property
    def seconds(self) -> Numbers:
        """Seconds per optimizer step."""
        return self.step.seconds


def estimate(job: Job, rates: Rates | None = None, states: States | None = None) -> Estimate:
    """Predict time and memory of every candidate.

    Args:
        job: The candidates.
        rates: Constants. None uses the shipped constants.
        states: Bytes of model states. None computes them from the framework's bytes per parameter.
    """
    rates = rates or knowledge().rates
    return Estimate(step_seconds(job, rates), memory_bytes(job, rates, states))


def lower_end(value: float, high: float) -> float:
    """Return the lower end of an interval around `value` with the upper end `high`.

    Intervals are symmetric in the logarithm.
    """
    return value**2 / high
