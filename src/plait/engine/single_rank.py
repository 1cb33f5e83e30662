"""Dry run of one rank of any layout, without other ranks or data.

The model is built, split and stepped on fake tensors. Everything except the values is real: the
same code makes the shards, the stages, the collectives and the optimizer states, on a process group
whose other ranks do not exist. A layout of thousands of ranks can be tried on a laptop, in seconds
to minutes. Decisions of a step that depend on values (the norm, an overflow) are left out. On a
real device the same step runs its kernels, so that their time and memory can be measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from plait._torch.groups import delivered_at_once, process_group_of
from plait._torch.operators import FakeTensorMode, refusing_triton_kernels
from plait._torch.tensors import storage_bytes
from plait.attributes import override_attributes
from plait.cluster import accelerator
from plait.cluster.layout import AXES, EXPERT_AXES
from plait.cluster.mesh import Mesh
from plait.comm.record import Call, call_of
from plait.config.resolving.resolve import Resolved
from plait.dryrun.dry_model import (
    boundary_activations,
    forward_of,
    loss_of,
    process_group_of_rank,
    refuse_grouped_products,
    state_tensors,
)
from plait.dryrun.recorder import LiveStorages
from plait.errors import InputError
from plait.model.positions import skip_packed_row_search
from plait.optim.optimizer import build_optimizer, make_fake_states
from plait.parallel import materialise
from plait.parallel.micro_batches import micro_batches
from plait.parallel.order import attach_all
from plait.parallel.parts import Parts
from plait.parallel.techniques.pipeline_parallel import PipelineRank
from plait.sharded.assemble import checked_model, split
from plait.sharded.model import ShardedModel
from plait.sizes import dtype_of


@dataclass(frozen=True)
class OperatorCalls:
    """All calls of one operator in a step.

    Attributes:
        name: Name of the operator.
        calls: Number of calls.
        flops: FLOPs of all calls.
        device_seconds: Time of its kernels on a real device.
    """

    name: str
    calls: int
    flops: int
    device_seconds: float = 0.0


@dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind along one mesh dimension in a step.

    Attributes:
        axis: Mesh dimension.
        kind: Kind of the collective.
        calls: Number of calls.
        ranks: Number of ranks in the group.
        wire_bytes: Bytes that this rank sends with ring algorithms.
    """

    axis: str
    kind: str
    calls: int
    ranks: int
    wire_bytes: int


@dataclass(frozen=True)
class SingleRankRun:
    """Memory and work of one rank, in bytes and counts.

    Attributes:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients after their reduction.
        optimizer: Bytes of optimizer states.
        blocks: Names of the model's blocks that this rank runs.
        peak: Peak of the allocated bytes in a step whose optimizer states exist already:
            parameters, gradients, states and all temporary tensors.
        peak_during: Phase (`micro-batches`, `reduction` or `optimizer step`) and operator of the
            peak.
        operators: Operators of one step, those with the most FLOPs first.
        traffic: Collectives of one step.
        device: Description of the device.
        build_seconds: Seconds to split the model and create its process groups.
        step_seconds: Seconds to run the step. With fake tensors this is the time of the dry run. On
            a real device it is the time of the step, without waiting for other ranks.
    """

    parameters: int
    gradients: int
    optimizer: int
    blocks: tuple[str, ...]
    peak: int
    peak_during: str
    operators: tuple[OperatorCalls, ...]
    traffic: tuple[CollectiveTraffic, ...]
    device: str
    build_seconds: float
    step_seconds: float

    @property
    def flops(self) -> int:
        """FLOPs of the step's matrix multiplications and attention."""
        return sum(operator.flops for operator in self.operators)


