"""Predicts the peak memory of a rank in a training step, and the point of the step at which it
occurs, without a device.

One micro-batch runs through each of the rank's stages on fake tensors, and the optimizer takes one
step on fake shards. The account of the layout (`parallel.accounting.ledger`,
`parallel.accounting.peak`) combines these with the movement of parameters and with the schedule.
Settings that are not modelled yet are refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from plait._torch.groups import FakeStore
from plait._torch.operators import FakeTensorMode
from plait._torch.storage import storage_bytes
from plait.cluster.fake_group import FAKE
from plait.cluster.mesh import Mesh, build_mesh
from plait.config.resolving.resolve import Resolved
from plait.dryrun.dry_model import DryModel, handed_on, token_batch
from plait.dryrun.rank_activations import solved_recompute
from plait.dryrun.storage_tracker import LiveStorages
from plait.errors import InputError
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import causal_lm_loss
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.model.plans import TensorPlan
from plait.optim.fake_states import make_states
from plait.optim.optimizer import build_optimizer
from plait.parallel.accounting.ledger import Ledger, part_of
from plait.parallel.accounting.peak import Peak, step_peak
from plait.parallel.accounting.timeline_points import StageMoments, StepFacts
from plait.parallel.containers import tensors_in
from plait.parallel.context.context_parallel import local_batch
from plait.parallel.micro_batches import default_forward
from plait.parallel.order import account_all, apply_all
from plait.parallel.pipeline.account import facts_of_rank, stage_counts
from plait.parallel.pipeline.pipeline_parallel import PipelineParts
from plait.parallel.pipeline.stage import StagedModel
from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.technique import Parts, notes_of
from plait.units import dtype_of


@dataclass(frozen=True)
class PredictedPeak:
    """The prediction for one rank."""

    ledger: Ledger
    """States and traffic."""
    peak: Peak


def why_not_predicted(resolved: Resolved) -> str | None:
    """The setting whose memory during a step is not in the account yet; None where everything
    is.
    """
    data = resolved.data_parallel
    reasons = (
        (
            resolved.compile.enabled,
            "compile.enabled = true: what a compiled block keeps is decided by the compiler",
        ),
        (
            resolved.optimizer_offload.device != "none",
            "zero_optimization.offload_optimizer: the copies between host and device",
        ),
        (
            resolved.parameter_offload.device != "none",
            "zero_optimization.offload_param: the shards that are read ahead",
        ),
        (
            resolved.activation_offload.fraction > 0,
            "parallel.activation_offload: when a stored tensor has left the device",
        ),
        (
            bool(resolved.compression.gradients or resolved.compression.scheme.weight_bits),
            "compressed communication: its buffers",
        ),
        (resolved.layout.ep > 1, "parallel.ep: how many tokens the experts of a process get"),
        (bool(data.secondary_partition), "zero_hpz_partition_size: the second shards"),
        (data.all_reduce != "by-machines", "the buffers of the chosen all-reduce"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def predict_peak(
    model: nn.Module, resolved: Resolved, *, rank: int, samples: int, length: int
) -> PredictedPeak:
    """The prediction for rank `rank` of `resolved`'s layout: steps of micro-batches [samples,
    length], `model` an unsharded causal language model, which is not changed. Makes and ends a
    process group; raises InputError where one exists.
    """
    if dist.is_initialized():
        raise InputError(
            "a prediction makes a process group of ranks that do not exist, and this process has"
            " one already"
        )
    dist.init_process_group(
        FAKE, store=FakeStore(), rank=rank, world_size=resolved.layout.world_size
    )
    try:
        return predict_peak_on(
            build_mesh(resolved.layout), model, resolved, samples=samples, length=length
        )
    finally:
        dist.destroy_process_group()


def predict_peak_on(
    mesh: Mesh, model: nn.Module, resolved: Resolved, *, samples: int, length: int
) -> PredictedPeak:
    """The prediction for the rank that `mesh` is on."""
    reason = why_not_predicted(resolved)
    if reason is not None:
        raise InputError(f"the peak of a step is not predicted with {reason}")
    blocks = find_blocks(model, resolved.blocks or None)
    context = resolved.context(model=model, blocks=blocks)
    given = Parts(
        model=model,
        blocks=blocks,
        notes=notes_of(
            one.check(context)
            for one in (resolved.tensor_parallel, resolved.pipeline, resolved.tiled_mlp)
        ),
    )
    pipeline = given.noted(PipelineParts)
    whole = model_facts(model, blocks, tensor_plan=given.noted(TensorPlan))
    at = mesh.coordinates
    layout = resolved.layout
    ledger = Ledger.of_rank(
        layout,
        at,
        accumulation=resolved.batch.accumulation,
        tokens=samples * length,
        optimizer_states=resolved.optimizer.states,
    )
    own = whole
    schedule = None
    pp_rank = at["pp"]
    dry = _dry_model(given, resolved, mesh, samples=samples, length=length)
    boundary = None
    boundary_bytes = 0
    row = tuple[Action, ...]()
    if pipeline is not None:
        boundary = handed_on(dry.parts.model, dry.parts, dry.piece)
        row = pipeline.schedule.ranks[pp_rank]
        boundary_bytes = storage_bytes(tensors_in(boundary))
        schedule = pipeline.schedule
        counts = stage_counts(
            schedule,
            pp_rank,
            cut=pipeline.cut,
            facts=whole,
            boundary_bytes=boundary_bytes,
            ledger=ledger,
        )
        own = facts_of_rank(whole, pipeline.cut, schedule.stages_of(pp_rank))
        ledger = ledger.with_(stage=counts)
    ledger = account_all(resolved.techniques, ledger, own)
    states, temporaries = _optimizer(resolved, mesh, own, ledger)
    ledger = ledger.with_(
        memory={**ledger.memory, "optimizer": np.full_like(ledger.dp_shard, states)}
    )
    facts = StepFacts(
        stages=_moments(dry, boundary, row=row),
        boundary_bytes=boundary_bytes,
        batch_bytes=sum(x.nbytes for x in tensors_in(dry.piece)) * resolved.batch.accumulation,
        buffer_bytes=storage_bytes(dry.parts.model.buffers()),
        optimizer_temporary_bytes=temporaries,
        exchanges_reductions=mesh.device.type == "cpu",
    )
    peak = step_peak(
        facts,
        ledger=ledger,
        model=own,
        zero=resolved.data_parallel.stage,
        schedule=schedule,
        pp_rank=pp_rank,
    )
    return PredictedPeak(ledger, peak)


def _dry_model(
    given: Parts, resolved: Resolved, mesh: Mesh, *, samples: int, length: int
) -> DryModel:
    """A fake copy of the rank's model, with everything applied but what shards it."""
    dtype = dtype_of(resolved.precision.compute) if resolved.precision.compute else None
    recompute = solved_recompute(resolved, given, mesh, loss_fn=None, forward=default_forward)

    def apply(fake: nn.Module) -> tuple[Parts, StagedModel | None]:
        copied = given.with_(model=fake).with_shard(compute_dtype=dtype)
        parts = apply_all(
            (
                resolved.tensor_parallel,
                resolved.context_parallel,
                resolved.pipeline,
                resolved.tiled_mlp,
                recompute,
            ),
            copied,
            mesh,
        )
        applied = parts.noted(PipelineParts)
        return parts, applied.staged if applied is not None else None

    chunk = resolved.loss_chunk_tokens
    return DryModel(
        given.model,
        apply,
        device=mesh.device,
        batch=local_batch(
            token_batch(samples, length),
            resolved.context_parallel,
            mesh.layout.cp,
            mesh.coordinates["cp"],
        ),
        compute_dtype=dtype,
        loss_fn=ChunkedCausalLMLoss(chunk_tokens=chunk) if chunk else causal_lm_loss,
        forward=lambda fake: deferred(default_forward, fake) if chunk else default_forward,
    )


