"""Plan of a verification: small model, processes, batch and changed settings.

The plan is created before any process of the verification starts, and every process receives it.
Degrees of tensor, sequence and pipeline parallelism are never changed. Degrees of data parallelism,
the batch and the gradient buckets become smaller, like the model. The report lists every change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from plait.cluster import accelerator
from plait.cluster.accelerator import DeviceType
from plait.config.resolving.resolve import Resolved, resolve
from plait.config.schema.config import Config, ParallelSection
from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.names import number_of
from plait.parallel.techniques.mixed_precision import Precision
from plait.sizes import dtype_of
from plait.verify.choose import choose
from plait.verify.keep_float64 import keeping_float64
from plait.verify.model_under_test import (
    TestableModel,
    TestedModel,
    build,
    ragged_steps,
    seed_everything,
)

Pass = Literal["float64", "configured"]
Device = Literal["auto"] | DeviceType

MICRO_BATCH = 2
"""Largest number of samples per micro-batch. Two samples can differ in length."""
ACCUMULATION = 3
"""Largest number of accumulation steps without a pipeline.

One of three micro-batches is neither the first nor the last.
"""
SCALE_POWER = 12
"""Largest initial loss scale of float16, as a power of 2, so that no step is skipped."""
LEAST_BUCKET_BYTES = 1024
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class VerificationPlan:
    """Model, layout, batch and settings of a verification, which every process receives."""

    tested: TestedModel
    resolved: Resolved
    passes: tuple[Pass, ...]
    steps: int
    dtype: str
    """Dtype of the parameters in the configured precision."""
    blocks: tuple[str, ...]
    """Names of the small model's blocks, for the report."""
    lines: tuple[tuple[str, str], ...]
    """Lines of the report as (topic, note), known before anything runs."""
    device: DeviceType = "cpu"

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.resolved.layout.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, over all data-parallel ranks."""
        return self.resolved.layout.dp * self.resolved.batch.accumulation

    def build(self, dtype: torch.dtype, *, rank: int = 0) -> TestableModel:
        """Build the model after seeding all random generators with a seed that depends on the rank.

        If the model is built with weights, the weights therefore differ between ranks. This tests
        that the engine replaces them with the weights of rank 0.
        """
        seed_everything(self.resolved.seed + rank)
        return build(self.tested, dtype=dtype)

    def data(self, built: TestableModel) -> list[list[Any]]:
        """Return the micro-batches of all steps and ranks. They are equal in all processes."""
        return ragged_steps(
            steps=self.steps,
            micro_batches=self.micro_batches,
            size=self.resolved.batch.micro_batch_size,
            seed=self.resolved.seed,
            micro_batch=built.micro_batch,
        )

    @staticmethod
    def pass_context(name: Pass, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context manager in which a pass runs.

        In the float64 pass it makes the model skip casts to narrower dtypes.
        """
        if name == "float64":
            return keeping_float64(model, torch.optim.Muon)
        return nullcontext()

    def settings(self, name: Pass) -> tuple[Resolved, torch.dtype]:
        """Return (configuration of a pass, dtype of the parameters in this pass).

        The float64 pass replaces every dtype by float64. All other settings of mixed precision,
        including the loss scale, stay the same.
        """
        if name == "configured":
            return self.resolved, dtype_of(self.dtype)
        precision = self.resolved.precision
        wide: dict[str, Any] = {
            **dict(precision),
            "compute": "float64" if precision.compute else None,
            "reduce": "float64" if precision.reduction else None,
        }
        # Files cannot set this dtype, so validation would refuse it.
        update = {"precision": Precision.model_construct(**wide)}
        return self.resolved.model_copy(update=update), torch.float64

    @property
    def computes_in(self) -> str:
        """Description of the configured precision, such as `bfloat16 with float32 parameters`."""
        compute = self.resolved.precision.compute
        if compute and compute != self.dtype:
            return f"{compute} with {self.dtype} parameters"
        return self.dtype


