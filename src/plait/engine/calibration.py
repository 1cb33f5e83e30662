"""What a machine really does, for the planner: rates of products, memory and links, and a few steps
of a small model in several layouts.

Collective over the processes of the run, which stay for all layouts. Minutes at most; listeners are
called after every measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

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
    """How long to measure."""

    rounds: int = 3
    steps: int = 2
    link_seconds: float = 2.0


@dataclass(frozen=True)
class Found:
    """What was measured."""

    rates: DeviceRates
    runs: list[Measured]
    waiting: float
    """On CPU cores the share of data-parallel steps in which no rank computed: what other programs
    took, and a little of the links. 0 on GPUs, where it cannot be seen.
    """


def calibration_request(cluster: Cluster) -> Request:
    """The model of the measured steps: a Llama of 17 M parameters on CPU cores, of 0.5 B on
    GPUs.
    """
    fields = dict(ON_CPU if cluster.device.name == "cpu" else ON_GPU)
    precision = (
        "fp32"
        if cluster.device.name == "cpu"
        else "bf16"
        if "bf16" in cluster.device.flops
        else "fp16"
    )
    model = Model(from_config(fields, source="the measured model"), {"config": fields})
    return Request(
        model, cluster, 4 * cluster.devices, fields["max_position_embeddings"], precision
    )


def measurements(request: Request, pace: Pace) -> int:
    """How often `measure` calls back."""
    return 2 + pace.rounds * len(_layouts(request))


def measure(request: Request, *, machine: str, pace: Pace, done: Callable[[str], None]) -> Found:
    """The rates, and the step time of every layout. Collective over `request.cluster.devices`
    processes.
    """
    processes = request.cluster.devices
    with _processes(processes) as mesh:
        device = mesh.device
        model = request.model.architecture
        tokens = request.sequence * 2
        shapes = [
            (tokens, model.hidden, model.ffn),
            (tokens, model.ffn, model.hidden),
            (2048, 2048, 2048),
            (4096, 4096, 1024),
        ]
        dtype = dtype_of(
            {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[request.precision]
        )
        products = measure_products(shapes, dtype=dtype, device=device)
        memory = measure_addition(
            256 * MIB if accelerator.is_one(device) else 64 * MIB, device=device
        )
        done("products and memory")
        rates = DeviceRates(products, memory, _links(mesh, pace.link_seconds))
        done("links")
        layouts = _layouts(request)
        times: list[list[TimedSteps]] = [[] for _ in layouts]
        for _ in range(pace.rounds):
            for index, layout in enumerate(layouts):
                times[index].append(time_layout(request, layout, steps=pace.steps))
                done(f"layout {index + 1} of {len(layouts)}")
        runs = [
            measured_of(request, layout, found, machine=machine)
            for layout, found in zip(layouts, times, strict=True)
        ]
        alone = [
            found
            for layout, each in zip(layouts, times, strict=True)
            if layout["tp"] * layout["pp"] == 1
            for found in each
        ]
        return Found(rates, runs, waiting_share(alone) if device.type == "cpu" else 0.0)


def waiting_share(times: Sequence[TimedSteps]) -> float:
    """The share of these steps in which the busiest rank's processor had something else to do, or
    nothing.
    """
    wall, used = (
        sum(sum(getattr(found, name)) for found in times)
        for name in ("seconds", "processor_seconds")
    )
    return max(0.0, 1 - used / wall)


def _layouts(request: Request) -> list[dict[str, Any]]:
    return calibration_layouts(
        request.cluster.devices,
        batch=request.global_batch,
        heads=int(request.model.architecture.heads),
    )


def time_layout(request: Request, layout: Mapping[str, Any], *, steps: int) -> TimedSteps:
    """Steps of one layout by the configuration that a plan would write for it."""
    config = config_of(
        request,
        price(request, [layout])[0],
        {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}},
    )
    for section in ("model", "data"):
        del config[section]
    return time_steps(
        request.model.section["config"], config, sequence=request.sequence, steps=steps
    )


def measured_of(
    request: Request, layout: Mapping[str, Any], times: Sequence[TimedSteps], *, machine: str
) -> Measured:
    """As calibration takes it: the median of all steps."""
    predicted = price(request, [layout])[0]
    peaks = [found.peak_bytes for found in times if found.peak_bytes is not None]
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
        seconds=median(second for found in times for second in found.seconds),
        bytes=float(max(peaks)) if peaks else None,
        predicted_seconds=predicted.seconds,
        predicted_bytes=predicted.allocated,
        steps=sum(len(found.seconds) for found in times),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def _processes(count: int) -> Iterator[Mesh]:
    """The process group that all measurements share."""
    mesh = build_mesh(Layout(dp_replicate=count), groups=Groups(levels=("dp_replicate",)))
    try:
        yield mesh
    finally:
        mesh.close()


def _links(mesh: Mesh, seconds: float) -> tuple[float, float] | None:
    group = mesh.group("dp_replicate")
    if group is None or dist.get_world_size() == 1:
        return None
    found = measure_group(
        "dp_replicate", group, mesh.levels("dp_replicate"), device=mesh.device, seconds=seconds
    )
    cost = found.whole.costs["all_reduce"]
    return cost.fixed_seconds, cost.seconds_per_byte