def _moments(dry: DryModel, boundary: Any, *, row: Sequence[Action]) -> dict[int, StageMoments]:
    """Every stage of the rank; a backward is run in each form that the row has."""
    if dry.staged is None:
        return {0: dry.trace()[0].moments}
    found: dict[int, StageMoments] = {}
    length = dry.piece["input_ids"].shape[1]  # of this rank's part of a sequence
    for index, stage in dry.staged.stages.items():
        received = None if stage.first else boundary
        first = dry.parts.blocks.index(stage.blocks[0])
        kinds = {action.kind for action in row if action.stage == index}
        traces = [
            dry.trace(index, received, length=length, splits=kind is Kind.INPUT, first_unit=first)[
                0
            ].moments
            for kind in (Kind.BACKWARD, Kind.INPUT)
            if kind in kinds
        ]
        found[index] = replace(traces[-1], backward=traces[0].backward)
    return found


def _optimizer(
    resolved: Resolved, mesh: Mesh, facts: ModelFacts, ledger: Ledger
) -> tuple[int, int]:
    """(bytes of the optimizer's states, the most that a step holds besides parameters, gradients
    and states), by a step on fake shards.
    """
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    n = int(ledger.dp_shard[0])
    axis = next(
        (name for name, size in (("dp_shard", n), ("tp", resolved.layout.tp)) if size > 1), None
    )
    small = resolved.optimizer.states is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = []
        for parameter in facts.trainable:
            dim = ledger.tensor_dims.get(parameter.name)
            part = part_of(parameter.shape, dim, ledger)
            held = int(part.held[0])
            row = int(part.row[0])
            shape = (held, row) if len(parameter.shape) > 1 else (held,)
            local = torch.empty(shape, dtype=dtypes[parameter.itemsize], device=mesh.device)
            whole = local
            if axis is not None:
                size = None
                stride = None
                if small:  # the unsharded shape decides what a block of states is
                    size = torch.Size((parameter.shape[0], prod(parameter.shape[1:]))[: local.ndim])
                    stride = (*size[1:], 1)
                whole = DTensor.from_local(
                    local, mesh.sub(axis), [Shard(0)], run_check=False, shape=size, stride=stride
                )
            named.append((parameter.name, nn.Parameter(whole)))
        optimizer = build_optimizer(resolved.optimizer, named)
        make_states(optimizer)
        for _, own in named:
            own.grad = torch.empty_like(own)
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        live = LiveStorages(
            known=[
                *states,
                *(tensor for _, p in named for tensor in (p, p.grad) if tensor is not None),
            ]
        )
        with live:
            optimizer.step()
    return storage_bytes(states), live.peak
