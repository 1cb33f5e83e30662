"""Runs of Plait itself that were measured, a JSON object a line: what a plan said, what came of it, and all that prices it anew.

`append` writes a line in one call, so that runs that end together do not mix. A line that cannot be read is skipped and told. `runs_of`
makes rows of it that calibration takes as it takes those of a CSV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.planner import hardware
from plait.planner.architecture import Architecture
from plait.planner.frameworks import plait, with_compiled_blocks
from plait.planner.hardware import PRECISIONS
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.limits import beyond_memory, beyond_peak
from plait.planner.row import Row, Variant
from plait.planner.runs import Runs, job_of_variants


@dataclass(frozen=True)
class Measured:
    """One run. Seconds of a step; bytes of the fullest rank."""

    gpu: str
    machine: str
    """What the name of the device leaves open: the processor and its threads a process. Empty for GPUs."""
    devices: int
    devices_per_node: int
    precision: str
    compiled: bool
    sequence: int
    architecture: Mapping[str, Any]
    layout: Mapping[str, Any]
    """Fields of `Layouts`; schedule and recompute by name."""
    seconds: float
    bytes: float | None = None
    """None where the process was measured and not the device's allocator."""
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    steps: int = 0
    at: str = ""
    """When, ISO 8601."""


def facts_of(model: Architecture) -> dict[str, Any]:
    """An Architecture as plain values."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in asdict(model).items()}


def layout_facts(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A layout with its schedule and recomputation by name."""
    found = {f.name: layout.get(f.name, getattr(Layouts(), f.name)) for f in fields(Layouts)}
    return found | {"schedule": SCHEDULES[int(found["schedule"])], "recompute": RECOMPUTE[int(found["recompute"])]}


def append(path: Path, measured: Measured) -> None:
    """Add a line. Raises InputError where the file cannot be written."""
    line = (json.dumps(asdict(measured), allow_nan=False) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line that was cut off must not swallow this one
                line = b"\n" + line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(
            f"{path}: the measured step cannot be added ({error.strerror}); set PLAIT_CACHE to a folder that can be written"
        ) from None


def read(path: Path) -> tuple[list[Measured], list[str]]:
    """(the runs, a warning for each line that holds none). Raises InputError for a file that cannot be opened."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a history of measured runs") from None
    found, warnings = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            measured = Measured(**json.loads(line))
            _check(measured)
            _check_limits(measured, _variant(0, measured))
        except (ValueError, TypeError, KeyError, AttributeError, InputError) as error:
            warnings.append(f"{path}, line {number}: skipped, it holds no measured run ({error})")
        else:
            found.append(measured)
    return found, warnings


_NAMES = ("name", "model_type", "activation", "uncut", "schedule", "recompute")
"""Facts that are no numbers."""
_AT_LEAST_ONE = (
    *("devices", "devices_per_node", "sequence", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"),
    *("pp", "vpp", "tp", "cp", "ep", "dp_replicate", "dp_shard", "every", "micro_batch", "accumulation"),
)


def _check(measured: Measured) -> None:
    """Raise ValueError for a number that no run has: from one such row the fit would make constants that are none."""
    counts = {name: getattr(measured, name) for name in ("devices", "devices_per_node", "sequence")}
    for name, value in {**measured.architecture, **measured.layout, **counts}.items():
        least = 1 if name in _AT_LEAST_ONE else 0
        if name not in _NAMES and not (isinstance(value, int | float) and least <= value < inf):
            raise ValueError(f"{name} = {value!r}, not a number of at least {least}")
    for name, value in (("seconds", measured.seconds), ("bytes", measured.bytes)):
        if not (name == "bytes" and value is None) and not (isinstance(value, int | float) and 0 < value < inf):
            raise ValueError(f"{name} = {value!r}, not a number above 0")


def _check_limits(measured: Measured, variant: Variant) -> None:
    """Raise ValueError for what no run of its devices has."""
    if measured.bytes is not None and (rule := beyond_memory(measured.bytes, variant.device)):
        raise ValueError(f"bytes = {measured.bytes!r}: {rule}")
    at = Layouts(**variant.layout)
    rule = beyond_peak(
        measured.seconds,
        variant.model,
        variant.device,
        measured.precision,
        samples=float(at.micro_batch * at.accumulation * at.dp),
        sequence=measured.sequence,
        devices=measured.devices,
    )
    if rule:
        raise ValueError(f"seconds = {measured.seconds!r}: {rule}")


def same_machine(measured: Measured, *, gpu: str, machine: str) -> bool:
    """Whether it says something of this device; processes on CPU cores also of this processor with as many threads."""
    return measured.gpu == gpu and (gpu != "cpu" or measured.machine == machine)


def runs_of(history: Iterable[Measured]) -> Runs:
    """As calibration takes them."""
    history = list(history)
    variants = [_variant(index, measured) for index, measured in enumerate(history)]
    rows: Sequence[Row] = [_row(measured) for measured in history]
    return Runs(tuple(rows), tuple(variants), job_of_variants(variants) if variants else None, {})


def _row(measured: Measured) -> Row:
    row = {"gpu": measured.gpu, "framework": "plait", "step_time_s": f"{measured.seconds:.9f}"}
    if measured.bytes is not None:
        row |= {"peak_mem_gb": f"{measured.bytes / 1e9:.9f}", "mem_def": "torch max_memory_allocated, GB"}
    return row


def _variant(index: int, measured: Measured) -> Variant:
    found = plait(precision=measured.precision)
    # Lines of versions that counted latent attention's parameters in a field of their own; where it has none there is nothing to know.
    known = {name: value for name, value in measured.architecture.items() if (name, value) != ("compressed", 0)}
    model = Architecture(**known)
    layout = dict(measured.layout)
    layout |= {"schedule": SCHEDULES.index(layout["schedule"]), "recompute": RECOMPUTE.index(layout["recompute"])}
    unknown = layout.keys() ^ {f.name for f in fields(Layouts)}
    if unknown:
        raise ValueError(f"layout: {', '.join(sorted(unknown))} missing or unknown")
    return Variant(
        row=index,
        model=model,
        device=hardware.cluster(measured.gpu, measured.devices, devices_per_node=measured.devices_per_node).device,
        framework=with_compiled_blocks(found) if measured.compiled else found,
        layout=layout,
        sequence=measured.sequence,
        precision=PRECISIONS.index(measured.precision),
        assumed=(),
        own=not measured.compiled and model.is_counted,
    )
