"""Measurements of a machine for the planner.

They are the rates of matrix products, memory and links, and the times of a few steps of a small
model on several layouts. The same processes run all layouts. It takes minutes at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, Mesh, build_mesh
from plait.comm.measure import measure_group
from plait.engine.device_rates import measure_addition, measure_products
from plait.engine.timed_steps import TimedSteps, time_steps
from plait.planner.calibration_runs import DeviceRates, calibration_layouts
from plait.planner.choice import price
from plait.planner.hardware import Cluster
from plait.planner.measured import Measured, facts_of, layout_facts
from plait.planner.models import Model, from_config
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.units import MIB, dtype_of

# Fields of the configuration of Transformers for the measured model, on CPU cores and on GPUs.
ON_CPU: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ON_GPU: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Pace:
    """Amount of work of a calibration.

    Attributes:
        rounds: Number of times that each layout is measured.
        steps: Number of timed steps per layout and round.
        link_seconds: Seconds for the measurement of links.
    """

    rounds: int = 3
    steps: int = 2
    link_seconds: float = 2.0


@dataclass(frozen=True)
class CalibrationResult:
    """Result of a calibration.

    Attributes:
        rates: Rates of the device.
        runs: Step time of each layout.
        waiting: On CPU cores, the share of the time of data-parallel steps in which no rank
            computed: time that other programs used, and a little of the links. 0 on GPUs, where it
            cannot be measured.
    """

    rates: DeviceRates
    runs: list[Measured]
    waiting: float


def calibration_request(cluster: Cluster) -> Request:
    """Return the request whose layouts are measured on a cluster.

    Its model is a Llama of 17 M parameters on CPU cores, and of 0.5 B parameters on GPUs.
    """
    device = cluster.device
    if device.name == "cpu":
        fields = dict(ON_CPU)
        precision = "fp32"
    else:
        fields = dict(ON_GPU)
        precision = "bf16" if "bf16" in device.flops else "fp16"
    model = Model(from_config(fields, source="the measured model"), {"config": fields})
    return Request(
        model, cluster, 4 * cluster.devices, fields["max_position_embeddings"], precision
    )


def measurements(request: Request, pace: Pace) -> int:
    """Return the number of times that `measure` calls back."""
    return 2 + pace.rounds * len(_layouts(request))


def measure(
    request: Request, *, machine: str, pace: Pace, done: Callable[[str], None]
) -> CalibrationResult:
    """Measure the rates of the device and the step time of every layout. Collective.

    Args:
        request: The result of `calibration_request` on all its processes.
        machine: Name of the machine, for measurements on CPU cores.
        pace: Amount of work.
        done: Called with a description after every measurement.
    """
    with _process_group(request.cluster.devices) as mesh:
        device = mesh.device
        products = _measure_products(request, device)
        memory_bytes = 256 * MIB if accelerator.is_accelerator(device) else 64 * MIB
        memory = measure_addition(memory_bytes, device=device)
        done("products and memory")
        rates = DeviceRates(products, memory, _measure_links(mesh, pace.link_seconds))
        done("links")

        # Rounds over all layouts, so that a disturbance of the machine affects all of them.
        layouts = _layouts(request)
        times: list[list[TimedSteps]] = [[] for _ in layouts]
        for _ in range(pace.rounds):
            for index, layout in enumerate(layouts):
                times[index].append(time_layout(request, layout, steps=pace.steps))
                done(f"layout {index + 1} of {len(layouts)}")

        runs = []
        data_parallel: list[TimedSteps] = []
        for layout, layout_times in zip(layouts, times, strict=True):
            runs.append(measured_of(request, layout, layout_times, machine=machine))
            if layout["tp"] * layout["pp"] == 1:
                data_parallel += layout_times
        waiting = waiting_share(data_parallel) if device.type == "cpu" else 0.0
        return CalibrationResult(rates, runs, waiting)


def _measure_products(request: Request, device: torch.device) -> dict[str, float]:
    model = request.model.architecture
    tokens = request.sequence * 2
    shapes = [
        (tokens, model.hidden, model.ffn),
        (tokens, model.ffn, model.hidden),
        (2048, 2048, 2048),
        (4096, 4096, 1024),
    ]
    dtype_names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = dtype_of(dtype_names[request.precision])
    return measure_products(shapes, dtype=dtype, device=device)


def waiting_share(times: Sequence[TimedSteps]) -> float:
    """Return the share of time in which the busiest rank's processor did not run the step."""
    wall_seconds = sum(sum(timed.seconds) for timed in times)
    used_seconds = sum(sum(timed.processor_seconds) for timed in times)
    return max(0.0, 1 - used_seconds / wall_seconds)


def _layouts(request: Request) -> list[dict[str, Any]]:
    return calibration_layouts(
        request.cluster.devices,
        batch=request.global_batch,
        heads=int(request.model.architecture.heads),
    )


def time_layout(request: Request, layout: Mapping[str, Any], *, steps: int) -> TimedSteps:
    """Time the steps of one layout. Collective.

    The configuration is the one that a plan would write for the layout.
    """
    candidate = price(request, [layout])[0]
    sections = {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    config = config_of(request, candidate, sections)
    # The model is built here, and the data are random.
    for section in ("model", "data"):
        del config[section]
    return time_steps(
        request.model.section["config"], config, sequence=request.sequence, steps=steps
    )


def measured_of(
    request: Request, layout: Mapping[str, Any], times: Sequence[TimedSteps], *, machine: str
) -> Measured:
    """Return the record of a layout's measurements, with the median of all steps.

    Args:
        request: The request.
        layout: The layout.
        times: Timed steps of each round.
        machine: Name of the machine. It is recorded for CPU cores only.
    """
    predicted = price(request, [layout])[0]
    peaks = [timed.peak_bytes for timed in times if timed.peak_bytes is not None]
    cluster = request.cluster
    return Measured(
        gpu=str(cluster.device.name),
        machine=machine if cluster.device.name == "cpu" else "",
        devices=cluster.devices,
        devices_per_node=int(cluster.device.devices_per_node),
        precision=request.precision,
        compiled=request.compile,
        sequence=request.sequence,
        architecture=facts_of(request.model.architecture),
        layout=layout_facts(layout),
        seconds=median(seconds for timed in times for seconds in timed.seconds),
        bytes=float(max(peaks)) if peaks else None,
        predicted_seconds=predicted.seconds,
        predicted_bytes=predicted.allocated,
        steps=sum(len(timed.seconds) for timed in times),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def _process_group(count: int) -> Iterator[Mesh]:
    """Make the process group that all measurements share."""
    mesh = build_mesh(Layout(dp_replicate=count), groups=Groups(levels=("dp_replicate",)))
    try:
        yield mesh
    finally:
        mesh.close()


def _measure_links(mesh: Mesh, seconds: float) -> tuple[float, float] | None:
    """Return the seconds per all-reduce and per byte, or None for a single process."""
    group = mesh.group("dp_replicate")
    if group is None or dist.get_world_size() == 1:
        return None
    levels = mesh.levels("dp_replicate")
    links = measure_group("dp_replicate", group, levels, device=mesh.device, seconds=seconds)
    cost = links.whole.costs["all_reduce"]
    return cost.fixed_seconds, cost.seconds_per_byte
