"""Prediction of a rank's peak memory in a training step, and of the point in time of the peak.

One micro-batch runs through each of the rank's stages on fake tensors, and the optimizer takes one
step on fake shards. `parallel.accounting.ledger` and `parallel.accounting.peak` combine these
measurements with the gathering of parameters, the reduction of gradients and the schedule. A
setting that the prediction does not support raises an error that names the setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from plait._torch.operators import FakeTensorMode
from plait._torch.tensors import storage_bytes
from plait.cluster.mesh import Mesh, build_mesh
from plait.config.resolving.resolve import Resolved
from plait.dryrun.dry_model import (
    DryModel,
    boundary_activations,
    drop_local_balance_loss,
    forward_of,
    loss_of,
    process_group_of_rank,
    solved_recompute,
    state_tensors,
    token_batch,
)
from plait.dryrun.recorder import LiveStorages
from plait.errors import InputError
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.optim.optimizer import build_optimizer, make_fake_states
from plait.parallel.accounting.ledger import Ledger, parameter_part
from plait.parallel.accounting.peak import Peak, StageIntervals, StepFacts, step_peak
from plait.parallel.micro_batches import default_forward, tensors_in
from plait.parallel.order import account_all, apply_all, check_each
from plait.parallel.parts import Parts
from plait.parallel.pipeline.estimates import facts_of_rank, stage_counts
from plait.parallel.pipeline.stage import StagedModel
from plait.parallel.schedules.schedule import Action, Kind
from plait.parallel.techniques.context_parallel import local_batch
from plait.sizes import dtype_of


@dataclass(frozen=True)
class PredictedPeak:
    """Predicted peak memory of one rank in a training step, with the ledger of model states."""

    ledger: Ledger
    """Model states and traffic."""
    peak: Peak


MAX_MICRO_BATCHES = 1000
"""Largest number of micro-batches per step. Pipelines take seconds for this many."""


def why_not_predicted(resolved: Resolved) -> str | None:
    """Return the first setting that the prediction does not support and why, or None."""
    data = resolved.data_parallel
    reasons = (
        (
            resolved.batch.accumulation > MAX_MICRO_BATCHES,
            f"gradient_accumulation_steps above {MAX_MICRO_BATCHES}, because every micro-batch of"
            " a step is simulated",
        ),
        (
            resolved.compile.enabled,
            "compile.enabled = true, because the compiler decides what a block saves",
        ),
        (
            resolved.optimizer_offload.device != "none",
            "zero_optimization.offload_optimizer, because of its copies between host and device",
        ),
        (
            resolved.parameter_offload.device != "none",
            "zero_optimization.offload_param, because of the shards that are prefetched",
        ),
        (
            resolved.activation_offload.fraction > 0,
            "parallel.activation_offload, because the time at which a tensor is freed varies",
        ),
        (
            bool(resolved.compression.gradients or resolved.compression.scheme.weight_bits),
            "compressed communication, because of its buffers",
        ),
        (
            resolved.layout.ep > 1,
            "parallel.ep, because the tokens per expert depend on the data",
        ),
        (
            bool(data.secondary_partition),
            "zero_hpz_partition_size, because of the second shards",
        ),
        (
            data.all_reduce != "by-machines",
            "parallel.all_reduce, because of the buffers of the chosen algorithm",
        ),
    )
    for applies, reason in reasons:
        if applies:
            return reason
    return None


def predict_peak(
    model: nn.Module, resolved: Resolved, *, rank: int, samples: int, length: int
) -> PredictedPeak:
    """Predict the peak memory of one rank. Creates and destroys a fake process group.

    Args:
        model: Unsharded causal language model. It is not changed.
        resolved: Configuration.
        rank: Rank in the layout of the configuration.
        samples: Samples per micro-batch.
        length: Tokens per sample.

    Raises:
        InputError: The process already has a process group, or a setting is not supported.
        ModelError: The model's code reads values of tensors.
    """
    with process_group_of_rank(resolved, rank, purpose="a prediction"):
        return predict_peak_on(
            build_mesh(resolved.layout), model, resolved, samples=samples, length=length
        )


def predict_peak_on(
    mesh: Mesh, model: nn.Module, resolved: Resolved, *, samples: int, length: int
) -> PredictedPeak:
    """Predict the peak memory of this process's rank in `mesh`. See `predict_peak`."""
    reason = why_not_predicted(resolved)
    if reason is not None:
        raise InputError(
            f"the peak memory of a step cannot be predicted with {reason}; change this setting"
        )
    blocks = find_blocks(model, resolved.blocks or None)
    context = resolved.context(model=model, blocks=blocks)
    checked = (resolved.tensor_parallel, resolved.pipeline, resolved.tiled_mlp)
    parts = Parts(model, blocks, check_each(checked, context))
    pipeline = parts.plans.pipeline
    full_facts = model_facts(model, blocks, tensor_plan=parts.plans.tensor)
    ledger = Ledger.of_rank(
        resolved.layout,
        mesh.coordinates,
        accumulation=resolved.batch.accumulation,
        tokens=samples * length,
        optimizer_states=resolved.optimizer.states,
    )
    rank_facts = full_facts
    schedule = None
    pp_rank = mesh.coordinates["pp"]
    dry = _dry_model(parts, resolved, mesh, samples=samples, length=length)
    boundary = None
    boundary_bytes = 0
    row = tuple[Action, ...]()
    if pipeline is not None:
        schedule = pipeline.schedule
        row = schedule.ranks[pp_rank]
        boundary = boundary_activations(dry.parts.model, dry.parts, dry.batch)
        boundary_bytes = storage_bytes(tensors_in(boundary))
        counts = stage_counts(
            schedule,
            pp_rank,
            cut=pipeline.cut,
            facts=full_facts,
            boundary_bytes=boundary_bytes,
            ledger=ledger,
        )
        rank_facts = facts_of_rank(full_facts, pipeline.cut, schedule.stages_of(pp_rank))
        ledger = ledger.with_(stage=counts)

    ledger = account_all(resolved.techniques, ledger, rank_facts)
    # The measured states replace those of the ledger's formula.
    states, temporaries = _optimizer_bytes(resolved, mesh, rank_facts, ledger)
    ledger = ledger.with_(
        memory={**ledger.memory, "optimizer": np.full_like(ledger.dp_shard, states)}
    )
    facts = StepFacts(
        stages=_moments(dry, boundary, row=row),
        boundary_bytes=boundary_bytes,
        batch_bytes=sum(x.nbytes for x in tensors_in(dry.batch)) * resolved.batch.accumulation,
        buffer_bytes=storage_bytes(dry.parts.model.buffers()),
        optimizer_temporary_bytes=temporaries,
        exchanges_reductions=mesh.device.type == "cpu",
    )
    peak = step_peak(
        facts,
        ledger=ledger,
        model=rank_facts,
        zero=resolved.data_parallel.stage,
        schedule=schedule,
        pp_rank=pp_rank,
    )
    return PredictedPeak(ledger, peak)


