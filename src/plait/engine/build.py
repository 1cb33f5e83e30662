"""From a model and a configuration to an engine, or only to a sharded model for your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.checkpoint.huggingface import load_weights
from plait.cluster.mesh import Mesh, build_mesh
from plait.cluster.topology import keep_host_memory, place
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.config import Config
from plait.dryrun.rank_activations import solved_recompute
from plait.engine.alike import refuse_different_optimizers, refuse_different_ranks
from plait.engine.check import CheckedModel, checked_model
from plait.engine.engine import Engine
from plait.engine.misuse import (
    check_placement,
    checked_optimizer,
    refuse_trained_loss,
    warn_of_no_blocks,
    warn_of_unused_sections,
    with_callers_seed,
)
from plait.engine.own_loop import StepWatch
from plait.engine.ownership import Owner, recall, refuse_taken, remember, take_over
from plait.engine.resume import check_scheduler, configured_groups
from plait.engine.state import generator_seed
from plait.engine.step import Stepper
from plait.errors import ConfigError, InputError, ModelError, Problem, warn
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import CausalLMLoss, Loss, Weighted
from plait.model.plans import TensorPlan, little_is_split
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.disk_files import build_disk_tier
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_math import multiply_all
from plait.optim.gradient_norm import clip_factor, global_norm
from plait.optim.lr_schedules import Scheduler, ScheduleSource, build_scheduler
from plait.optim.optimizer import build_optimizer
from plait.parallel import materialise
from plait.parallel.buffers import bind_sync_batch_norm
from plait.parallel.data.data_parallel import free_after_evaluation, watch_shards_of
from plait.parallel.data.reducer import Reducer
from plait.parallel.full_state import accept_full_tensors
from plait.parallel.hooks import Hooks
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.order import apply_all, attach_all
from plait.parallel.pipeline.pipeline_parallel import PipelineRank
from plait.parallel.precision.loss_scale import LossScaler
from plait.parallel.precision.optimizer_states import refuse_cut_blocks
from plait.parallel.technique import Parts

ConfigLike = str | Path | Mapping[str, Any] | Sequence[str] | Config | Resolved
OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@contextmanager
def _leaving_no_group() -> Iterator[None]:
    """A process group that was made before an error is destroyed, so that a corrected call starts as before."""
    existed = dist.is_initialized()
    try:
        yield
    except BaseException:
        if not existed and dist.is_initialized():
            dist.destroy_process_group()
        raise


@_leaving_no_group()
def initialize(
    model: nn.Module,
    config: ConfigLike,
    *,
    loss_fn: Loss | Callable[[Any, Any], tuple[torch.Tensor, Any]] | None = None,
    weight_fn: Callable[[Any], Any] | None = None,
    forward: Forward = default_forward,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    weights: str | Path | None = None,
    total_steps: int | None = None,
) -> Engine:
    """Shard `model` in place as `config` says and return the engine that trains it.

    `config`: a path, a mapping or a loaded Config; a DeepSpeed file is valid as it is. `loss_fn(output, batch)` returns (sum, weight);
    with `weight_fn(batch)` it may be a plain function. A model on `meta` is initialised by its own classes, the same bits on every
    layout, or filled from `weights` (a folder of safetensors); a real model's weights are taken from rank 0. `optimizer` is an optimizer
    over the model's parameters without state, or a function of a parameter list; by default the config's. An existing process group is
    adopted. Raises ConfigError, ModelError or InputError before any harm.
    """
    refuse_taken(model)
    loss = _as_loss(loss_fn, weight_fn)
    refuse_trained_loss(loss, model)
    resolved = _resolve(model, config, total_steps=total_steps)
    warn_of_unused_sections(resolved, optimizer=optimizer, lr_scheduler=lr_scheduler)
    take_over(model)
    return begin(
        checked_model(model, resolved),
        loss_fn=loss,
        forward=forward,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        weights=weights,
        total_steps=total_steps,
    )


@_leaving_no_group()
def begin(
    checked: CheckedModel,
    *,
    loss_fn: Loss | None,
    forward: Forward = default_forward,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    weights: str | Path | None = None,
    total_steps: int | None = None,
) -> Engine:
    """The engine of a model that was checked; the rest of `initialize`."""
    model, resolved = checked.model, checked.resolved
    if resolved.loss_chunk_tokens:
        loss_fn = _chunked(loss_fn, resolved.loss_chunk_tokens)
        forward = deferred(forward, model)
    named = {id(p): name for name, p in model.named_parameters()}
    mesh, parts, seed = _parallelize(checked, weights=weights, loss_fn=loss_fn, forward=forward)
    resolved = with_callers_seed(resolved, seed)
    made = _optimizer(optimizer, resolved, model, named)
    tier, pipeline = parts.hooks.of(DiskTier), parts.hooks.of(PipelineRank)
    if tier is not None:
        tier.drive(made)
    elif mesh.device.type == "cpu":
        keep_host_memory()  # who keeps states in files wants the rest for others
    configured = configured_groups(made)
    scheduler = check_scheduler(lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler)
    source = ScheduleSource(resolved.scheduler, total_steps) if scheduler is None and resolved.scheduler is not None else None
    scheduler = build_scheduler(source.spec, made, total_steps=total_steps) if source is not None else scheduler
    if optimizer is not None or lr_scheduler is not None:
        refuse_different_optimizers(made, scheduler, mesh)
    precision = resolved.precision
    in_backward = BackwardOptimizer(made) if resolved.data_parallel.update_in_backward else None
    if in_backward is not None:  # the first, lest what it cannot take back is cleared
        parts = parts.with_(hooks=Hooks((in_backward, *parts.hooks.all)))
    stepper = Stepper(
        parameters=list(model.parameters()),
        mesh=mesh,
        optimizer=made,
        scheduler=scheduler,
        configured=configured,
        schedule_source=source,
        clipping=resolved.gradient_clipping,
        counted_by_others=pipeline.counted if pipeline is not None else frozenset(),
        scaler=LossScaler(precision.loss_scale) if precision.loss_scale is not None else None,
        check_overflow=precision.check_overflow,
        tier=tier,
        before_update=parts.hooks.before_update,
        in_backward=in_backward,
    )
    torch.manual_seed(generator_seed(resolved.seed, mesh))
    return Engine(
        parts=parts,
        mesh=mesh,
        resolved=resolved,
        stepper=stepper,
        loss_fn=loss_fn,
        forward=forward,
    )


@_leaving_no_group()
def parallelize(model: nn.Module, config: ConfigLike, *, weights: str | Path | None = None) -> nn.Module:
    """Shard `model` in place and return it, for your own training loop: `loss.backward()` leaves gradients averaged over the data-parallel
    ranks, as DistributedDataParallel does; build the optimizer afterwards. Accumulate with `plait.accumulate`, clip with
    `plait.clip_grad_norm`. Buffers that the forward changes are rank 0's at the start of every step."""
    refuse_taken(model)
    resolved = _resolve(model, config)
    if resolved.precision.loss_scale is not None:
        raise ModelError("fp16 needs its loss scaled; plait.parallelize has no step to do it in: use bf16, or plait.initialize")
    if resolved.layout.pp > 1:
        raise ConfigError(
            Problem(
                "parallel.pp",
                resolved.layout.pp,
                "your own training loop calls the full model, and here each process has a part of it",
                "use plait.initialize and engine.train_batch, or parallel.pp = 1",
            )
        )
    if resolved.compression.candidates:
        rule = "full steps are timed to decide it, and plait sees none in your own training loop"
        raise ConfigError(Problem("parallel.compress_gradients", "auto", rule, 'use plait.initialize, or set it to "int8" or "none"'))
    if resolved.loss_chunk_tokens:
        _chunked(None, resolved.loss_chunk_tokens)
    if resolved.data_parallel.update_in_backward:
        raise ModelError("parallel.optimizer_in_backward: plait.parallelize makes no optimizer; use plait.initialize, or false")
    for section, device in (("optimizer", resolved.optimizer_offload.device), ("param", resolved.parameter_offload.device)):
        if device != "none":
            raise ModelError(f"zero_optimization.offload_{section}: plait.parallelize makes no optimizer; use plait.initialize, or none")
    before = list(model.parameters())
    take_over(model)
    mesh, parts, _ = _parallelize(checked_model(model, resolved), weights=weights, mean=True)
    watch = StepWatch(model, before, parts.hooks.of(Reducer))
    free_after_evaluation(model)
    remember(model, Owner(parts.with_(hooks=Hooks((*parts.hooks.all, watch))), mesh, own_loop=True))
    return model


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Backwards inside belong to a step that goes on: gradients pile up and, where the ZeRO stage allows, nothing is communicated.

    Forward and backward of every micro-batch but the last go inside; the last one goes outside.
    """
    owner = recall(model)
    if not owner.own_loop:
        raise InputError(
            "plait.accumulate is for plait.parallelize; an engine counts micro-batches itself: engine.backward and engine.step"
        )
    tell_all = owner.parts.hooks.before_microbatch
    for tell in tell_all:
        tell(False)
    try:
        yield
    finally:
        for tell in tell_all:
            tell(True)


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; returns the norm before, float64. Right on every layout, where
    `torch.nn.utils.clip_grad_norm_` counts shards or replicas wrongly or fails. Collective."""
    mesh = recall(model).mesh
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = global_norm(grads, mesh)
    multiply_all([local_tensor(grad) for grad in grads], clip_factor(norm, max_norm))
    return norm


