"""Measurements of a machine for the planner.

`measure` measures the rates of matrix products, memory and links, and the times of a few steps of a
small model on several layouts. The same processes run all layouts, and an engine is closed before
the next is created. The model is built from a configuration of Transformers on meta, the data are
random tokens, and `plait.initialize` creates the engines as in any run (`time_steps`). All
operations are timed in turn, for several rounds, and the median of each is used, as in
`comm.measure`. A calibration takes minutes at most.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, Mesh, build_mesh
from plait.cluster.small_messages import max_over_ranks
from plait.comm.measure import measure_group
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.losses.loss import causal_lm_loss
from plait.planner.calibrate import (
    DeviceRates,
    Measured,
    calibration_layouts,
    facts_of,
    layout_facts,
)
from plait.planner.hardware import Cluster
from plait.planner.models import Model, from_config
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import price
from plait.sizes import MIB

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


_ROUNDS = 7


@dataclass(frozen=True)
class Pace:
    """Number of repetitions in a calibration.

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
        waiting: Fraction of the duration of a step during which no rank computed, for data-parallel
            layouts. It can be measured on CPU cores only, and is 0 on GPUs. Most of this time other
            programs used the cores; a small part is communication.
    """

    rates: DeviceRates
    runs: list[Measured]
    waiting: float


def calibration_request(cluster: Cluster) -> Request:
    """Return the planning request whose layouts a calibration measures on a cluster.

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
    """Return the number of calls that `measure` makes to its callback."""
    return 2 + pace.rounds * len(_layouts(request))


def measure(
    request: Request, *, machine: str, pace: Pace, done: Callable[[str], None]
) -> CalibrationResult:
    """Measure the rates of the device and the step time of every layout. Collective.

    Args:
        request: Result of `calibration_request`. It must be the same in all processes.
        machine: Name of the machine, for measurements on CPU cores.
        pace: Amount of work.
        done: Progress callback. Receives a description after every measurement.
    """
    ranks = Layout(dp_replicate=request.cluster.devices)
    # All measurements share this process group.
    with closing(build_mesh(ranks, groups=Groups(levels=("dp_replicate",)))) as mesh:
        device = mesh.device
        products = _measure_products(request, device)
        memory_bytes = 256 * MIB if accelerator.is_accelerator(device) else 64 * MIB
        memory = _measure_addition(memory_bytes, device=device)
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
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return measure_products(shapes, dtype=dtypes[request.precision], device=device)


