"""One rank of a layout of any size, alone and without data: the model is built, split and stepped
on fake tensors.

Everything but the values is real: the same code makes the shards, the stages, the collectives and
the optimizer states, on a process group whose other ranks do not exist. So a layout of thousands of
ranks is tried on a laptop, in seconds to minutes. What a step decides by values (the norm, whether
it overflowed) is left out. On a real device the same step runs with its kernels, and time and
memory are the device's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import flop_registry

from plait._torch.groups import FakeStore, delivered_at_once, process_group_of
from plait._torch.operators import FakeTensorMode, refusing_triton_kernels
from plait._torch.storage import storage_bytes
from plait.cluster import accelerator
from plait.cluster.fake_group import FAKE
from plait.cluster.layout import AXES, EXPERT_AXES
from plait.cluster.mesh import Mesh
from plait.comm.record import Call, call_of
from plait.config.resolving.resolve import Resolved
from plait.dryrun.dry_model import handed_on
from plait.dryrun.storage_tracker import LiveStorages
from plait.errors import InputError, ModelError
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import causal_lm_loss
from plait.model.experts import find_experts
from plait.model.positions import rows_are_sequences
from plait.optim.fake_states import make_states
from plait.optim.optimizer import build_optimizer
from plait.parallel import materialise
from plait.parallel.micro_batches import default_forward, micro_batches
from plait.parallel.order import attach_all
from plait.parallel.pipeline.pipeline_parallel import PipelineRank
from plait.parallel.technique import Parts
from plait.sharded.assemble import split
from plait.sharded.check import checked_model
from plait.sharded.model import ShardedModel

Tell = Callable[[str], None]
"""Told what begins, in a few words."""


@dataclass(frozen=True)
class Operator:
    """An operator of a step, all its calls together."""

    name: str
    calls: int
    flops: int
    device_seconds: float = 0.0
    """What its kernels took on a real device."""


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind along one axis in a step."""

    axis: str
    kind: str
    calls: int
    ranks: int
    wire_bytes: int
    """What this rank sends in rings."""


@dataclass(frozen=True)
class SingleRankRun:
    """What a rank held and did, in bytes and counts."""

    parameters: int
    gradients: int
    optimizer: int
    blocks: tuple[str, ...]
    """The blocks of the model that the rank owns."""
    peak: int
    """Most bytes alive at once in a step that finds its optimizer states: parameters, gradients,
    states and all that comes and goes.
    """
    peak_during: str
    """What ran then: `micro-batches`, `reduction` or `optimizer step`, and the operator."""
    operators: tuple[Operator, ...]
    """Of one step, the most FLOPs first."""
    traffic: tuple[Sent, ...]
    device: str
    build_seconds: float
    """To split the model and make its groups."""
    step_seconds: float
    """To run the step: on fake tensors the time of the dry run, on a real device the time of the
    step there without waiting for others.
    """

    @property
    def flops(self) -> int:
        """Of the step's products and attention."""
        return sum(operator.flops for operator in self.operators)


def run_single_rank(
    model: nn.Module,
    resolved: Resolved,
    *,
    rank: int,
    samples: int,
    length: int,
    real: bool = False,
    tell: Tell = lambda _: None,
) -> SingleRankRun:
    """Build rank `rank` of `resolved`'s layout from `model` (a causal language model on meta,
    changed in place) and run one step of micro-batches [samples, length]. Makes and ends a process
    group; raises InputError where one exists.

    `real` runs on this machine's device instead of fake tensors; the values are whatever its memory
    holds.
    """
    if dist.is_initialized():
        raise InputError(
            "a single-rank dry run makes a process group of ranks that do not exist, and this"
            " process has one already"
        )
    if not materialise.is_meta(model):
        raise InputError(
            "a single-rank dry run takes a model that was built under torch.device('meta')"
        )
    if not real:
        _refuse_grouped_products(model, resolved)
    # which parameters were used is a value
    quiet = resolved.data_parallel.model_copy(update={"unused_parameters": False})
    resolved = resolved.model_copy(update={"data_parallel": quiet})
    began = time.perf_counter()
    tell(f"building rank {rank} of {resolved.layout.world_size:,}")
    dist.init_process_group(
        FAKE, store=FakeStore(), rank=rank, world_size=resolved.layout.world_size
    )
    try:
        mesh, parts, _ = split(checked_model(model, resolved))
        watch: _Watch | _Profile = _Profile(mesh) if real else _Watch(mesh)
        fake: AbstractContextManager[Any] = (
            nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
        )
        with ExitStack() as inside:
            inside.enter_context(fake)
            inside.enter_context(refusing_triton_kernels())
            inside.enter_context(watch)
            inside.enter_context(rows_are_sequences())
            materialise.allocate(model, mesh.device)
            parts = attach_all(resolved.techniques, parts, mesh)
            forward = (
                deferred(default_forward, model) if resolved.loss_chunk_tokens else default_forward
            )
            run = _Run(ShardedModel(parts, mesh, resolved, forward=forward), samples, length, watch)
            built = time.perf_counter()
            tell(
                f"one step: {resolved.batch.accumulation} micro-batches of {samples} x {length}"
                f" tokens on {mesh.device.type}"
            )
            make_states(run.optimizer)
            found = run.step()
        return replace(
            found,
            build_seconds=built - began,
            step_seconds=watch.seconds or time.perf_counter() - built,
        )
    finally:
        dist.destroy_process_group()