# ---- pieces -------------------------------------------------------------------------------------------------------------------------


def _as_loss(loss_fn: Any, weight_fn: Callable[[Any], Any] | None) -> Loss | None:
    if loss_fn is None or isinstance(loss_fn, Loss):
        return loss_fn
    if weight_fn is None:
        raise InputError(
            "loss_fn is a plain function: train_batch divides by the global weight before the first backward, so it must know the weight "
            "from the batch; pass weight_fn=lambda batch: ..., or use plait.causal_lm_loss or plait.per_sample(...)"
        )
    return Weighted(loss_fn, weight_fn)


def _chunked(loss: Loss | None, tokens: int) -> Loss:
    if type(loss) is CausalLMLoss:
        return ChunkedCausalLMLoss(chunk_tokens=tokens)
    given = "no loss is given" if loss is None else f"the loss is a {type(loss).__name__}"
    raise ConfigError(
        Problem(
            "parallel.loss_chunk_tokens",
            tokens,
            f"only plait.causal_lm_loss is computed in chunks, and {given}",
            "pass loss_fn=plait.causal_lm_loss, or use 0; in your own training loop call plait.chunked_causal_lm_loss",
        )
    )


def _resolve(model: nn.Module, config: ConfigLike, *, total_steps: int | None = None) -> Resolved:
    if isinstance(config, Resolved):
        return config
    loaded = load(config)
    here = place()
    note = loaded.provenance.warning()
    if note and here.rank == 0:
        warn(note)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    # A file without any batch size is enough: a step then takes whatever train_batch is given.
    return resolve(loaded, world_size=here.world_size, hidden_size=hidden, total_steps=total_steps, micro_batch_size=1)


