"""Sharding of a checked model in place: its layout, its weights, and the hooks of its steps.

`checked_model` runs all checks of a model and a configuration that need no process group, once.
`plait train` calls it before it starts any process, `initialize` and `parallelize` before they
change the model. `shard` then splits the model. The results of the checks (the plan of tensor
parallelism, the stages of a pipeline) are passed on, so that nothing is traced twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.modules import direct_parameters
from plait._torch.tensors import local_window
from plait.cluster import accelerator
from plait.cluster.mesh import Groups, Mesh, build_mesh
from plait.cluster.topology import place
from plait.comm.watch import WATCH
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.config import Config
from plait.dryrun.dry_model import solved_recompute
from plait.errors import InputError, warn
from plait.losses.loss import Loss
from plait.model.blocks import find_blocks
from plait.model.experts import find_experts
from plait.model.plans import TensorPlan, small_split_warning
from plait.optim.disk_optimizer import build_disk_tier
from plait.optim.optimizer import refuse_nothing_to_train
from plait.parallel import materialise
from plait.parallel.data.buffers import bind_sync_batch_norm
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.order import apply_all, attach_all, check_all, groups_of
from plait.parallel.parameter_layout import like_parameter
from plait.parallel.parts import Parts, Plans
from plait.parallel.precision.optimizer_states import refuse_cut_blocks
from plait.parallel.techniques.data_parallel import watch_shards_of
from plait.sharded.alike import refuse_different_ranks, refuse_without_replicas
from plait.sharded.load_weights import load_weights
from plait.sharded.misuse import (
    check_placement,
    explain_methods,
    refuse_unfit_layers,
    warn_of_no_blocks,
)
from plait.sharded.pretrained import weights_of
from plait.sharded.shards_as_weights import (
    refuse_copies,
    refuse_partial_folders,
    refuse_pickled_shards,
)

ConfigLike = str | Path | Mapping[str, Any] | Config | Resolved


WeightFiller = Callable[..., None]
"""Function (model, unsplit_model=, filled=) that fills all parameters and persistent buffers.

