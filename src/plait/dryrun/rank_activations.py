"""Measure what every rank saves of a micro-batch, in every mode of recomputation.

The stages run one after another on fake tensors. All stages run on every rank, which needs no
communication: each rank knows what the others will decide, so a budget that one rank cannot meet is
refused by all. Without a pipeline there is one rank with one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.cluster.small_messages import max_over_ranks
from plait.config.resolving.resolve import Resolved
from plait.dryrun.dry_model import CountingStore, DryModel, StageTrace, token_batch
from plait.losses.loss import Loss, causal_lm_loss
from plait.parallel.accounting.activations import (
    ONE_STAGE,
    BlockMode,
    RankActivations,
    StageFacts,
    StageMode,
)
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.parts import Parts, Plans
from plait.parallel.pipeline.stage import StagedModel, stage_model
from plait.parallel.schedules.actions import Kind
from plait.parallel.techniques.context_parallel import ContextParallel, local_batch
from plait.parallel.techniques.pipeline_parallel import PipelinePlan
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.techniques.tiled_mlp import TiledMLP
from plait.units import dtype_of

MODES: tuple[BlockMode, ...] = ("none", "selective", "full")


def solved_recompute(
    resolved: Resolved, parts: Parts, mesh: Mesh, *, loss_fn: Loss | None, forward: Forward
) -> Recompute:
    """Return the recomputation of a configuration with its budget solved.

    Args:
        resolved: The configuration.
        parts: Full model before anything is sharded, with the plans of the checks.
        mesh: Mesh of the run.
        loss_fn: Loss. None is the usual causal language model loss.
        forward: Calls the model.
    """
    recompute = resolved.recompute
    precision = resolved.precision
    if recompute.mode != "budget":
        return recompute
    ranks = rank_activations(
        parts.model,
        blocks=parts.blocks,
        pipeline=parts.plans.pipeline,
        mesh=mesh,
        batch=token_batch(resolved.batch.micro_batch_size, recompute.sequence_length),
        tensor_parallel=resolved.tensor_parallel,
        context_parallel=resolved.context_parallel,
        tiled_mlp=resolved.tiled_mlp,
        recompute=recompute,
        offloads=resolved.activation_offload.blocks,
        compute_dtype=dtype_of(precision.compute) if precision.compute else None,
        loss_fn=loss_fn or causal_lm_loss,
        forward=forward,
    )
    return recompute.solved(ranks, rank=mesh.coordinates["pp"])


def rank_activations(  # noqa: PLR0913 - all are keywords
    model: nn.Module,
    *,
    blocks: tuple[str, ...],
    mesh: Mesh,
    batch: Any,
    pipeline: PipelinePlan | None = None,
    tensor_parallel: TensorParallel | None = None,
    context_parallel: ContextParallel | None = None,
    tiled_mlp: TiledMLP | None = None,
    recompute: Recompute | None = None,
    offloads: Callable[[int], int] = lambda _: 0,
    compute_dtype: torch.dtype | None = None,
    loss_fn: Loss = causal_lm_loss,
    forward: Forward = default_forward,
) -> tuple[RankActivations, ...]:
    """Return the figures of every rank of the pipeline for one micro-batch. Collective over tp.

    The figures are those of the fullest rank of the tp axis, so that its ranks take the same
    decision.

    Args:
        model: Full, unsharded model. It is not changed.
        blocks: Names of its blocks.
        mesh: Mesh of the run.
        batch: Micro-batch with full sequences.
        pipeline: Pipeline, if any.
        tensor_parallel: Tensor parallelism, if any.
        context_parallel: Context parallelism, if any.
        tiled_mlp: Tiled MLPs, if any.
        recompute: Settings of recomputation. Every mode is measured.
        offloads: Returns how many of a rank's blocks use a store for saved tensors.
        compute_dtype: Dtype of forward and backward.
        loss_fn: Loss.
        forward: Calls the model.

    Raises:
        ModelError: The model's code reads values of tensors.
    """
    tensor_technique = tensor_parallel or TensorParallel()
    recompute_technique = recompute or Recompute()
    context_technique = context_parallel or ContextParallel()
    tiled_technique = tiled_mlp or TiledMLP()
    tiles = tiled_technique.modules(model, blocks)
    batch = local_batch(batch, context_technique, mesh.layout.cp, mesh.coordinates["cp"])
    schedule = ONE_STAGE
    bounds: Sequence[int] = (0, len(blocks))
    if pipeline is not None:
        schedule = pipeline.schedule
        bounds = pipeline.cut.bounds

    by_stage = [blocks[low:high] for low, high in pairwise(bounds)]
    blocks_of_rank = [
        [name for stage in schedule.stages_of(rank) for name in by_stage[stage]]
        for rank in range(schedule.pp)
    ]
    stored = {name for names in blocks_of_rank for name in names[: offloads(len(names))]}
    actions = (action for row in schedule.ranks for action in row)
    split_stages = {action.stage for action in actions if action.kind is Kind.INPUT}

    def measure(
        mode: BlockMode, stored: Collection[str]
    ) -> list[tuple[StageTrace, tuple[int, ...]]]:
        """Run every stage; return its trace and the bytes that its blocks store."""
        order = (
            *(name for name in blocks if name in stored),
            *(name for name in blocks if name not in stored),
        )
        same_mode = recompute_technique.model_copy(
            update={"mode": mode, "every": 1, "assignment": (mode,) * len(blocks)}
        )
        store = CountingStore()

        def apply(fake: nn.Module) -> tuple[Parts, StagedModel | None]:
            offloaded = OffloadedActivations(store, len(stored)) if stored else None
            parts_of_copy = Parts(fake, blocks, Plans(tiled=tiles), offloaded_activations=offloaded)
            parts = context_technique.apply(tensor_technique.apply(parts_of_copy, mesh), mesh)
            staged = None
            if pipeline is not None:
                staged = stage_model(
                    fake,
                    pipeline.cut,
                    range(schedule.stages),
                    region=parts.region,
                    device=mesh.device,
                )

            # The store takes the first blocks of a rank, so these come first while it is applied.
            tiled = replace(tiled_technique.apply(parts, mesh), blocks=order)
            return replace(same_mode.apply(tiled, mesh), blocks=blocks), staged

        dry = DryModel(
            model,
            apply,
            device=mesh.device,
            batch=batch,
            compute_dtype=compute_dtype,
            loss_fn=loss_fn,
            forward=lambda _: forward,
        )

        results = []
        boundary = None
        length = 0
        for index, names in enumerate(by_stage):
            splits = index in split_stages
            trace, boundary = dry.trace(index, boundary, length=length, splits=splits)
            region = dry.parts.region
            length = region.length if region is not None else 0
            results.append(
                (trace, tuple(store.bytes[order.index(name)] for name in names) if stored else ())
            )

        return results

    plain = measure("none", ())
    by_mode: dict[BlockMode, list[tuple[StageTrace, tuple[int, ...]]]] = {}
    for mode in MODES if blocks else MODES[:1]:
        if mode == "none" and not stored:
            by_mode[mode] = plain
        else:
            by_mode[mode] = measure(mode, stored)

    facts = [
        _facts(plain[stage][0], {mode: found[stage] for mode, found in by_mode.items()})
        for stage in range(schedule.stages)
    ]
    facts = [max_over_tp(stage, mesh) for stage in facts]
    return tuple(
        RankActivations(schedule, rank, tuple(facts[stage] for stage in schedule.stages_of(rank)))
        for rank in range(schedule.pp)
    )


def _facts(
    plain: StageTrace, modes: dict[BlockMode, tuple[StageTrace, tuple[int, ...]]]
) -> StageFacts:
    """Combine the traces of a stage.

    Args:
        plain: Trace without recomputation and without offload. Its saved bytes are what the
            backward of a block needs on the device.
        modes: Trace, and offloaded bytes per block, by recomputation mode.
    """
    by_mode: dict[BlockMode, StageMode] = {}
    for mode, (trace, stored) in modes.items():
        saved = trace.figures.kept
        # While a block's tensors return, those of the block before it are prefetched.
        prefetched = (0,) * len(saved)
        if stored:
            prefetched = (0, *stored[:-1])
        returning = tuple(
            without_recompute - by_mode_bytes + arriving
            for without_recompute, by_mode_bytes, arriving in zip(
                plain.figures.kept, saved, prefetched, strict=True
            )
        )
        by_mode[mode] = replace(trace.figures, returning=returning, stored=stored)

    return StageFacts(by_mode, plain.received, plain.differentiable)


def max_over_tp(stage: StageFacts, mesh: Mesh) -> StageFacts:
    """Return the largest figures over the tp axis. Collective over tp.

    Shards may be uneven, but all ranks must decide the same: a block is recomputed by all ranks of
    the axis or by none, because its collectives are repeated.
    """
    group = mesh.group("tp")
    if group is None:
        return stage
    names = [field.name for field in fields(StageMode) if field.name not in ("traffic", "peak")]
    rows = [getattr(figures, name) for figures in stage.modes.values() for name in names]
    flat_values = [value for row in rows for value in (row if isinstance(row, tuple) else (row,))]
    largest = iter(max_over_ranks(flat_values, group, device=mesh.device))

    modes = {}
    for mode, figures in stage.modes.items():
        changed: dict[str, Any] = {}
        for name in names:
            value = getattr(figures, name)
            if isinstance(value, tuple):
                changed[name] = tuple(next(largest) for _ in value)
            else:
                changed[name] = next(largest)
        modes[mode] = replace(figures, **changed)

    return replace(stage, modes=modes)