def _parallelize(
    checked: CheckedModel,
    *,
    weights: str | Path | None,
    mean: bool = False,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """`split`, weights, and what acts on a step. `mean`: see `ShardSettings`."""
    model, resolved = checked.model, checked.resolved
    template = materialise.template_of(model) if materialise.is_meta(model) else None
    mesh, parts, seed = split(checked, weights=weights, loss_fn=loss_fn, forward=forward)
    refuse_cut_blocks(resolved.optimizer.states, model.named_parameters())
    if template is not None:
        materialise.allocate(model, mesh.device, host_units=parts.shard.offloaded_units if parts.shard.master_weights_on_host else ())
    tier = build_disk_tier(resolved, model, parts.shard.offloaded_units)
    if template is not None:
        filled = tier.evict_parameter if tier is not None else lambda _: None
        if weights is None:
            materialise.initialise(model, template, checked.blocks, seed=resolved.seed, filled=filled)
        else:
            load_weights(model, weights, filled=filled)
            materialise.fill_buffers(model, template)
    if tier is not None:
        tier.evict_parameters()
    parts = attach_all(resolved.techniques, parts.with_shard(mean=mean), mesh)
    accept_full_tensors(model)
    watch_shards_of(model)
    return mesh, parts if tier is None else parts.with_(hooks=Hooks((*parts.hooks.all, tier))), seed


def split(
    checked: CheckedModel,
    *,
    weights: str | Path | None = None,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
) -> tuple[Mesh, Parts, int]:
    """Apply every technique to the model, in place; one on meta stays there. Everything that can be refused is, before a process group
    exists. Returns also the seed of rank 0's random generator before."""
    model, resolved = checked.model, checked.resolved
    on_meta = materialise.is_meta(model)
    if weights is not None and not on_meta:
        raise InputError("weights= fills a model that was built under torch.device('meta'); this one has real weights already")
    warn_of_no_blocks(model, checked.blocks, stage=resolved.data_parallel.stage)
    _warn_of_little(checked.parts.noted(TensorPlan), model)
    check_placement(resolved)
    mesh = build_mesh(resolved.layout, host_tensors=resolved.optimizer_offload.device == "cpu", nccl=resolved.nccl)
    seed = refuse_different_ranks(model, resolved, mesh)
    if not on_meta:
        model.to(mesh.device)
        materialise.broadcast(model)
    bind_sync_batch_norm(model, mesh)
    recompute = solved_recompute(resolved, checked.parts, mesh, loss_fn=loss_fn, forward=forward)
    techniques = resolved.model_copy(update={"recompute": recompute}).techniques
    return mesh, apply_all(techniques, checked.parts, mesh), seed


def _warn_of_little(plan: TensorPlan | None, model: nn.Module) -> None:
    words = little_is_split(plan, model) if plan is not None else None
    if words is not None and place().rank == 0:
        warn(words)


def _optimizer(given: OptimizerLike | None, resolved: Resolved, model: nn.Module, named: dict[int, str]) -> torch.optim.Optimizer:
    if given is None:
        return build_optimizer(resolved.optimizer, list(model.named_parameters()))
    if resolved.optimizer.states != "own":
        rule = "the optimizer was given to plait.initialize, which keeps its states as it does"
        raise ConfigError(Problem("optimizer.states", resolved.optimizer.states, rule, 'leave `optimizer=` out, or use "own"'))
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise InputError(f"optimizer= takes a torch.optim.Optimizer or a function of a parameter list, not a {type(given).__name__}")
        trained = [p for p in model.parameters() if p.requires_grad]
        return checked_optimizer(given(trained or [{"params": []}]), model)  # type: ignore[list-item]  # a pipeline stage may train nothing
    if given.state:
        raise InputError(
            "the optimizer already holds state of the unsharded parameters; pass it before its first step, "
            "or pass a function of the parameters"
        )
    now = dict(model.named_parameters())
    for group in given.param_groups:
        unknown = [p for p in group["params"] if id(p) not in named]
        if unknown:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that is not the model's; "
                "build it over model.parameters()"
            )
        # Those of other pipeline stages are updated there.
        group["params"] = [now[named[id(p)]] for p in group["params"] if named[id(p)] in now]
    return checked_optimizer(given, model)