def _dry_model(
    parts: Parts, resolved: Resolved, mesh: Mesh, *, samples: int, length: int
) -> DryModel:
    """Return a fake copy of the rank's model, with all techniques except ZeRO."""
    dtype = None
    if resolved.precision.compute:
        dtype = dtype_of(resolved.precision.compute)
    recompute = solved_recompute(resolved, parts, mesh, loss_fn=None, forward=default_forward)

    def apply(fake: nn.Module) -> tuple[Parts, StagedModel | None]:
        drop_local_balance_loss(fake, mesh)
        copied = replace(parts, model=fake).with_shard(compute_dtype=dtype)
        applied_parts = apply_all(
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
        pipeline = applied_parts.plans.pipeline
        if pipeline is None:
            return applied_parts, None
        return applied_parts, pipeline.staged

    return DryModel(
        parts.model,
        apply,
        device=mesh.device,
        batch=local_batch(
            token_batch(samples, length),
            resolved.context_parallel,
            mesh.layout.cp,
            mesh.coordinates["cp"],
        ),
        compute_dtype=dtype,
        loss_fn=loss_of(resolved),
        forward=lambda fake: forward_of(resolved, fake),
    )


def _moments(dry: DryModel, boundary: Any, *, row: Sequence[Action]) -> dict[int, StageIntervals]:
    """Return the memory over time of every stage of the rank, keyed by the index of the stage.

    A stage has the full backward, the split backward, or both, as in the schedule.
    """
    if dry.staged is None:
        return {0: dry.trace()[0].moments}
    moments: dict[int, StageIntervals] = {}
    # Length of this rank's part of a sequence.
    length = dry.batch["input_ids"].shape[1]

    for index, stage in dry.staged.stages.items():
        received = None if stage.first else boundary
        first = dry.parts.blocks.index(stage.blocks[0])
        kinds = {action.kind for action in row if action.stage == index}
        traces = []
        for kind in (Kind.BACKWARD, Kind.INPUT):
            if kind in kinds:
                splits = kind is Kind.INPUT
                trace, _ = dry.trace(
                    index, received, length=length, splits=splits, first_unit=first
                )
                traces.append(trace.moments)
        # With both forms in a schedule, the first trace has the full backward and the last the
        # split one.
        moments[index] = replace(traces[-1], backward=traces[0].backward)

    return moments


def _optimizer_bytes(
    resolved: Resolved, mesh: Mesh, facts: ModelFacts, ledger: Ledger
) -> tuple[int, int]:
    """Return (bytes of optimizer states, temporary bytes of an optimizer step).

    Both are measured in an optimizer step on fake shards.
    """
    # Facts contain item sizes. Any floating-point dtype of a size has the same bytes.
    dtypes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    shards = int(ledger.dp_shard[0])
    axis = None
    if shards > 1:
        axis = "dp_shard"
    elif resolved.layout.tp > 1:
        axis = "tp"
    has_small_states = resolved.optimizer.states is not None

    with FakeTensorMode(allow_non_fake_inputs=True):
        named = []
        for fact in facts.trainable:
            dim = ledger.tensor_dims.get(fact.name)
            part = parameter_part(fact.shape, dim, ledger)
            length = int(part.local[0])
            width = int(part.row[0])
            shape = (length, width) if len(fact.shape) > 1 else (length,)
            local = torch.empty(shape, dtype=dtypes[fact.itemsize], device=mesh.device)
            weight = local
            if axis is not None:
                size = None
                stride = None
                if has_small_states:
                    # The unsharded shape determines the quantization blocks of the states.
                    size = torch.Size((fact.shape[0], prod(fact.shape[1:]))[: local.ndim])
                    stride = (*size[1:], 1)
                weight = DTensor.from_local(
                    local, mesh.sub(axis), [Shard(0)], run_check=False, shape=size, stride=stride
                )
            named.append((fact.name, nn.Parameter(weight)))
        optimizer = build_optimizer(resolved.optimizer, named)
        # The states exist before the measured step, because those of the first step would count as
        # temporary.
        make_fake_states(optimizer)
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        states = state_tensors(optimizer)
        known = list(states)
        for _, parameter in named:
            assert parameter.grad is not None
            known += [parameter, parameter.grad]
        live = LiveStorages(known=known)
        with live:
            optimizer.step()

    return storage_bytes(states), live.peak
