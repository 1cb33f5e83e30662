"""Compares the measured time and memory of a run that `plait plan --out` wrote with the plan: one line, and a row in a history where the
file names one.

A listener for one rank. The first steps, in which buffers come into being, do not count. A run that is not the one that was planned
(another layout, model or device, or a setting that no plan prices) is not compared, and told so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from plait.errors import InputError
from plait.events import Event, RunEnded, StepDone
from plait.files import user_path
from plait.planner.auto import layout_of
from plait.planner.history import Measured, append
from plait.planner.unpriced import unpriced
from plait.units import format_bytes

if TYPE_CHECKING:
    from plait.config.schema.config import Config
    from plait.train.session import ValidatedRun

WARM, STEPS, FEWEST = 2, 8, 3
"""Steps that do not count, that do, and fewer than which say too little."""


class Residual:
    """Hears steps; after `STEPS` of them says and keeps how far the plan was off."""

    def __init__(self, planned: Measured, *, needed_bytes: float, history: Path | None, say: Callable[[str], None]) -> None:
        self._planned, self._needed, self._history, self._say = planned, needed_bytes, history, say
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
        if len(self._seconds) >= STEPS or (isinstance(event, RunEnded) and len(self._seconds) >= FEWEST):
            self._told = True
            self._tell()

    def _tell(self) -> None:
        planned, seconds = self._planned, median(self._seconds)
        on_cpu = planned.gpu == "cpu"
        # On a CPU what is seen is the process, libraries included: for the eye, not for the fit.
        predicted_bytes = self._needed if on_cpu else planned.predicted_bytes
        measured = replace(
            planned,
            seconds=seconds,
            bytes=None if on_cpu else float(self._peak),
            steps=len(self._seconds),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        parts = [_beside("step", planned.predicted_seconds, seconds, lambda value: f"{value:.4g} s")]
        parts += [_beside("memory", predicted_bytes, float(self._peak), format_bytes)]
        kept = ""
        if self._history is not None:
            try:
                append(self._history, measured)
                kept = f", kept in {self._history}"
            except InputError as error:  # the run is worth more than the note about it
                kept = f", {error}"
        self._say(f"plan    {'; '.join(parts)}; {len(self._seconds)} steps{kept}")


def _beside(name: str, predicted: float | None, measured: float, words: Callable[[float], str]) -> str:
    if not predicted:
        return f"{name} {words(measured)}"
    return f"{name} predicted {words(predicted)}, measured {words(measured)}, x {measured / predicted:.2f}"


def residual_of(
    file: Path, checked: ValidatedRun, config: Config, *, gpu: str, machine: str, per_node: int, say: Callable[[str], None]
) -> Residual | None:
    """The listener for a run of `file`, whose plan is next to it; None where there is none, or the run is another one.

    `config` is what the run was checked from, `gpu` the catalogue's name of the device that runs, `machine` what it is where that is a CPU,
    `per_node` the processes of this machine. What is measured is kept where `run.history` says.
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
        planned = Measured(
            gpu=gpu,
            machine=machine if gpu == "cpu" else "",
            devices=plan["cluster"]["devices"],
            devices_per_node=plan["cluster"]["devices_per_node"],
            precision=plan["precision"],
            compiled=plan["compiled"],
            sequence=plan["sequence"],
            architecture=plan["priced"]["architecture"],
            layout=plan["priced"]["layout"],
            seconds=0.0,
            predicted_seconds=plan["step"]["seconds"],
            predicted_bytes=plan["memory"]["allocated_bytes"],
        )
        wanted = config.run.history if config.run is not None else None
        history = user_path(wanted, "run.history") if wanted is not None else None
        return Residual(planned, needed_bytes=plan["memory"]["needed_bytes"], history=history, say=say)
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"plan    {beside} is not compared with this run: it cannot be read ({type(error).__name__}: {error})")
        return None


_HALF = {"bfloat16": "bf16", "float16": "fp16"}


def _differences(plan: Mapping[str, Any], checked: ValidatedRun, config: Config, *, gpu: str, per_node: int) -> list[str]:
    planned = dict(plan["priced"]["layout"])
    mine = layout_of(checked.resolved)
    cluster, precision = plan["cluster"], checked.resolved.precision
    section = config.model.model_dump(mode="json", exclude_unset=True) if config.model is not None else None
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
    return [f"{name} was planned as {was} and is {now}" for name, was, now in pairs if was != now] + left_out