`unsplit_model` is on meta. The function calls `filled` with each tensor that has its values.
"""


@dataclass(frozen=True)
class CheckedModel:
    """Model to which the techniques of a configuration can be applied.

    Attributes:
        model: The unsharded model.
        resolved: The configuration.
        blocks: Names (FQNs) of the model's repeated blocks.
        plans: Results of the techniques' checks.
        groups: Process groups that the techniques need, besides one per axis.
    """

    model: nn.Module
    resolved: Resolved
    blocks: tuple[str, ...]
    plans: Plans
    groups: Groups

    @property
    def parts(self) -> Parts:
        """The model in the form to which techniques are applied."""
        return Parts(model=self.model, blocks=self.blocks, plans=self.plans)

    def with_resolved(self, resolved: Resolved) -> CheckedModel:
        """Return a copy with another configuration.

        The configurations may differ only in settings that no check reads.
        """
        return replace(self, resolved=resolved)


def resolved_for(
    model: nn.Module, config: ConfigLike, *, total_steps: int | None = None
) -> Resolved:
    """Return the resolved configuration for a run of a model on the processes of this job.

    Args:
        model: The model, whose hidden size some settings depend on.
        config: A path, a mapping or a loaded configuration. A resolved one is returned as it is.
        total_steps: Length of the run in optimizer steps, if it is known.
    """
    if isinstance(config, Resolved):
        return config
    loaded = load(config)
    process = place()
    note = loaded.provenance.warning()
    if note and process.rank == 0:
        warn(note)
    return resolve(
        loaded,
        world_size=process.world_size,
        hidden_size=getattr(getattr(model, "config", None), "hidden_size", None),
        total_steps=total_steps,
        # For a file without any batch size. A step then takes as many samples as it is passed.
        micro_batch_size=1,
    )


def checked_model(model: nn.Module, resolved: Resolved) -> CheckedModel:
    """Check a model against a configuration. The model is not changed.

    Raises:
        ConfigError: A setting does not fit the model or the layout.
        ModelError: The model cannot be trained, or cannot be split as the configuration says.
    """
    refuse_nothing_to_train(model)
    refuse_without_replicas(resolved)
    blocks = find_blocks(model, resolved.blocks or None)
    refuse_unfit_layers(model, resolved)
    context = resolved.context(device_type=accelerator.available_type(), model=model, blocks=blocks)
    plans = check_all(context)
    return CheckedModel(model, resolved, blocks, plans, groups_of(replace(context, plans=plans)))


@contextmanager
def destroying_new_group() -> Iterator[None]:
    """Destroy the process group that was created inside the context if the context raises.

    A corrected call then starts again without a process group.
    """
    existed = dist.is_initialized()
    try:
        yield
    except BaseException:
        if not existed and dist.is_initialized():
            dist.destroy_process_group()
        raise


def shard(
    checked: CheckedModel,
    *,
    weights: str | Path | WeightFiller | None,
    mean: bool = False,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """Split a model in place, fill its weights, and attach the hooks of its steps. Collective.

    Args:
        checked: The checked model.
        weights: Folder of safetensors, or function, that fills a model on meta. None: the folder of
            `plait.from_pretrained`, or the model's own initialisation.
        mean: Whether gradients are means over the ranks instead of sums. See `ShardSettings`.
        loss_fn: Loss of the training, if it is known.
        forward: Passes a micro-batch through the model.

    Returns:
        (mesh, parts, seed). A `ShardedModel` takes the mesh and the parts. The seed is that of
        rank 0's random generator before the call.
    """
    model = checked.model
    resolved = checked.resolved
    is_meta = materialise.is_meta(model)
    if weights is None and is_meta:
        weights = weights_of(model)
    template = materialise.template_of(model) if is_meta else None

    mesh, parts, seed = split(checked, weights=weights, loss_fn=loss_fn, forward=forward)
    refuse_cut_blocks(resolved.optimizer.states, model.named_parameters())
    if template is not None:
        host_units: Collection[str] = ()
        if parts.shard.master_weights_on_host:
            host_units = parts.shard.offloaded_units
        materialise.allocate(model, mesh.device, host_units=host_units)

    # After the allocation and before the weights: the shards move to files first, and each is
    # written out as soon as it is filled, so that they are never in memory together.
    tier = build_disk_tier(resolved, model, parts.shard.offloaded_units)
    if template is not None:
        filled = tier.evict_parameter if tier is not None else lambda _: None
        if weights is None:
            materialise.initialise(
                model, template, checked.blocks, seed=resolved.seed, filled=filled
            )
        else:
            if callable(weights):
                weights(model, unsplit_model=template, filled=filled)
            else:
                load_weights(model, weights, unsplit_model=template, filled=filled)
            materialise.fill_buffers(model, template)
    if tier is not None:
        tier.evict_parameters()

    parts = attach_all(resolved.techniques, parts.with_shard(mean=mean), mesh)
    accept_full_tensors(model)
    # Calls that would take shards for full weights raise InputError.
    layout = resolved.layout
    refuse_copies(model, is_split=layout.pp * layout.tp * layout.ep > 1)
    explain_methods(model)
    refuse_partial_folders(model, pp=layout.pp, tp=layout.tp)
    refuse_pickled_shards(model)
    watch_shards_of(model)
    if tier is not None:
        parts = parts.with_hooks(tier)
    return mesh, parts, seed


def split(
    checked: CheckedModel,
    *,
    weights: str | Path | WeightFiller | None = None,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """Build the mesh, and apply every technique to the model in place. Collective.

    A model on meta stays on meta. Errors are raised before the process group is created, except
    those about differences between ranks.

    Args:
        checked: The checked model.
        weights: See `shard`. The files are compared between ranks, but not read into the model.
        loss_fn: Loss of the training, if it is known.
        forward: Passes a micro-batch through the model.

    Returns:
        (mesh, parts, seed). The seed is that of rank 0's random generator before the call.

    Raises:
        InputError: `weights` is passed for a model with real weights, or ranks differ.
    """
    model = checked.model
    resolved = checked.resolved
    is_meta = materialise.is_meta(model)
    if weights is not None and not is_meta:
        raise InputError(
            "weights= fills a model that was built under torch.device('meta'); this one has real"
            " weights; build the model there, or leave weights= out"
        )
    warn_of_no_blocks(model, checked.blocks, stage=resolved.data_parallel.stage)
    _warn_if_little_is_split(checked.parts.plans.tensor, model, ep=resolved.layout.ep)
    check_placement(resolved)

    mesh = build_mesh(
        resolved.layout,
        timeout=timedelta(seconds=resolved.faults.timeout_seconds),
        host_tensors=resolved.optimizer_offload.device == "cpu",
        groups=checked.groups,
        on_default_group=WATCH.arm,
    )
    WATCH.name_axes(mesh)

    # Before any other collective: ranks with different models would exchange tensors of different
    # shapes.
    folder = None if callable(weights) else weights
    seed = refuse_different_ranks(model, resolved, mesh, weights=folder)
    if not is_meta:
        model.to(mesh.device)
        materialise.broadcast(model)

    bind_sync_batch_norm(model, mesh)
    recompute = solved_recompute(resolved, checked.parts, mesh, loss_fn=loss_fn, forward=forward)
    techniques = resolved.model_copy(update={"recompute": recompute}).techniques
    return mesh, apply_all(techniques, checked.parts, mesh), seed


def _warn_if_little_is_split(plan: TensorPlan | None, model: nn.Module, *, ep: int) -> None:
    if plan is None:
        return
    # Experts are split over ep, whatever the plan of tensor parallelism says.
    over_ep: set[str] = set()
    if ep > 1:
        over_ep = {name for experts in find_experts(model) for name in experts.parameters}
    message = small_split_warning(plan, model, excluded=over_ep)
    if message is not None and place().rank == 0:
        warn(message)


def accept_full_tensors(model: nn.Module) -> None:
    """Make `load_state_dict` of a model, or of a part of it, also accept full tensors.

    Each rank loads its slice of every parameter. torch itself cannot copy a plain tensor into a
    DTensor.
    """
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in direct_parameters(module).values()):
            module.register_load_state_dict_pre_hook(_slice_full_tensors)


def _slice_full_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replace full tensors of the right shape with this rank's slice.

    Tensors of a wrong shape stay, because torch's error names them.
    """
    parameters: dict[str, Any] = {**direct_parameters(module)}
    for leaf, parameter in parameters.items():
        value: Any = state_dict.get(f"{prefix}{leaf}")
        if not isinstance(parameter, DTensor) or type(value) not in (torch.Tensor, nn.Parameter):
            continue
        if value.shape == parameter.shape:
            local = value.detach()[local_window(parameter)].to(parameter.device)
            state_dict[f"{prefix}{leaf}"] = like_parameter(local, parameter)
