"""Measured runs of Plait as a job, which calibration fits to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner import hardware
from plait.planner.architecture import Architecture
from plait.planner.frameworks import Framework, plait, with_compiled_blocks
from plait.planner.hardware import PRECISIONS, stack
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, Layouts


@dataclass(frozen=True)
class Measured:
    """Measured run of Plait.

    Attributes:
        gpu: Device of the catalogue.
        machine: Processor and threads per process if the device is a CPU. Empty for GPUs.
        devices: Number of processes.
        devices_per_node: Processes per machine.
        precision: Name in `hardware.PRECISIONS`.
        compiled: Whether blocks were compiled.
        sequence: Tokens per sample.
        architecture: Fields of `Architecture`.
        layout: Fields of `Layouts`; schedule and recompute by name.
        seconds: Measured seconds per step.
        bytes: Peak of the fullest rank's allocator. None if the memory of the process was measured.
        predicted_seconds: Seconds per step predicted with the constants that ship.
        predicted_bytes: Peak bytes predicted with the constants that ship.
        steps: Number of timed steps.
        at: Time of the measurement, ISO 8601.
    """

    gpu: str
    machine: str
    devices: int
    devices_per_node: int
    precision: str
    compiled: bool
    sequence: int
    architecture: Mapping[str, Any]
    layout: Mapping[str, Any]
    seconds: float
    bytes: float | None = None
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    steps: int = 0
    at: str = ""


@dataclass(frozen=True)
class MeasuredRuns:
    """Measured runs as one job, for `calibrate`.

    Attributes:
        job: The runs, one entry each.
        seconds: Seconds per step [runs]; NaN if not measured.
        peaks: Peak bytes and their kind (allocated, reserved, total) per run; None if not measured.
    """

    job: Job
    seconds: NDArray[np.float64]
    peaks: Sequence[tuple[float, str] | None]

    def take(self, indices: NDArray[np.int64]) -> MeasuredRuns:
        """Return the runs at these indices."""
        return MeasuredRuns(
            self.job.take(indices), self.seconds[indices], [self.peaks[index] for index in indices]
        )


def facts_of(model: Architecture) -> dict[str, Any]:
    """Return the fields of an Architecture as plain values."""
    values = asdict(model)
    for name, value in values.items():
        if hasattr(value, "item"):
            values[name] = value.item()
    return values


def layout_facts(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout with schedule and recomputation by name."""
    values = {f.name: layout.get(f.name, getattr(Layouts(), f.name)) for f in fields(Layouts)}
    return values | {
        "schedule": SCHEDULES[int(values["schedule"])],
        "recompute": RECOMPUTE[int(values["recompute"])],
    }


def runs_of(measured: Iterable[Measured]) -> MeasuredRuns:
    """Convert at least one measured run to a job."""
    runs = list(measured)
    models = [Architecture(**run.architecture) for run in runs]
    devices = [
        hardware.cluster(run.gpu, run.devices, devices_per_node=run.devices_per_node).device
        for run in runs
    ]

    job = Job(
        model=stack(models),
        device=stack(devices),
        framework=stack([_framework(run) for run in runs]),
        layouts=Layouts.of([_layout(run) for run in runs]),
        sequence=np.array([run.sequence for run in runs]),
        precision=np.array([PRECISIONS.index(run.precision) for run in runs]),
        own=all(
            not run.compiled and model.is_counted for run, model in zip(runs, models, strict=True)
        ),
    )
    peaks = [None if run.bytes is None else (run.bytes, "allocated") for run in runs]
    return MeasuredRuns(job, np.array([run.seconds for run in runs], dtype=float), peaks)


def _framework(run: Measured) -> Framework:
    framework = plait(precision=run.precision)
    return with_compiled_blocks(framework) if run.compiled else framework


def _layout(run: Measured) -> dict[str, Any]:
    schedule = SCHEDULES.index(run.layout["schedule"])
    recompute = RECOMPUTE.index(run.layout["recompute"])
    return {**run.layout, "schedule": schedule, "recompute": recompute}
