"""Comparison of a run's measured time and memory with the plan that `plait plan --out` wrote.

A listener on one rank prints the comparison in one line. The first steps, which allocate buffers,
are left out. A run that differs from the plan (another layout, model or device, or a setting that
plans do not model) is not compared, and the reason is printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from plait.events import Event, RunEnded, StepDone
from plait.planner.configuration import layout_of, unmodelled
from plait.sizes import format_bytes

if TYPE_CHECKING:
    from plait.config.schema.config import Config
    from plait.train.session import ValidatedRun

WARMUP_STEPS = 2
"""Number of steps at the start that are left out."""
MEASURED_STEPS = 8
"""Number of steps after which the comparison is printed."""
MIN_STEPS = 3
"""Number of measured steps that a shorter run needs for a comparison at its end."""


class PlanResidual:
    """Listener that prints how much the measured time and memory differ from the plan."""

    def __init__(
        self, *, predicted_seconds: float, predicted_bytes: float, say: Callable[[str], None]
    ) -> None:
        """Compare a run with a plan.

        Args:
            predicted_seconds: Duration of a step in the plan.
            predicted_bytes: Peak memory of a rank in the plan.
            say: Receives the line with the comparison.
        """
        self._predicted_seconds = predicted_seconds
        self._predicted_bytes = predicted_bytes
        self._say = say
        self._steps = 0
        self._seconds: list[float] = []
        self._peak_bytes = 0
        self._printed = False

    def __call__(self, event: Event) -> None:
        if self._printed:
            return
        if isinstance(event, StepDone):
            self._steps += 1
            self._peak_bytes = max(self._peak_bytes, event.memory_bytes)
            if self._steps > WARMUP_STEPS and not event.skipped:
                self._seconds.append(event.seconds)

        # A shorter run is compared at its end, from fewer steps.
        required = MIN_STEPS if isinstance(event, RunEnded) else MEASURED_STEPS
        if len(self._seconds) >= required:
            self._printed = True
            self._print()

    def _print(self) -> None:
        step = _compare(
            "step",
            self._predicted_seconds,
            # The median, because a checkpoint or a validation can slow single steps down.
            median(self._seconds),
            "{:.4g} s".format,
        )
        memory = _compare("memory", self._predicted_bytes, float(self._peak_bytes), format_bytes)
        self._say(f"plan    {step}; {memory}; {len(self._seconds)} steps")


def _compare(
    name: str, predicted: float | None, measured: float, format_value: Callable[[float], str]
) -> str:
    if not predicted:
        return f"{name} {format_value(measured)}"
    return (
        f"{name} predicted {format_value(predicted)}, measured {format_value(measured)}, x"
        f" {measured / predicted:.2f}"
    )


def plan_residual(
    file: Path,
    checked: ValidatedRun,
    config: Config,
    *,
    gpu: str,
    per_node: int,
    say: Callable[[str], None],
) -> PlanResidual | None:
    """Return the listener that compares a run with its plan.

    Args:
        file: Configuration of the run. Its plan has the same name with the suffix `.plan.json`.
        checked: The run.
        config: Configuration from which `checked` was made.
        gpu: Name of the device in the catalogue, or `cpu`.
        per_node: Number of processes of this machine.
        say: Receives lines for the console.

    Returns:
        The listener, or None if there is no plan or the run differs from it.
    """
    plan_file = file.with_suffix(".plan.json")
    if not plan_file.is_file():
        return None
    try:
        plan = json.loads(plan_file.read_text(encoding="utf-8"))
        differences = _differences(plan, checked, config, gpu=gpu, per_node=per_node)
        if differences:
            say(f"plan    {plan_file} is not compared with this run: {differences[0]}")
            return None
        # On a CPU the measured memory is that of the process, libraries included.
        memory_key = "needed_bytes" if gpu == "cpu" else "allocated_bytes"
        return PlanResidual(
            predicted_seconds=plan["step"]["seconds"],
            predicted_bytes=plan["memory"][memory_key],
            say=say,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(
            f"plan    {plan_file} is not compared with this run: it cannot be read"
            f" ({type(error).__name__}: {error})"
        )
        return None


_PLAN_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def _differences(
    plan: Mapping[str, Any], checked: ValidatedRun, config: Config, *, gpu: str, per_node: int
) -> list[str]:
    """Return the differences because of which the run cannot be compared with the plan."""
    cluster = plan["cluster"]
    modelled = plan["priced"]
    resolved = checked.resolved
    compute = _PLAN_DTYPES.get(resolved.precision.compute or "", "fp32")
    reduce = _PLAN_DTYPES.get(resolved.precision.reduce or "", "fp32")
    planned_per_node = min(cluster["devices"], cluster["devices_per_node"])
    model_section = None
    if config.model is not None:
        model_section = config.model.model_dump(mode="json", exclude_unset=True)

    # Name, value of the plan, value of the run.
    comparisons: list[tuple[str, Any, Any]] = [
        ("device", cluster["device"], gpu),
        ("processes", cluster["devices"], resolved.layout.world_size),
        ("processes per machine", planned_per_node, per_node),
        ("the model", modelled["model"], model_section),
        ("parameters", plan["parameters"], checked.parameters),
        ("sequence", plan["sequence"], checked.data.train.length),
        ("precision", plan["precision"], compute),
        ("reduction", modelled["reduce"], reduce),
        ("optimizer.states", modelled["optimizer_states"], resolved.optimizer.states),
        ("compiled", plan["compiled"], resolved.compile.enabled),
    ]
    for name, degree in layout_of(resolved).items():
        comparisons.append((name, modelled["layout"][name], degree))
    differences = [
        f"{name}: {planned} in the plan, {actual} in the run"
        for name, planned, actual in comparisons
        if planned != actual
    ]
    # The effect of these settings would look like an error of the plan.
    differences += [f"plans do not model {setting}" for setting in unmodelled(config)]
    return differences