def run_single_rank(
    model: nn.Module,
    resolved: Resolved,
    *,
    rank: int,
    samples: int,
    length: int,
    real: bool = False,
    on_phase: Callable[[str], None] = lambda _: None,
) -> SingleRankRun:
    """Build one rank of a layout, and run one step of it.

    The call creates and destroys a process group.

    Args:
        model: A causal language model on meta. It is changed in place.
        resolved: The configuration.
        rank: The rank.
        samples: Samples per micro-batch.
        length: Tokens per sample.
        real: Whether to run on this machine's device and not on fake tensors. Parameters are not
            initialised.
        on_phase: Progress callback. Receives the name of the phase that starts.

    Raises:
        InputError: A process group exists already, the model is not on meta, or `real` needs a GPU
            and there is none.
        ModelError: The experts of the model cannot run on fake tensors in their dtype.
    """
    if not materialise.is_meta(model):
        raise InputError(
            "a single-rank dry run takes only a model on meta; build the model under"
            " torch.device('meta')"
        )
    if not real:
        compute = resolved.precision.compute
        refuse_grouped_products(model, dtype_of(compute) if compute else None, remedy="")

    # Which parameters were used depends on values.
    data_parallel = resolved.data_parallel.model_copy(update={"unused_parameters": False})
    resolved = resolved.model_copy(update={"data_parallel": data_parallel})
    start = time.perf_counter()
    on_phase(f"building rank {rank} of {resolved.layout.world_size:,}")
    with process_group_of_rank(resolved, rank, purpose="a single-rank dry run"):
        mesh, parts, _ = split(checked_model(model, resolved))
        with ExitStack() as stack:
            stack.enter_context(refusing_triton_kernels())
            stack.enter_context(skip_packed_row_search())
            watch: _FakeTensorWatch | _DeviceProfile
            if real:
                watch = _DeviceProfile(mesh)
            else:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                # Entered last, so that it sees the operators before the mode of fake tensors does.
                watch = stack.enter_context(_FakeTensorWatch(mesh))
            materialise.allocate(model, mesh.device)
            parts = attach_all(resolved.techniques, parts, mesh)
            sharded = ShardedModel(parts, mesh, resolved, forward=forward_of(resolved, model))
            optimizer = build_optimizer(resolved.optimizer, list(model.named_parameters()))
            built = time.perf_counter()
            on_phase(
                f"one step: {resolved.batch.accumulation} micro-batches of {samples} x {length}"
                f" tokens on {mesh.device.type}"
            )
            make_fake_states(optimizer)
            run = _run_step(sharded, optimizer, _micro_batches(sharded, samples, length), watch)
        return replace(
            run,
            build_seconds=built - start,
            step_seconds=watch.seconds or time.perf_counter() - built,
        )