def measure_products(
    shapes: list[tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Return the FLOP/s of matrix multiplications on the slowest rank. Collective.

    Args:
        shapes: (rows, inner, columns) of each product [rows, inner] x [inner, columns].
        dtype: Dtype of the matrices.
        device: Device of this rank.

    Returns:
        FLOP/s, keyed by a string such as "2048 x 2048 x 2048".
    """
    operations: dict[str, Callable[[], object]] = {}
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, dtype=dtype, device=device)
        right = torch.randn(inner, columns, dtype=dtype, device=device)
        operations[f"{rows} x {inner} x {columns}"] = partial(torch.mm, left, right)
    seconds = _time_operations(operations, device)
    return {
        name: 2.0 * rows * inner * columns / seconds[name]
        for name, (rows, inner, columns) in zip(seconds, shapes, strict=True)
    }


def _measure_addition(nbytes: int, *, device: torch.device) -> float:
    """Return the bytes/s of an addition on the slowest rank. Collective.

    Args:
        nbytes: Size of each of the two float32 tensors that are read, and of the one written.
        device: Device of this rank.
    """
    left, right = (torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    add = partial(torch.add, left, right, out=torch.empty_like(left))
    return 3.0 * nbytes / _time_operations({"add": add}, device)["add"]


def _time_operations(
    operations: dict[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each operation on the slowest rank. Collective."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(_ROUNDS):
        for name, operation in operations.items():
            # All processes compute at the same time, as in a training step.
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            operation()
            accelerator.synchronize(device)
            times[name].append(time.perf_counter() - start)

    # The first round selects kernels and allocates memory.
    medians = [median(rounds[1:]) for rounds in times.values()]
    # A step waits for the slowest rank.
    slowest = max_over_ranks(medians, dist.group.WORLD, device=device)
    return dict(zip(times, slowest, strict=True))


def _measure_links(mesh: Mesh, seconds: float) -> tuple[float, float] | None:
    """Return (latency, seconds per byte) of an all-reduce, or None for one process."""
    group = mesh.group("dp_replicate")
    if group is None or dist.get_world_size() == 1:
        return None
    links = measure_group(
        "dp_replicate", group, mesh.levels("dp_replicate"), device=mesh.device, seconds=seconds
    )
    cost = links.whole.costs["all_reduce"]
    return cost.fixed_seconds, cost.seconds_per_byte


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


@dataclass(frozen=True)
class TimedSteps:
    """Times of steps, without the first one, which allocates buffers and optimizer states.

    Attributes:
        seconds: Wall-clock seconds of each step on the slowest rank.
        processor_seconds: Processor seconds of each step on the rank that used the most. This is
            the cost without waiting; other programs hardly change it.
        peak_bytes: Largest peak of the allocators of all ranks. None on CPUs, where processes keep
            memory that no layout needs.
    """

    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]
    peak_bytes: int | None = None


def time_steps(
    model: Mapping[str, Any], config: Mapping[str, Any], *, sequence: int, steps: int
) -> TimedSteps:
    """Time training steps of a causal language model with random tokens. Collective.

    Args:
        model: Fields of the model's configuration in Transformers.
        config: The configuration of the run.
        sequence: Tokens per sample.
        steps: Number of timed steps.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"use_cache": False, **model}
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
        )
    engine = initialize(meta_model.train(), config, loss_fn=causal_lm_loss, total_steps=1 + steps)
    try:
        accelerator.reset_peak(engine.device)
        samples = engine.config.batch.micro_batch_size * engine.config.batch.accumulation
        # Ranks that share a slice of the batch need the same tokens.
        generator = torch.Generator().manual_seed(engine.dp_rank)
        times = []
        for _ in range(1 + steps):
            tokens = torch.randint(
                0, fields["vocab_size"], (samples, sequence), generator=generator
            )
            times.append(_time_step(engine, {"input_ids": tokens, "labels": tokens}))
        wall_seconds, processor_seconds = zip(*times[1:], strict=True)
        return TimedSteps(wall_seconds, processor_seconds, _peak(engine.device))
    finally:
        engine.close()
        # The next layout needs the memory now, also that of reference cycles.
        del engine, meta_model
        gc.collect()


def _time_step(engine: Engine, batch: Any) -> tuple[float, float]:
    """Return the maxima over all ranks: (wall-clock seconds, processor seconds). Collective."""
    # All ranks start together, so that none waits for a late one inside the measured time.
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    start = time.perf_counter()
    processor_start = time.process_time()
    # Reading the loss waits for the step.
    float(engine.train_batch(batch).loss)
    seconds = [time.perf_counter() - start, time.process_time() - processor_start]
    wall_seconds, processor_seconds = max_over_ranks(
        seconds, dist.group.WORLD, device=engine.device
    )
    return wall_seconds, processor_seconds


def _peak(device: torch.device) -> int | None:
    if not accelerator.is_accelerator(device):
        return None
    return max_over_ranks([accelerator.peak_bytes(device)], dist.group.WORLD, device=device)[0]


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


def waiting_share(times: Sequence[TimedSteps]) -> float:
    """Return the fraction of time in which the busiest rank's processor did not run the step."""
    wall_seconds = sum(sum(timed.seconds) for timed in times)
    used_seconds = sum(sum(timed.processor_seconds) for timed in times)
    return max(0.0, 1 - used_seconds / wall_seconds)
