"""Runs and priors of a calibration: layouts to measure, constants from rates, and measured runs.

A few short runs are chosen that separate the constants from each other. The rates of the device
become the priors of the fit. The engine measures; this module is pure. `runs_of` turns
measured runs into a job, which calibration fits to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner import hardware
from plait.planner.architecture import Architecture
from plait.planner.constants import Knowledge
from plait.planner.hardware import DEVICE_FAMILIES, PRECISIONS, DeviceSpec, stack
from plait.planner.job import (
    RECOMPUTE,
    SCHEDULES,
    Job,
    Layouts,
    plait,
)
from plait.planner.step_time import BASE, INSIDE_STEP

RATE_WIDTH = 0.15
"""Uncertainty of a rate that was measured alone, compared to that in a step, as a logarithm."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates that one process of the machine reaches while the others do the same."""

    products: Mapping[str, float]
    """FLOP/s by `rows x inner x columns`, in the precision of the runs."""
    memory_bytes_per_second: float
    """Bandwidth of an addition, which reads two tensors and writes one."""
    all_reduce: tuple[float, float] | None = None
    """(seconds, seconds per byte) over all processes; None for one process."""


def priors_from_rates(
    known: Knowledge, device: DeviceSpec, rates: DeviceRates, *, processes: int, precision: str
) -> Knowledge:
    """Return priors in which measured rates replace the usual ones.

    Args:
        known: Priors for any machine.
        device: Device of the machine.
        rates: Measured rates.
        processes: Processes of one machine that were measured together.
        precision: Precision of the products.
    """
    family = DEVICE_FAMILIES[int(device.family)]
    suffix = ""
    crowd = 1.0
    if family == "cpu":
        # Processes share the memory, and the constants are those of a process alone.
        suffix = ".cpu"
        crowd = processes ** known.constants["crowding.cpu"].median
    measured = {
        f"gemm.{family}": (
            max(rates.products.values()) * crowd / float(device.flops[precision] * device.power)
        ),
        f"memory{suffix}": rates.memory_bytes_per_second * crowd / float(device.memory_bandwidth),
    }
    if rates.all_reduce is not None and processes <= int(device.domain):
        fixed, per_byte = rates.all_reduce
        # `traffic.collective_seconds`, solved for its constants.
        ring = 2 * (processes - 1) / processes
        share = ring * (processes + 0.5) / processes / float(device.link_bandwidth)
        if per_byte > 0:
            measured[f"link{suffix}"] = share / per_byte
        if fixed > 0:
            measured[f"latency{suffix}"] = fixed / (BASE + 2 * (processes - 1) * INSIDE_STEP)

    constants = dict(known.constants)
    for name, value in measured.items():
        constants[name] = replace(
            constants[name], median=float(value), width=max(RATE_WIDTH, 0.4 * constants[name].width)
        )
    return replace(known, constants=constants)


def calibration_layouts(processes: int, *, batch: int, heads: int) -> list[dict[str, Any]]:
    """Return layouts that differ in one property each.

    These are the micro-batch, the ZeRO stage, tp, pp, and recomputation.

    Args:
        processes: Number of processes.
        batch: Global batch, a multiple of 4 x `processes`.
        heads: Attention heads. With an odd number tp is left out.
    """
    full = RECOMPUTE.index("full")
    operators = RECOMPUTE.index("operators")
    per_rank = batch // processes
    layouts = [
        _layout(batch, replicate=processes, micro=per_rank),
        _layout(batch, replicate=processes, micro=1),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=full),
        _layout(batch, replicate=processes, micro=per_rank // 2, recompute=operators),
    ]
    if processes > 1:
        layouts += [
            _layout(batch, shard=processes, stage=1, micro=per_rank // 2),
            _layout(batch, shard=processes, stage=2, micro=1),
            _layout(batch, shard=processes, stage=3, micro=per_rank),
            _layout(batch, shard=processes, stage=3, micro=1),
        ]

    if processes % 2 == 0:
        half = processes // 2
        if heads % 2 == 0:
            layouts += [
                _layout(batch, replicate=half, tp=2, micro=batch // half),
                _layout(batch, replicate=half, tp=2, micro=2),
            ]
        for micro_batches in (2, 4):
            micro = batch // half // micro_batches
            layouts.append(_layout(batch, replicate=half, pp=2, micro=micro))

    unique = {tuple(sorted(layout.items())): layout for layout in layouts}
    return list(unique.values())


def _layout(
    batch: int,
    *,
    micro: int,
    replicate: int = 1,
    shard: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 0,
    recompute: int = 0,
) -> dict[str, Any]:
    micro = max(1, micro)
    return {
        "pp": pp,
        "schedule": SCHEDULES.index("1f1b" if pp > 1 else "none"),
        "tp": tp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "stage": stage,
        "recompute": recompute,
        "micro_batch": micro,
        "accumulation": batch // (replicate * shard * micro),
    }


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
        framework=stack([plait(precision=run.precision, compiled=run.compiled) for run in runs]),
        layouts=Layouts.of([_layout_of_run(run) for run in runs]),
        sequence=np.array([run.sequence for run in runs]),
        precision=np.array([PRECISIONS.index(run.precision) for run in runs]),
        has_exact_blocks=all(
            not run.compiled and model.is_counted for run, model in zip(runs, models, strict=True)
        ),
    )
    peaks = [None if run.bytes is None else (run.bytes, "allocated") for run in runs]
    return MeasuredRuns(job, np.array([run.seconds for run in runs], dtype=float), peaks)


def _layout_of_run(run: Measured) -> dict[str, Any]:
    schedule = SCHEDULES.index(run.layout["schedule"])
    recompute = RECOMPUTE.index(run.layout["recompute"])
    return {**run.layout, "schedule": schedule, "recompute": recompute}
