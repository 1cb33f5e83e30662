"""Optimizer states in host memory: what a step costs, and how large a model may be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from plait.cluster import accelerator
from plait.units import GIB
from plait.validation.catalogue import BF16, HOST_MEMORY
from plait.validation.context import Context, largest_size, require, timed
from plait.validation.models import MEDIUM, TINY, Workload, random_batch
from plait.validation.peers import plait_trainer
from plait.validation.rows import Verdict, verdict

SIZES: Mapping[str, Mapping[str, Any]] = {
    "medium": {"workload": MEDIUM},
    "tiny": {"workload": TINY},
}
REQUIRED_BYTES = {"medium": 24 * GIB, "tiny": 1 * GIB}
STEPS = 3
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "on_device": {**BF16, "zero_optimization": {"stage": 3}},
    "states_on_host": {**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": HOST_MEMORY}},
}


def optimizer(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Time steps with states on the device and on the host, and extrapolate the largest model.

    Peaks at two depths give bytes per layer. The largest model has as many layers as fit into all
    of the device's memory at that slope. It is not trained here: its states would fill the host's
    memory, and pinning them takes longer than all other rows.
    """
    require("transformers")
    context.group()
    workload: Workload = largest_size(context, SIZES, required_bytes=REQUIRED_BYTES)["workload"]
    half = workload.with_layers(workload.layers // 2)
    numbers: dict[str, Any] = {"workload": workload.as_dict()}
    for name, config in CONFIGS.items():
        seconds, peak = measure(context, workload, config)
        _, peak_of_half = measure(context, half, config)
        numbers[name] = {
            "seconds_per_step": seconds,
            "peak_bytes": peak,
            **extrapolated(context, workload, peak, half, peak_of_half),
        }
        context.progress(numbers)
    ratio = numbers["states_on_host"]["seconds_per_step"] / numbers["on_device"]["seconds_per_step"]
    return timed(context, verdict([], step_ratio=ratio, **numbers))


def measure(context: Context, workload: Workload, config: Mapping[str, Any]) -> tuple[float, int]:
    """Return (seconds per step, peak bytes on the device) of Plait."""
    batch = random_batch(workload, context.device, seed=0)
    trainer = plait_trainer(context, workload, config)
    try:
        trainer.step(batch)
        context.synchronize()
        accelerator.reset_peak(context.device)
        started = time.perf_counter()
        for _ in range(STEPS):
            trainer.step(batch)
        context.synchronize()
        seconds = (time.perf_counter() - started) / STEPS
        peak = (
            accelerator.peak_bytes(context.device)
            if accelerator.is_accelerator(context.device)
            else 0
        )
    finally:
        trainer.close()
        del trainer
        context.release_memory()
    return seconds, peak


def extrapolated(
    context: Context, workload: Workload, peak: int, half: Workload, peak_of_half: int
) -> dict[str, Any]:
    """Return bytes per layer, and the parameters of the largest model of this width."""
    layer_bytes = (peak - peak_of_half) / (workload.layers - half.layers)
    if layer_bytes <= 0:
        return {"bytes_per_layer": layer_bytes}
    capacity = accelerator.capacity_bytes(context.device.index or 0)
    layers = int((capacity - peak) / layer_bytes) + workload.layers
    return {
        "bytes_per_layer": layer_bytes,
        "extrapolated_layers": layers,
        "extrapolated_parameters": workload.with_layers(layers).parameters,
    }
