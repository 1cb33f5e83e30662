"""What a verification will do, decided before any process exists: the small model, the processes,
the batch, and what of the configuration stays as it is.

A Plan is data that every process gets. Degrees of tensor, sequence and pipeline parallelism are
never changed; those of data parallelism, the batch and the buckets shrink with the model, each with
a line that says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from plait.cluster import accelerator
from plait.cluster.accelerator import DeviceType
from plait.cluster.nccl import NOT_READ, Library
from plait.config.resolving.resolve import Resolved, resolve
from plait.config.schema.config import Config, ParallelSection
from plait.errors import ConfigError, InputError, Problem, refuse
from plait.parallel.precision.mixed_precision import Precision
from plait.units import dtype_of
from plait.verify.batches import ragged_steps
from plait.verify.choose import choose
from plait.verify.keep_float64 import keeping_float64
from plait.verify.model_under_test import Built, TestedModel, build, seed_everything

Pass = Literal["float64", "configured"]
Device = Literal["auto"] | DeviceType
Peer = Literal["plait", "deepspeed", "accelerate"]

MICRO_BATCH = 2
ACCUMULATION = 3
"""At most so many samples and micro-batches: two rows differ in length, of three micro-batches one
is neither the first nor the last.
"""
SCALE_POWER = 12
"""float16 starts from at most this power of two, so that no step of a short comparison is skipped.
"""
LEAST_BUCKET_BYTES = 1024

_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Plan:
    """Everything a process needs to know."""

    tested: TestedModel
    resolved: Resolved
    engine: Peer
    passes: tuple[Pass, ...]
    steps: int
    dtype: str
    """Of the parameters, in the configured precision."""
    blocks: tuple[str, ...]
    """Names of the small model's blocks, for the report."""
    lines: tuple[tuple[str, str], ...]
    """(topic, note) before anything runs."""
    device: DeviceType = "cpu"
    deepspeed: dict[str, Any] | None = None
    """The file itself where it is a DeepSpeed file, for DeepSpeed."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.resolved.layout.world_size

    @property
    def micro_batches(self) -> int:
        """Of a step, over all data-parallel ranks."""
        return self.resolved.layout.dp * self.resolved.batch.accumulation

    def build(self, dtype: torch.dtype, *, rank: int = 0) -> Built:
        """The model. Where it comes with weights of its own, every rank draws others: an engine
        must make them rank 0's.
        """
        seed_everything(self.resolved.seed + rank)
        return build(self.tested, dtype=dtype)

    def data(self, built: Built) -> list[list[Any]]:
        """Steps of micro-batches of all ranks, the same for every process and pass."""
        return ragged_steps(
            steps=self.steps,
            micro_batches=self.micro_batches,
            size=self.resolved.batch.micro_batch_size,
            seed=self.resolved.seed,
            micro_batch=built.micro_batch,
        )

    @staticmethod
    def lifting(name: Pass, model: nn.Module) -> AbstractContextManager[None]:
        """In float64, casts inside the model and inside the optimizer that narrows on purpose are
        left out.
        """
        return keeping_float64(model, torch.optim.Muon) if name == "float64" else nullcontext()

    def settings(self, name: Pass) -> tuple[Resolved, torch.dtype]:
        """(configuration, dtype of the parameters) of a pass. float64 keeps every mechanism of
        mixed precision, the loss scale included, and replaces each dtype.
        """
        if name == "configured":
            return self.resolved, dtype_of(self.dtype)
        precision = self.resolved.precision
        wide: dict[str, Any] = {
            **dict(precision),
            "compute": "float64" if precision.compute else None,
            "reduce": "float64" if precision.reduction else None,
        }
        # No file can ask for this dtype, so it does not pass the validation.
        return (
            self.resolved.model_copy(update={"precision": Precision.model_construct(**wide)}),
            torch.float64,
        )

    @property
    def computes_in(self) -> str:
        """A description of the configured precision: `bfloat16 with float32 parameters`."""
        compute = self.resolved.precision.compute
        return (
            f"{compute} with {self.dtype} parameters"
            if compute and compute != self.dtype
            else self.dtype
        )


def prepare(
    config: Config,
    *,
    model: str | None,
    processes: int | None,
    most_processes: int,
    steps: int,
    passes: Sequence[Pass],
    engine: Peer = "plait",
    device: Device = "auto",
    gpus: int = 0,
    deepspeed: dict[str, Any] | None = None,
) -> Plan:
    """The plan, or ConfigError, InputError or ModelError for what cannot be verified.
    `most_processes` is the default number of processes on this machine, `gpus` how many processes
    can have one of their own.
    """
    if steps < 1:
        raise InputError(f"--steps {steps}: at least one step is compared; use 1 or more")
    if steps > _MOST_STEPS:
        raise InputError(
            f"--steps {steps}: every step's data and gradients are kept; use at most"
            f" {_MOST_STEPS:,}"
        )
    parallel, world, degrees = small_degrees(config, processes, most=most_processes)
    small, rest = small_batch(config.model_copy(update={"parallel": parallel}))
    resolved = resolve(small, world_size=world)
    if device == accelerator.NAME and gpus < world:
        raise InputError(
            f"--device {accelerator.NAME}: {world} processes need a GPU each, and there are {gpus};"
            " use --device cpu, or a smaller --nproc-per-node"
        )
    where: DeviceType = accelerator.NAME if device != "cpu" and gpus >= world else "cpu"
    if engine != "plait":
        refuse_peer(engine, resolved, passes)
        resolved, more = in_float32(resolved)
        rest += more
    rule = (
        "the reference has the losses of Transformers, which are of one micro-batch and have no z"
        " loss"
    )
    refuse(
        Problem(setting, value, rule, f"use {json.dumps(off)}")
        for setting, value, off in resolved.routing.added
    )
    choice = choose(config, model, layout=resolved.layout)
    buckets = resolved.data_parallel
    # What is compared computes the same numbers from the first step to the last.
    resolved = resolved.model_copy(
        update={"compression": resolved.compression.model_copy(update={"candidates": ()})}
    )
    changed: dict[str, Any] = {}
    if choice.share < 1:
        # As many buckets for the small model as the large one has.
        size = max(LEAST_BUCKET_BYTES, round(buckets.bucket_bytes * choice.share))
        changed |= {"bucket_bytes": size, "bucket_by_links": False}
    resolved = resolved.model_copy(update={"data_parallel": buckets.model_copy(update=changed)})
    if where == "cpu" and resolved.library != Library():
        resolved = resolved.model_copy(update={"library": Library()})
        rest.append(NOT_READ)
    layout = resolved.layout
    batch = resolved.batch
    pieces = layout.dp * batch.accumulation
    data = (
        f"{_counted(steps, 'step')} of {_counted(pieces, 'micro-batch')} of"
        f" {_counted(batch.micro_batch_size, 'sample')}, ragged"
    )
    place = f"{_counted(world, 'process')} on {'GPUs' if where != 'cpu' else 'the CPU'}"
    lines = [("model", line) for line in choice.lines]
    lines += [("layout", f"{layout}, ZeRO stage {resolved.data_parallel.stage}, {place}")]
    rest += (
        ["parallel.cp takes no rows that are padded on the left, so none are compared"]
        if layout.cp > 1
        else []
    )
    lines += [("", line) for line in degrees] + [("data", data)] + [("", line) for line in rest]
    return Plan(
        tested=(
            choice.tested.model_copy(update={"left_padding": False})
            if layout.cp > 1
            else choice.tested
        ),
        resolved=resolved,
        engine=engine,
        passes=tuple(passes),
        steps=steps,
        dtype=choice.dtype if engine == "plait" else "float32",
        blocks=choice.names,
        lines=tuple(lines),
        device=where,
        deepspeed=deepspeed,
    )


def refuse_peer(
    engine: Peer,
    resolved: Resolved,
    passes: Sequence[Pass],
    *,
    installed: Callable[[str], bool] | None = None,
) -> None:
    """Raise InputError or ConfigError where `engine` cannot run the plan. Before any process."""
    installed = installed or (lambda name: find_spec(name) is not None)
    if not installed(engine):
        raise InputError(
            f"--engine {engine}: it is not installed here; {sys.executable} -m pip install {engine}"
        )
    if engine == "deepspeed" and "float64" in passes:
        raise InputError(
            "--dtype float64: DeepSpeed trains in float32, bfloat16 and float16 only; leave"
            " --dtype out"
        )
    problems = [
        Problem(
            f"parallel.{axis}",
            degree,
            f"{engine} is compared on data parallelism and ZeRO",
            "set it to 1 with --set",
        )
        for axis, degree in resolved.layout.degrees.items()
        if degree > 1
        and (
            axis in ("pp", "cp", "tp") or (axis == "dp_replicate" and resolved.data_parallel.stage)
        )
    ]
    stage = resolved.data_parallel.stage
    if engine == "accelerate" and stage:
        rule = "of accelerate, DistributedDataParallel is compared, which replicates"
        problems.append(
            Problem("zero_optimization.stage", stage, rule, "use --set zero_optimization.stage=0")
        )
    refuse(problems)


def in_float32(resolved: Resolved) -> tuple[Resolved, list[str]]:
    """(the configuration that peers run, notes)."""
    compute = resolved.precision.compute
    lines = (
        [
            f"computation {compute} -> float32, in which engines differ by their arithmetic and not"
            " by their rounding"
        ]
        if compute
        else []
    )
    return resolved.model_copy(update={"precision": Precision()}), lines


def _counted(count: int, what: str) -> str:
    plural = "" if count == 1 else "es" if what.endswith(("s", "h")) else "s"
    return f"{count} {what}{plural}"


def small_degrees(
    config: Config, processes: int | None, *, most: int
) -> tuple[ParallelSection, int, list[str]]:
    """(degrees, processes, notes). With `processes` the file's degrees as they are; else every open
    data-parallel degree is 2, and given ones are lowered to 2 where that many processes would be
    too many. Raises ConfigError where even those are.
    """
    parallel = config.parallel
    sharded = config.zero_optimization.stage > 0
    wanted = config.run.processes if config.run is not None else "auto"
    if processes is not None:
        return parallel, processes, []
    if isinstance(wanted, int) and wanted <= most:
        return parallel, wanted, []
    fixed = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp}
    given = {
        name: value
        for name in ("dp_replicate", "dp_shard")
        if isinstance(value := getattr(parallel, name), int)
    }
    degrees = {
        "dp_replicate": given.get("dp_replicate", 1 if sharded else 2),
        "dp_shard": given.get("dp_shard", 2 if sharded else 1),
    }
    lines = []
    if prod((fixed | degrees).values()) > most:
        lowered = {name: min(degree, 2) for name, degree in degrees.items()}
        lines = [
            f"{name} {degree} -> {lowered[name]}" for name, degree in degrees.items() if degree > 2
        ]
        degrees = lowered
    world = prod((fixed | degrees).values())
    if world > most:
        named = " x ".join(
            f"{axis} {degree}" for axis, degree in (fixed | degrees).items() if degree > 1
        )
        rule = f"{named} = {world} processes, and this machine starts {most} by itself"
        raise ConfigError(
            Problem(
                "parallel",
                None,
                rule,
                f"lower a degree with --set, or start them with --nproc-per-node {world}",
            )
        )
    return parallel.model_copy(update=degrees), world, lines


def small_batch(config: Config) -> tuple[Config, list[str]]:
    """(the configuration with a small batch and a constant learning rate, notes)."""
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    pp = config.parallel.pp
    # that takes no fewer
    most = max(ACCUMULATION, 2 * pp if config.parallel.pipeline.schedule == "dualpipev" else pp + 1)
    changed: dict[str, Any] = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": (
            min(micro, MICRO_BATCH) if isinstance(micro, int) else MICRO_BATCH
        ),
        "gradient_accumulation_steps": (
            min(accumulation, most) if isinstance(accumulation, int) else _accumulation(config)
        ),
        "data_parallel_size": None,
        "scheduler": None,
    }
    lines = [
        f"{name} {before} -> {changed[name]}"
        for name, before in (
            ("train_micro_batch_size_per_gpu", micro),
            ("gradient_accumulation_steps", accumulation),
        )
        if isinstance(before, int) and before != changed[name]
    ]
    if config.scheduler is not None:
        lines.append(
            f"scheduler {config.scheduler.type} left out: a constant learning rate, because a"
            " warm-up begins at 0"
        )
    fp16 = config.fp16
    power = config.fp16.initial_scale_power
    if (
        fp16.enabled is True
        and fp16.loss_scale == 0
        and isinstance(power, int)
        and power > SCALE_POWER
    ):
        changed["fp16"] = fp16.model_copy(update={"initial_scale_power": SCALE_POWER})
        lines.append(
            f"fp16.initial_scale_power {power} -> {SCALE_POWER}, so that no step is skipped"
        )
    return config.model_copy(update=changed), lines


def _accumulation(config: Config) -> int:
    """Where the file leaves it to the batch size: several micro-batches if it can mean several,
    else one.
    """
    return (
        2
        if isinstance(config.train_batch_size, int)
        and isinstance(config.train_micro_batch_size_per_gpu, int)
        else 1
    )