def _micro_batches(sharded: ShardedModel, samples: int, length: int) -> list[Any]:
    count = sharded.config.batch.accumulation
    device = next(sharded.model.parameters()).device
    ids = torch.zeros(samples * count, length, dtype=torch.int64, device=device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return [
        sharded.hooks.prepare(micro_batch)
        for micro_batch in micro_batches(batch, count=count, size=samples)
    ]


def _run_step(
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    watch: _FakeTensorWatch | _DeviceProfile,
) -> SingleRankRun:
    """Run a step of a single rank. The times of the result are not set yet."""
    model = sharded.model
    loss = loss_of(sharded.config)
    if sharded.pipeline is not None:
        predict_messages(model, sharded.parts, sharded.pipeline, batches[0])

    def loss_sum(output: Any, micro_batch: Any) -> torch.Tensor:
        return loss(output, micro_batch)[0]

    with delivered_at_once(), watch.step():
        with watch.phase("micro-batches"):
            sharded.train_microbatches(batches, loss_sum, loss_fn=loss)
        with watch.phase("reduction"):
            sharded.finish_reduction()
        gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
        with watch.phase("optimizer step"):
            optimizer.step()

    return SingleRankRun(
        parameters=storage_bytes(model.parameters()),
        gradients=gradients,
        optimizer=storage_bytes(state_tensors(optimizer)),
        blocks=sharded.parts.blocks,
        peak=watch.peak,
        peak_during=watch.peak_during,
        operators=watch.operators(),
        traffic=watch.traffic(),
        device=watch.device,
        build_seconds=0.0,
        step_seconds=0.0,
    )


class _FakeTensorWatch(LiveStorages):
    """Counter of the live storages, operators and collectives of a step on fake tensors."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.device = f"{mesh.device.type}, fake tensors"
        self.seconds = 0.0
        self.peak_during = ""
        self._phase = ""
        self._operator = ""
        self._axes = _axes_by_group(mesh)
        self._is_counting = False
        self._calls: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._collectives: list[tuple[str, Call]] = []
        """(mesh dimension, call) of every collective."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the operators that run inside the context."""
        self.peak = self.total
        with override_attributes(self, _is_counting=True):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the step that runs inside the context."""
        self._phase = name
        yield

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and count it."""
        self._operator = str(func)
        out = func(*args, **kwargs)
        computes_nothing = getattr(func, "is_view", False) or func.namespace in ("prim", "profiler")
        if not self._is_counting or computes_nothing:
            return out

        name = str(func.overloadpacket)
        self._calls[name] += 1
        count_flops = flop_registry.get(func.overloadpacket)
        if count_flops is not None:
            self._flops[name] += count_flops(*args, **kwargs, out_val=out)

        collective = call_of(func, args)
        if collective is not None:
            axis = "shared memory"
            if func.namespace != "plait":
                axis = self._axes.get(process_group_of(args).group_name, "other")
            self._collectives.append((axis, collective))
        return out

    def _add(self, unit: int, size: int) -> None:
        before = self.peak
        super()._add(unit, size)
        if self.peak > before and self._phase:
            self.peak_during = f"{self._phase}, {self._operator}"

    def operators(self) -> tuple[OperatorCalls, ...]:
        """Return the operators, sorted by FLOPs and then by calls, largest first."""
        operators = [
            OperatorCalls(name, calls, self._flops[name]) for name, calls in self._calls.items()
        ]
        operators.sort(key=lambda operator: (-operator.flops, -operator.calls, operator.name))
        return tuple(operators)

    def traffic(self) -> tuple[CollectiveTraffic, ...]:
        """Return the collectives, by mesh dimension and kind."""
        grouped: dict[tuple[str, str, int], list[Call]] = {}
        for axis, call in self._collectives:
            # On gloo a reduce-scatter runs as an all-to-all (see `comm.collectives`).
            kind = "reduce_scatter" if call.kind == "all_to_all" else call.kind
            grouped.setdefault((axis, kind, call.ranks), []).append(call)

        traffic = []
        for (axis, kind, ranks), calls in sorted(grouped.items()):
            wire_bytes = round(sum(call.wire_bytes for call in calls))
            traffic.append(CollectiveTraffic(axis, kind, len(calls), ranks, wire_bytes))
        return tuple(traffic)


def _axes_by_group(mesh: Mesh) -> dict[str, str]:
    """Return the mesh dimensions of each process group, keyed by the group's name."""
    axes_of: dict[str, str] = {}
    for axes in (*((axis,) for axis in (*AXES, *EXPERT_AXES)), ("dp_replicate", "dp_shard")):
        group = mesh.group(*axes)
        if group is not None:
            axes_of.setdefault(group.group_name, " x ".join(axes))
    if mesh.reverse_pp is not None:
        axes_of[mesh.reverse_pp.group_name] = "pp"
    return axes_of


class _DeviceProfile:
    """Profile of the kernels and the memory of a step on this machine's device."""

    def __init__(self, mesh: Mesh) -> None:
        if not accelerator.is_accelerator(mesh.device):
            raise InputError(
                "a dry run with real kernels needs a GPU, but this machine has none; run it on fake"
                " tensors"
            )
        self.device = accelerator.model_name(mesh.device)
        self.seconds = 0.0
        self.peak = 0
        self.peak_during = "on the device"
        self._torch_device = mesh.device
        self._profile: Any = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Profile the step inside the context. The device is idle at its start and end."""
        accelerator.synchronize(self._torch_device)
        accelerator.reset_peak(self._torch_device)
        with torch.profiler.profile(
            activities=accelerator.profiler_activities(), with_flops=True
        ) as self._profile:
            start = time.perf_counter()
            yield
            accelerator.synchronize(self._torch_device)
            self.seconds = time.perf_counter() - start
        self.peak = accelerator.peak_bytes(self._torch_device)

    @contextmanager
    def phase(self, _name: str) -> Iterator[None]:
        """Do nothing: kernels run asynchronously, so their phase is not known here."""
        yield

    def operators(self) -> tuple[OperatorCalls, ...]:
        """Return the operators, sorted by time, longest first."""
        operators = []
        for event in self._profile.key_averages():
            if event.self_device_time_total > 0:
                operators.append(
                    OperatorCalls(
                        event.key,
                        event.count,
                        int(event.flops or 0),
                        event.self_device_time_total / 1e6,
                    )
                )
        return tuple(sorted(operators, key=lambda operator: -operator.device_seconds))

    def traffic(self) -> tuple[CollectiveTraffic, ...]:
        """Return nothing, because a fake group sends nothing. Fake tensors show the collectives."""
        return ()


def predict_messages(
    model: nn.Module,
    parts: Parts,
    pipeline: PipelineRank,
    micro_batch: dict[str, torch.Tensor],
) -> None:
    """Provide the shapes of all boundary activations to a rank that runs without other ranks.

    Args:
        model: The model.
        parts: The model after all techniques were applied.
        pipeline: Pipeline stages of this rank.
        micro_batch: A micro-batch with the same shapes as those of the step.
    """
    hidden = boundary_activations(model, parts, micro_batch)
    for stage in range(pipeline.runtime.schedule.stages - 1):
        pipeline.runtime.announce_output(stage, micro_batch, hidden)
