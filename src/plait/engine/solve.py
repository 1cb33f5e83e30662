"""A budget for activations turned into what every block of this rank recomputes, from runs without data (`dryrun`, `stage_dryrun`)."""

from __future__ import annotations

from plait.cluster.mesh import Mesh
from plait.config.resolve import Resolved
from plait.engine.batch import Forward
from plait.engine.dryrun import activation_facts, alike_over_tp, token_batch
from plait.engine.loss import Loss, causal_lm_loss
from plait.engine.stage_dryrun import rank_activations
from plait.parallel.pipeline import PipelineParts
from plait.parallel.recompute import Recompute
from plait.parallel.technique import Parts
from plait.units import dtype_of


def recompute_of(resolved: Resolved, parts: Parts, mesh: Mesh, *, loss_fn: Loss | None, forward: Forward) -> Recompute:
    """What blocks recompute, a budget solved: from a run without data on the whole model, before anything is sharded. `parts`: with
    the notes of the checks."""
    recompute, precision, offload = resolved.recompute, resolved.precision, resolved.activation_offload
    if recompute.mode != "budget":
        return recompute
    batch = token_batch(resolved.batch.micro_batch_size, recompute.sequence_length)
    dtype = dtype_of(precision.compute) if precision.compute else None
    pipeline = parts.noted(PipelineParts)
    if pipeline is not None:
        ranks = rank_activations(
            parts.model,
            pipeline=pipeline,
            mesh=mesh,
            batch=batch,
            tensor_parallel=resolved.tensor_parallel,
            recompute=recompute,
            offloads=offload.blocks,
            compute_dtype=dtype,
            loss_fn=loss_fn or causal_lm_loss,
            forward=forward,
        )
        return recompute.solved_in_pipeline(ranks, rank=mesh.coordinates["pp"])
    facts = activation_facts(
        parts.model,
        blocks=parts.blocks,
        mesh=mesh,
        batch=batch,
        tensor_parallel=resolved.tensor_parallel,
        recompute=recompute,
        offload=offload.fraction > 0,
        compute_dtype=dtype,
        loss_fn=loss_fn or causal_lm_loss,
        forward=forward,
    )
    return recompute.solved(alike_over_tp(facts, mesh), offloaded=offload.blocks(len(parts.blocks)))
