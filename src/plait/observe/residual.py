"""Compares the measured time and memory of a run of `plait plan --out` with the plan, in one line.

A listener for one rank. The first steps, in which buffers come into being, do not count. A run that
differs from the plan (another layout, model or device, or a setting that no plan prices) is not
compared, and the reason is printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from plait.events import Event, RunEnded, StepDone
from plait.planner.auto import layout_of
from plait.planner.unpriced import unpriced
from plait.units import format_bytes

if TYPE_CHECKING:
    from plait.config.schema.config import Config
    from plait.train.session import ValidatedRun

WARM = 2
STEPS = 8
FEWEST = 3
"""Steps that do not count, that do, and fewer than which say too little."""


class Residual:
    """Listens to steps; after `STEPS` of them prints how far the plan was off."""

    def __init__(
        self, *, predicted_seconds: float, predicted_bytes: float, say: Callable[[str], None]
    ) -> None:
        self._predicted_seconds = predicted_seconds
        self._predicted_bytes = predicted_bytes
        self._say = say
        self._seen = 0
        self._seconds: list[float] = []
        self._peak = 0
        self._told = False

    def __call__(self, event: Event) -> None:
        if self._told:
            return
        if isinstance(event, StepDone):
            self._seen += 1
            self._peak = max(self._peak, event.memory_bytes)
            if self._seen > WARM and not event.skipped:
                self._seconds.append(event.seconds)
        if len(self._seconds) >= STEPS or (
            isinstance(event, RunEnded) and len(self._seconds) >= FEWEST
        ):
            self._told = True
            self._tell()

    def _tell(self) -> None:
        step = _beside(
            "step", self._predicted_seconds, median(self._seconds), lambda value: f"{value:.4g} s"
        )
        memory = _beside("memory", self._predicted_bytes, float(self._peak), format_bytes)
        self._say(f"plan    {step}; {memory}; {len(self._seconds)} steps")


def _beside(
    name: str, predicted: float | None, measured: float, words: Callable[[float], str]
) -> str:
    if not predicted:
        return f"{name} {words(measured)}"
    return (
        f"{name} predicted {words(predicted)}, measured {words(measured)}, x"
        f" {measured / predicted:.2f}"
    )


def residual_of(
    file: Path,
    checked: ValidatedRun,
    config: Config,
    *,
    gpu: str,
    per_node: int,
    say: Callable[[str], None],
) -> Residual | None:
    """Return the listener for a run of `file`, whose plan is next to it; None if there is no plan,
    or the run differs from it.

    `config` is what the run was checked from, `gpu` the catalogue's name of the device that runs,
    `per_node` the processes of this machine.
    """
    beside = file.with_suffix(".plan.json")
    if not beside.is_file():
        return None
    try:
        plan = json.loads(beside.read_text(encoding="utf-8"))
        differences = _differences(plan, checked, config, gpu=gpu, per_node=per_node)
        if differences:
            say(f"plan    {beside} is not compared with this run: {differences[0]}")
            return None
        # On a CPU the measured memory is that of the process, libraries included.
        memory = plan["memory"]
        nbytes = memory["needed_bytes"] if gpu == "cpu" else memory["allocated_bytes"]
        return Residual(predicted_seconds=plan["step"]["seconds"], predicted_bytes=nbytes, say=say)
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(
            f"plan    {beside} is not compared with this run: it cannot be read"
            f" ({type(error).__name__}: {error})"
        )
        return None


_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def _differences(
    plan: Mapping[str, Any], checked: ValidatedRun, config: Config, *, gpu: str, per_node: int
) -> list[str]:
    planned = dict(plan["priced"]["layout"])
    mine = layout_of(checked.resolved)
    cluster = plan["cluster"]
    precision = checked.resolved.precision
    section = (
        config.model.model_dump(mode="json", exclude_unset=True)
        if config.model is not None
        else None
    )
    pairs: list[tuple[str, Any, Any]] = [
        ("device", cluster["device"], gpu),
        ("processes", cluster["devices"], checked.resolved.layout.world_size),
        ("processes of a machine", min(cluster["devices"], cluster["devices_per_node"]), per_node),
        ("the model", plan["priced"]["model"], section),
        ("parameters", plan["parameters"], checked.parameters),
        ("sequence", plan["sequence"], checked.data.train.length),
        ("precision", plan["precision"], _HALF.get(precision.compute or "", "fp32")),
        ("reduction", plan["priced"]["reduce"], _HALF.get(precision.reduce or "", "fp32")),
        ("optimizer.states", plan["priced"]["optimizer_states"], checked.resolved.optimizer.states),
        ("compiled", plan["compiled"], checked.resolved.compile.enabled),
        *((name, planned[name], value) for name, value in mine.items()),
    ]
    # What no plan prices would be taken for an error of the plan.
    left_out = [f"no plan prices {setting}" for setting in unpriced(config)]
    return [
        f"{name} was planned as {was} and is {now}" for name, was, now in pairs if was != now
    ] + left_out
