"""What every rank of a layout keeps of a micro-batch, found by running its stages one after the
other on fake tensors, in every mode.

All stages are run on every rank, which needs no communication: each rank knows what the others will
decide, so what cannot be met is refused by all of them. Without a pipeline there is one rank with
one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster.mesh import Mesh
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
from plait.parallel.activations.recompute import Recompute
from plait.parallel.activations.saved_tensors import OffloadedActivations
from plait.parallel.context.context_parallel import ContextParallel, local_batch
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.pipeline.pipeline_parallel import PipelineParts
from plait.parallel.pipeline.stage import StagedModel, stage_model
from plait.parallel.schedules.actions import Kind
from plait.parallel.technique import Parts, notes_of
from plait.parallel.tensor.styles import Region
from plait.parallel.tensor.tensor_parallel import TensorParallel
from plait.parallel.tiles.tiled_mlp import TiledMLP
from plait.units import dtype_of

MODES: tuple[BlockMode, ...] = ("none", "selective", "full")


def solved_recompute(
    resolved: Resolved, parts: Parts, mesh: Mesh, *, loss_fn: Loss | None, forward: Forward
) -> Recompute:
    """What blocks recompute, a budget solved: from a run without data on the full model, before
    anything is sharded. `parts`: with the notes of the checks.
    """
    recompute = resolved.recompute
    precision = resolved.precision
    if recompute.mode != "budget":
        return recompute
    ranks = rank_activations(
        parts.model,
        blocks=parts.blocks,
        pipeline=parts.noted(PipelineParts),
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


def rank_activations(
    model: nn.Module,
    *,
    blocks: tuple[str, ...],
    mesh: Mesh,
    batch: Any,
    pipeline: PipelineParts | None = None,
    tensor_parallel: TensorParallel | None = None,
    context_parallel: ContextParallel | None = None,
    tiled_mlp: TiledMLP | None = None,
    recompute: Recompute | None = None,
    offloads: Callable[[int], int] = lambda _: 0,
    compute_dtype: torch.dtype | None = None,
    loss_fn: Loss = causal_lm_loss,
    forward: Forward = default_forward,
) -> tuple[RankActivations, ...]:
    """The figures of every rank of the pipeline (of the one rank without), for one micro-batch like
    `batch`, with every block in each mode; those of the fullest rank of the tp axis, so that its
    ranks take the same decision. `model` is full, as yet unsharded, and stays as it is. `batch` has
    full sequences. `offloads` says how many blocks of a rank's use a store. Collective over the tp
    axis. Raises ModelError where the model's code looks at values.
    """
    split = tensor_parallel or TensorParallel()
    technique = recompute or Recompute()
    context = context_parallel or ContextParallel()
    tiled = tiled_mlp or TiledMLP()
    cut = tiled.modules(model, blocks)
    batch = local_batch(batch, context, mesh.layout.cp, mesh.coordinates["cp"])
    schedule = pipeline.schedule if pipeline is not None else ONE_STAGE
    bounds = pipeline.cut.bounds if pipeline is not None else (0, len(blocks))
    by_stage = [blocks[low:high] for low, high in pairwise(bounds)]
    own = [
        [name for stage in schedule.stages_of(rank) for name in by_stage[stage]]
        for rank in range(schedule.pp)
    ]
    stored = {name for names in own for name in names[: offloads(len(names))]}
    halved = {action.stage for row in schedule.ranks for action in row if action.kind is Kind.INPUT}

    def measure(
        mode: BlockMode, stored: Collection[str]
    ) -> list[tuple[StageTrace, tuple[int, ...]]]:
        """Every stage, and what its blocks put into a store."""
        order = (
            *(name for name in blocks if name in stored),
            *(name for name in blocks if name not in stored),
        )
        alike = technique.model_copy(
            update={"mode": mode, "every": 1, "assignment": (mode,) * len(blocks)}
        )
        store = CountingStore()

        def apply(fake: nn.Module) -> tuple[Parts, StagedModel | None]:
            given = Parts(
                fake,
                blocks,
                notes=notes_of([cut, OffloadedActivations(store, len(stored)) if stored else None]),
            )
            parts = context.apply(split.apply(given, mesh), mesh)
            staged = None
            if pipeline is not None:
                staged = stage_model(
                    fake,
                    pipeline.cut,
                    range(schedule.stages),
                    region=parts.noted(Region),
                    device=mesh.device,
                )
            return (
                alike.apply(tiled.apply(parts, mesh).with_(blocks=order), mesh).with_(
                    blocks=blocks
                ),
                staged,
            )

        dry = DryModel(
            model,
            apply,
            device=mesh.device,
            batch=batch,
            compute_dtype=compute_dtype,
            loss_fn=loss_fn,
            forward=lambda _: forward,
        )
        found = []
        handed = None
        length = 0
        for index, names in enumerate(by_stage):
            trace, handed = dry.trace(index, handed, length=length, splits=index in halved)
            region = dry.parts.noted(Region)
            length = region.length if region is not None else 0
            found.append(
                (trace, tuple(store.bytes[order.index(name)] for name in names) if stored else ())
            )
        return found

    plain = measure("none", ())
    by_mode = {
        mode: plain if mode == "none" and not stored else measure(mode, stored)
        for mode in (MODES if blocks else MODES[:1])
    }
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
    """`plain` is the stage without recompute and without a store: what a block's backward has on
    the device.
    """
    found: dict[BlockMode, StageMode] = {}
    for mode, (one, stored) in modes.items():
        kept = one.figures.kept
        before = (0, *stored[:-1]) if stored else (0,) * len(kept)  # prefetched at the same time
        returning = tuple(
            full - own + more
            for full, own, more in zip(plain.figures.kept, kept, before, strict=True)
        )
        found[mode] = replace(one.figures, returning=returning, stored=stored)
    return StageFacts(found, plain.received, plain.differentiable)


def max_over_tp(stage: StageFacts, mesh: Mesh) -> StageFacts:
    """Every figure, the largest of the tp axis. Slices may be uneven, and what is decided from
    figures must be decided the same on all ranks: a block is recomputed by all of the axis's ranks
    or by none, because its collectives are repeated. Collective over tp.
    """
    group = mesh.group("tp")
    if group is None:
        return stage
    names = [field.name for field in fields(StageMode) if field.name not in ("traffic", "peak")]
    rows = [getattr(one, name) for one in stage.modes.values() for name in names]
    flat = [value for row in rows for value in (row if isinstance(row, tuple) else (row,))]
    tensor = torch.tensor(flat, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    agreed = iter(tensor.tolist())
    modes = {}
    for mode, one in stage.modes.items():
        changed: dict[str, Any] = {
            name: (
                tuple(next(agreed) for _ in value)
                if isinstance(value := getattr(one, name), tuple)
                else next(agreed)
            )
            for name in names
        }
        modes[mode] = replace(one, **changed)
    return replace(stage, modes=modes)
