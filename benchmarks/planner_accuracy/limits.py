"""What no run can have: more memory than its device, a step faster than the peak of its devices. Each says which rule is broken.

Of processes on CPU cores neither is known: the catalogue has those of one core, and a machine's own come from its runs.
"""

from __future__ import annotations

import numpy as np

from plait.planner.architecture import Architecture
from plait.planner.hardware import DeviceSpec

_UNITS = 1.1
"""Of a device's memory: tables write GB for GiB, and a size that is sold for the size that is there."""


def beyond_memory(held: float, device: DeviceSpec) -> str | None:
    """Of bytes on one device; None where they fit."""
    if device.on_cpu or held <= _UNITS * device.memory_bytes:
        return None
    return f"{held / 1e9:.4g} GB, and {device.title} has {device.memory_bytes / 1e9:.4g}"


def beyond_peak(
    seconds: float,
    model: Architecture,
    device: DeviceSpec,
    precision: str,
    *,
    samples: float,
    sequence: float,
    devices: float,
) -> str | None:
    """Of a step of `samples`; None where its devices may compute it in `seconds`."""
    if device.on_cpu:
        return None
    peak = float(device.flops.get(precision, np.nan))
    reached = float(model.model_flops(sequence)) * samples * sequence / (seconds * devices * peak)
    if not reached > 1:  # NaN of a device that does not compute so
        return None
    return f"its model FLOPs are {reached:.3g} of the peak of {devices:g} x {device.title} in {precision}, and no run has an MFU above 1"
