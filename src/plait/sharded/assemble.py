"""From a checked model to one that is sharded in place, with its weights and with what acts on its
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from plait.cluster.mesh import Mesh, build_mesh
from plait.cluster.topology import place
from plait.comm.watch import WATCH
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.config import Config
from plait.dryrun.rank_activations import solved_recompute
from plait.errors import InputError, warn
from plait.losses.loss import Loss
from plait.model.experts import find_experts
from plait.model.plans import TensorPlan, little_is_split
from plait.optim.disk_files import build_disk_tier
from plait.parallel import materialise
from plait.parallel.buffers import bind_sync_batch_norm
from plait.parallel.data.data_parallel import watch_shards_of
from plait.parallel.full_state import accept_full_tensors
from plait.parallel.hooks import Hooks
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.order import apply_all, attach_all
from plait.parallel.precision.optimizer_states import refuse_cut_blocks
from plait.parallel.technique import Parts
from plait.sharded.alike import refuse_different_ranks
from plait.sharded.check import CheckedModel
from plait.sharded.copies import refuse_copies
from plait.sharded.load_weights import load_weights
from plait.sharded.misuse import check_placement, explain_methods, warn_of_no_blocks
from plait.sharded.pretrained import weights_of
from plait.sharded.saved_folders import refuse_partial_folders
from plait.sharded.shards_as_weights import refuse_pickled_shards

Filler = Callable[..., None]
"""(model, whole=, filled=): gives every parameter and persistent buffer of a rank's model its
values, and calls `filled` with each. `whole` is the uncut model on meta.
"""
ConfigLike = str | Path | Mapping[str, Any] | Config | Resolved


@contextmanager
def leaving_no_group() -> Iterator[None]:
    """A process group that was made before an error is destroyed, so that a corrected call starts
    as before.
    """
    existed = dist.is_initialized()
    try:
        yield
    except BaseException:
        if not existed and dist.is_initialized():
            dist.destroy_process_group()
        raise


def resolved_for(
    model: nn.Module, config: ConfigLike, *, total_steps: int | None = None
) -> Resolved:
    """The configuration of a run of this model on the processes that there are."""
    if isinstance(config, Resolved):
        return config
    loaded = load(config)
    here = place()
    note = loaded.provenance.warning()
    if note and here.rank == 0:
        warn(note)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    # A file without any batch size is enough: a step then takes whatever train_batch is given.
    return resolve(
        loaded,
        world_size=here.world_size,
        hidden_size=hidden,
        total_steps=total_steps,
        micro_batch_size=1,
    )


def shard(
    checked: CheckedModel,
    *,
    weights: str | Path | Filler | None,
    mean: bool = False,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """Split a model, give it its weights, and attach what acts on a step, for a `ShardedModel`.

    `mean`: see `ShardSettings`. The last result is the seed of rank 0's random generator before the
    call.
    """
    model = checked.model
    resolved = checked.resolved
    if weights is None and materialise.is_meta(model):
        weights = weights_of(model)
    template = materialise.template_of(model) if materialise.is_meta(model) else None
    mesh, parts, seed = split(checked, weights=weights, loss_fn=loss_fn, forward=forward)
    refuse_cut_blocks(resolved.optimizer.states, model.named_parameters())
    if template is not None:
        materialise.allocate(
            model,
            mesh.device,
            host_units=parts.shard.offloaded_units if parts.shard.master_weights_on_host else (),
        )
    tier = build_disk_tier(resolved, model, parts.shard.offloaded_units)
    if template is not None:
        filled = tier.evict_parameter if tier is not None else lambda _: None
        if weights is None:
            materialise.initialise(
                model, template, checked.blocks, seed=resolved.seed, filled=filled
            )
        else:
            (weights if callable(weights) else partial(load_weights, folder=weights))(
                model, whole=template, filled=filled
            )
            materialise.fill_buffers(model, template)
    if tier is not None:
        tier.evict_parameters()
    parts = attach_all(resolved.techniques, parts.with_shard(mean=mean), mesh)
    accept_full_tensors(model)
    refuse_copies(model)
    explain_methods(model)
    refuse_partial_folders(model, pp=resolved.layout.pp, tp=resolved.layout.tp)
    refuse_pickled_shards(model)
    watch_shards_of(model)
    return mesh, parts if tier is None else parts.with_(hooks=Hooks((*parts.hooks.all, tier))), seed


def split(
    checked: CheckedModel,
    *,
    weights: str | Path | Filler | None = None,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """Apply every technique to the model, in place; one on meta stays there. Everything that can be
    refused is, before a process group exists. Returns also the seed of rank 0's random generator
    before.
    """
    model = checked.model
    resolved = checked.resolved
    on_meta = materialise.is_meta(model)
    if weights is not None and not on_meta:
        raise InputError(
            "weights= fills a model that was built under torch.device('meta'); this one has real"
            " weights already"
        )
    warn_of_no_blocks(model, checked.blocks, stage=resolved.data_parallel.stage)
    _warn_of_little(checked.parts.noted(TensorPlan), model, ep=resolved.layout.ep)
    check_placement(resolved)
    on_host = resolved.optimizer_offload.device == "cpu"
    mesh = build_mesh(
        resolved.layout,
        timeout=timedelta(seconds=resolved.faults.timeout_seconds),
        host_tensors=on_host,
        library=resolved.library,
        groups=checked.groups,
        on_default_group=WATCH.arm,
    )
    WATCH.name_axes(mesh)
    seed = refuse_different_ranks(
        model, resolved, mesh, weights=None if callable(weights) else weights
    )
    if not on_meta:
        model.to(mesh.device)
        materialise.broadcast(model)
    bind_sync_batch_norm(model, mesh)
    recompute = solved_recompute(resolved, checked.parts, mesh, loss_fn=loss_fn, forward=forward)
    techniques = resolved.model_copy(update={"recompute": recompute}).techniques
    return mesh, apply_all(techniques, checked.parts, mesh), seed


def _warn_of_little(plan: TensorPlan | None, model: nn.Module, *, ep: int) -> None:
    over_ep = (
        {name for experts in find_experts(model) for name in experts.parameters} if ep > 1 else ()
    )
    words = little_is_split(plan, model, besides=over_ep) if plan is not None else None
    if words is not None and place().rank == 0:
        warn(words)