def _refuse_grouped_products(model: nn.Module, resolved: Resolved) -> None:
    dtype = resolved.precision.compute or str(next(model.parameters()).dtype).removeprefix("torch.")
    kind = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if kind == "grouped_mm" and dtype != "bfloat16" and find_experts(model):
        raise ModelError(
            f"a dry run on fake tensors: {type(model).__name__} computes its experts in {dtype} by"
            " torch's grouped products, whose shapes torch infers for bfloat16 alone; set"
            " bf16.enabled = true, or build it with experts_implementation='batched_mm'"
        )


@dataclass
class _Run:
    sharded: ShardedModel
    samples: int
    length: int
    watch: _Watch | _Profile

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(
            self.sharded.config.optimizer, list(self.sharded.model.named_parameters())
        )

    def step(self) -> SingleRankRun:
        """A full step and its measurements."""
        sharded = self.sharded
        model = self.sharded.model
        count = sharded.config.batch.accumulation
        chunk = sharded.config.loss_chunk_tokens
        loss = ChunkedCausalLMLoss(chunk_tokens=chunk) if chunk else causal_lm_loss
        ids = torch.zeros(
            self.samples * count,
            self.length,
            dtype=torch.int64,
            device=next(model.parameters()).device,
        )
        pieces = micro_batches(
            {"input_ids": ids, "labels": ids.clone()}, count=count, size=self.samples
        )
        pieces = [sharded.hooks.prepared(piece) for piece in pieces]
        if sharded.pipeline is not None:
            predict_messages(model, sharded.parts, sharded.pipeline, pieces[0])
        with delivered_at_once(), self.watch.step():
            with self.watch.phase("micro-batches"):
                sharded.train_microbatches(
                    pieces, lambda output, piece: loss(output, piece)[0], loss_fn=loss
                )
            with self.watch.phase("reduction"):
                sharded.finish_reduction()
            gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
            with self.watch.phase("optimizer step"):
                self.optimizer.step()
        states = storage_bytes(
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        return SingleRankRun(
            parameters=storage_bytes(model.parameters()),
            gradients=gradients,
            optimizer=states,
            blocks=sharded.parts.blocks,
            peak=self.watch.peak,
            peak_during=self.watch.peak_during,
            operators=self.watch.operators(),
            traffic=self.watch.traffic(),
            device=self.watch.device,
            build_seconds=0.0,
            step_seconds=0.0,
        )


class _Watch(LiveStorages):
    """Storages alive, operators and collectives of a step on fake tensors."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.device = f"{mesh.device.type}, fake tensors"
        self.seconds = 0.0
        self.peak_during = ""
        self._phase = self._running = ""
        self._axes = _axes(mesh)
        self._counting = False
        self._calls: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._sent: list[tuple[str, Call]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what runs inside."""
        self.peak = self.total
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to a phase of the step."""
        self._phase = name
        yield

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator and count it."""
        self._running = str(func)
        out = func(*args, **kwargs)
        if self._counting and not _computes_nothing(func):
            name = str(func.overloadpacket)
            self._calls[name] += 1
            count = flop_registry.get(func.overloadpacket)
            if count is not None:
                self._flops[name] += count(*args, **kwargs, out_val=out)
            sent = call_of(func, args)
            if sent is not None:
                axis = (
                    self._axes.get(process_group_of(args).group_name, "other")
                    if func.namespace != "plait"
                    else "shared memory"
                )
                self._sent.append((axis, sent))
        return out

    def _add(self, unit: int, size: int) -> None:
        before = self.peak
        super()._add(unit, size)
        if self.peak > before and self._phase:
            self.peak_during = f"{self._phase}, {self._running}"

    def operators(self) -> tuple[Operator, ...]:
        """The most FLOPs first, then the most calls."""
        found = [Operator(name, calls, self._flops[name]) for name, calls in self._calls.items()]
        return tuple(
            sorted(found, key=lambda operator: (-operator.flops, -operator.calls, operator.name))
        )

    def traffic(self) -> tuple[Sent, ...]:
        """By axis and kind."""
        grouped: dict[tuple[str, str, int], list[Call]] = {}
        for axis, call in self._sent:
            # how gloo carries one out
            kind = "reduce_scatter" if call.kind == "all_to_all" else call.kind
            grouped.setdefault((axis, kind, call.ranks), []).append(call)
        return tuple(
            Sent(axis, kind, len(calls), ranks, round(sum(call.wire_bytes for call in calls)))
            for (axis, kind, ranks), calls in sorted(grouped.items())
        )


def _computes_nothing(func: Any) -> bool:
    return bool(getattr(func, "is_view", False)) or func.namespace in ("prim", "profiler")


def _axes(mesh: Mesh) -> dict[str, str]:
    """Group's name to axis."""
    found: dict[str, str] = {}
    for axes in (*((axis,) for axis in (*AXES, *EXPERT_AXES)), ("dp_replicate", "dp_shard")):
        group = mesh.group(*axes)
        if group is not None:
            found.setdefault(group.group_name, " x ".join(axes))
    if mesh.reverse_pp is not None:
        found[mesh.reverse_pp.group_name] = "pp"
    return found


class _Profile:
    """Kernels and memory of a step on this machine's device."""

    def __init__(self, mesh: Mesh) -> None:
        if not accelerator.is_one(mesh.device):
            raise InputError(
                "a dry run with real kernels needs a GPU, and this machine has none; run it on fake"
                " tensors"
            )
        self.device = accelerator.model_name(mesh.device)
        self.seconds = 0.0
        self.peak = 0
        self.peak_during = "on the device"
        self._at = mesh.device
        self._profile: Any = None

    def __enter__(self) -> _Profile:
        return self

    def __exit__(self, *problem: Any) -> None:
        pass

    @contextmanager
    def step(self) -> Iterator[None]:
        """Profile what runs inside, which starts and ends with an idle device."""
        accelerator.synchronize(self._at)
        accelerator.reset_peak(self._at)
        with torch.profiler.profile(
            activities=accelerator.profiled(), with_flops=True
        ) as self._profile:
            began = time.perf_counter()
            yield
            accelerator.synchronize(self._at)
            self.seconds = time.perf_counter() - began
        self.peak = accelerator.peak_bytes(self._at)

    @contextmanager
    def phase(self, _name: str) -> Iterator[None]:
        """Phases are not told apart on a device, where kernels run behind."""
        yield

    def operators(self) -> tuple[Operator, ...]:
        """The longest first."""
        found = [
            Operator(
                event.key, event.count, int(event.flops or 0), event.self_device_time_total / 1e6
            )
            for event in self._profile.key_averages()
            if event.self_device_time_total > 0
        ]
        return tuple(sorted(found, key=lambda operator: -operator.device_seconds))

    def traffic(self) -> tuple[Sent, ...]:
        """None: a fake group moves nothing, and the run on fake tensors counts it."""
        return ()


def predict_messages(
    model: nn.Module, parts: Parts, pipeline: PipelineRank, piece: dict[str, torch.Tensor]
) -> None:
    """Tell a rank that runs alone the boundary activations of every stage for micro-batches like
    `piece`.
    """
    hidden = handed_on(model, parts, piece)
    for stage in range(pipeline.runtime.schedule.stages - 1):
        pipeline.runtime.announce_output(stage, piece, hidden)