def prepare(
    config: Config,
    *,
    model: str | None,
    processes: int | None,
    most_processes: int,
    steps: int,
    passes: Sequence[Pass],
    device: Device = "auto",
    gpus: int = 0,
) -> VerificationPlan:
    """Check the arguments of a verification, and return its plan.

    Args:
        config: The configuration.
        model: Folder, name or function of the model, or None for the `model` section.
        processes: Number of processes, or None to choose the number automatically.
        most_processes: Largest number of processes that may be chosen.
        steps: Optimizer steps to compare.
        passes: Precisions to compare in.
        device: Device type, or "auto".
        gpus: Number of GPUs that processes can use.

    Raises:
        ConfigError: The configuration cannot be verified.
        InputError: An argument is wrong.
        ModelError: The model cannot be verified.
    """
    if steps < 1:
        raise InputError(f"--steps {steps}: at least one step must be compared; use 1 or more")
    if steps > _MOST_STEPS:
        raise InputError(
            f"--steps {steps}: every step's data and gradients are kept; use at most"
            f" {_MOST_STEPS:,}"
        )
    # The degrees come first: they decide how many micro-batches the small batch needs.
    parallel, world, degree_notes = small_degrees(config, processes, most=most_processes)
    small, batch_notes = small_batch(config.model_copy(update={"parallel": parallel}))
    resolved = resolve(small, world_size=world)
    if device == accelerator.NAME and gpus < world:
        remedy = "use --device cpu"
        degrees = resolved.layout
        if gpus and gpus % (degrees.pp * degrees.cp * degrees.tp) == 0:
            remedy += f", or --nproc-per-node {gpus}"
        raise InputError(
            f"--device {accelerator.NAME}: {world} processes need a GPU each, but there are {gpus};"
            f" {remedy}"
        )
    on_gpus = device != "cpu" and gpus >= world
    rule = (
        "the reference has the balance loss of Transformers, which is computed per micro-batch and"
        " has no z loss"
    )
    raise_problems(
        Problem(setting, value, rule, f"use {json.dumps(off)}")
        for setting, value, off in resolved.routing.loss_settings
    )
    choice = choose(config, model, layout=resolved.layout)
    # With candidates the compression would change between steps.
    compression = resolved.compression.model_copy(update={"candidates": ()})
    buckets = resolved.data_parallel
    if choice.share < 1:
        # The small model gets as many buckets as the large one has.
        size = max(LEAST_BUCKET_BYTES, round(buckets.bucket_bytes * choice.share))
        buckets = buckets.model_copy(update={"bucket_bytes": size, "bucket_by_links": False})
    resolved = resolved.model_copy(update={"compression": compression, "data_parallel": buckets})
    tested = choice.tested
    layout = resolved.layout
    if layout.cp > 1:
        tested = tested.model_copy(update={"left_padding": False})
        batch_notes.append(
            "parallel.cp does not support rows that are padded on the left, so none are compared"
        )
    batch = resolved.batch
    micro_batches = layout.dp * batch.accumulation
    data = (
        f"{number_of(steps, 'step')} of {number_of(micro_batches, 'micro-batch')} of"
        f" {number_of(batch.micro_batch_size, 'sample')}, ragged"
    )
    place = f"{number_of(world, 'process')} on {'GPUs' if on_gpus else 'the CPU'}"
    lines = [("model", line) for line in choice.lines]
    lines.append(("layout", f"{layout}, ZeRO stage {resolved.data_parallel.stage}, {place}"))
    lines += [("", note) for note in degree_notes]
    lines.append(("data", data))
    lines += [("", note) for note in batch_notes]
    return VerificationPlan(
        tested=tested,
        resolved=resolved,
        passes=tuple(passes),
        steps=steps,
        dtype=choice.dtype,
        blocks=choice.names,
        lines=tuple(lines),
        device=accelerator.NAME if on_gpus else "cpu",
    )


def small_degrees(
    config: Config, processes: int | None, *, most: int
) -> tuple[ParallelSection, int, list[str]]:
    """Choose the degrees of parallelism of a verification.

    With `processes` the degrees of the file are used. Otherwise data-parallel degrees that the file
    does not fix become 2. If the layout then needs more than `most` processes, data-parallel
    degrees above 2 are lowered to 2.

    Returns:
        The `parallel` section, the number of processes, and lines of the report about changes.

    Raises:
        ConfigError: The layout needs more than `most` processes even with lowered degrees.
    """
    parallel = config.parallel
    requested = config.run.processes if config.run is not None else "auto"
    if processes is not None:
        return parallel, processes, []
    if isinstance(requested, int) and requested <= most:
        return parallel, requested, []

    fixed = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp}
    degrees = {"dp_replicate": 2, "dp_shard": 1}
    if config.zero_optimization.stage > 0:
        degrees = {"dp_replicate": 1, "dp_shard": 2}
    for name in degrees:
        configured = getattr(parallel, name)
        if isinstance(configured, int):
            degrees[name] = configured

    notes = []
    if prod((fixed | degrees).values()) > most:
        for name, degree in degrees.items():
            if degree > 2:
                notes.append(f"{name} {degree} -> 2")
                degrees[name] = 2
    world = prod((fixed | degrees).values())
    if world > most:
        named = [f"{axis} {degree}" for axis, degree in (fixed | degrees).items() if degree > 1]
        rule = f"{' x '.join(named)} = {world} processes, but at most {most} are started by default"
        remedy = f"lower a degree with --set, or start them with --nproc-per-node {world}"
        raise ConfigError(Problem("parallel", None, rule, remedy))
    return parallel.model_copy(update=degrees), world, notes


def small_batch(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration with a small batch and a constant learning rate.

    Returns:
        The configuration, and lines of the report about changes.
    """
    micro_batch = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    pp = config.parallel.pp
    # More micro-batches than stages, so that a pipeline reaches its steady state.
    most_accumulation = max(ACCUMULATION, pp + 1)
    if config.parallel.pipeline.schedule == "dualpipev":
        # It needs at least 2 pp micro-batches.
        most_accumulation = max(ACCUMULATION, 2 * pp)
    changed: dict[str, Any] = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "data_parallel_size": None,
        "scheduler": None,
    }
    if isinstance(config.train_batch_size, int) and isinstance(micro_batch, int):
        # The batch sizes of the file may imply several micro-batches.
        changed["gradient_accumulation_steps"] = 2
    lines = []
    for name, size, limit in (
        ("train_micro_batch_size_per_gpu", micro_batch, MICRO_BATCH),
        ("gradient_accumulation_steps", accumulation, most_accumulation),
    ):
        if isinstance(size, int):
            changed[name] = min(size, limit)
            if size > limit:
                lines.append(f"{name} {size} -> {limit}")
    # A step at a learning rate of 0 would not test the update.
    if config.scheduler is not None:
        lines.append(
            f"scheduler {config.scheduler.type} is left out: the learning rate is constant, because"
            " a warm-up begins at 0"
        )
    fp16 = config.fp16
    power = fp16.initial_scale_power
    is_dynamic = fp16.enabled is True and fp16.loss_scale == 0
    if is_dynamic and isinstance(power, int) and power > SCALE_POWER:
        changed["fp16"] = fp16.model_copy(update={"initial_scale_power": SCALE_POWER})
        lines.append(
            f"fp16.initial_scale_power {power} -> {SCALE_POWER}, so that no step is skipped"
        )
    return config.model_copy(update=changed), lines
