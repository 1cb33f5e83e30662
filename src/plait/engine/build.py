"""From a model and a configuration to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.agreement import together
from plait.cluster.topology import keep_host_memory
from plait.config.resolving.resolve import Resolved
from plait.engine.engine import Engine
from plait.engine.generators import generator_seed
from plait.engine.resume import check_scheduler, configured_groups
from plait.engine.trackers import EngineTrackers, check_trackers
from plait.errors import ConfigError, InputError, Problem
from plait.losses.balance_loss import with_balance_loss
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import CausalLMLoss, Loss, Weighted
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.lr_schedules import Scheduler, ScheduleSource, build_scheduler
from plait.optim.optimizer import build_optimizer
from plait.optim.placement_groups import step_by_placement
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import Hooks
from plait.parallel.micro_batches import Forward, default_forward
from plait.parallel.technique import Technique
from plait.sharded.alike import refuse_different_optimizers
from plait.sharded.assemble import ConfigLike, leaving_no_group, resolved_for, shard
from plait.sharded.check import CheckedModel, checked_model
from plait.sharded.misuse import (
    checked_optimizer,
    refuse_loss_of_samples,
    refuse_trained_loss,
    warn_of_unused_sections,
    with_callers_seed,
)
from plait.sharded.model import ShardedModel
from plait.sharded.ownership import refuse_taken, take_over
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_FULL_WEIGHTS = (
    "`for bucket in plait.iterate_weights(engine.sharded): ...` on every process, and save its"
    " tensors in one"
)
OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@leaving_no_group()
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
    techniques: Sequence[Technique] = (),
) -> Engine:
    """Shard `model` in place as `config` says and return the engine that trains it.

    `config`: a path, a mapping or a loaded Config; a DeepSpeed file is valid as it is.
    `loss_fn(output, batch)` returns (sum, weight); with `weight_fn(batch)` it may be a plain
    function. A model on `meta` is initialised by its own classes, the same bits on every layout, or
    filled from `weights` (a folder of safetensors); a real model's weights are taken from rank 0.
    `optimizer` is an optimizer over the model's parameters without state, or a function of a
    parameter list; by default the config's. `techniques` are of your own classes, besides those of
    the config (docs/add-a-technique.md). An existing process group is adopted. Raises ConfigError,
    ModelError or InputError before any harm.
    """
    refuse_taken(model)
    loss = _as_loss(loss_fn, weight_fn)
    refuse_trained_loss(loss, model)
    resolved = resolved_for(model, config, total_steps=total_steps)
    resolved = resolved.model_copy(update={"added": (*resolved.added, *techniques)})
    warn_of_unused_sections(resolved, optimizer=optimizer, lr_scheduler=lr_scheduler)
    refuse_loss_of_samples(loss, resolved)
    check_trackers(resolved)
    take_over(model)
    given = Given(loss, forward, optimizer, lr_scheduler, weights, total_steps)
    engine = begin(checked_model(model, resolved), given)
    if resolved.layout.pp > 1:
        refuse_shards_as_weights(model, remedy=_FULL_WEIGHTS, is_partial=True)
    if resolved.trackers:
        _start_trackers(engine)
    return engine


def _start_trackers(engine: Engine) -> None:
    """Start the trackers on the first rank. Where that fails, all ranks raise InputError.
    Collective.
    """

    def start() -> None:
        if engine.rank == 0:
            engine.trackers = EngineTrackers(engine.config)

    together(start, device=engine.device, doing="starting the trackers", raising=InputError)


@dataclass(frozen=True)
class Given:
    """What a caller brings besides model and configuration; see `initialize`."""

    loss_fn: Loss | None = None
    forward: Forward = default_forward
    optimizer: OptimizerLike | None = None
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None
    weights: str | Path | None = None
    total_steps: int | None = None


@leaving_no_group()
def begin(checked: CheckedModel, given: Given) -> Engine:
    """The engine of a model that was checked; the rest of `initialize`."""
    model = checked.model
    resolved = checked.resolved
    total_steps = given.total_steps
    loss_fn = given.loss_fn
    forward = given.forward
    if resolved.loss_chunk_tokens:
        loss_fn = _chunked(loss_fn, resolved.loss_chunk_tokens)
        forward = deferred(forward, model)
    named = {id(p): name for name, p in model.named_parameters()}
    mesh, parts, seed = shard(checked, weights=given.weights, loss_fn=loss_fn, forward=forward)
    resolved = with_callers_seed(resolved, seed)
    optimizer = _optimizer(given.optimizer, resolved, model, named)
    if given.optimizer is not None:
        step_by_placement(optimizer)
    in_backward = (
        BackwardOptimizer(optimizer) if resolved.data_parallel.update_in_backward else None
    )
    if in_backward is not None:  # the first, lest what it cannot take back is cleared
        parts = parts.with_(hooks=Hooks((in_backward, *parts.hooks.all)))
    sharded = ShardedModel(parts, mesh, resolved, forward=forward)
    if sharded.tier is not None:
        sharded.tier.drive(optimizer)
    elif mesh.device.type == "cpu":
        keep_host_memory()  # who keeps states in files wants the rest for others
    configured = configured_groups(optimizer)
    scheduler = check_scheduler(
        given.lr_scheduler(optimizer) if callable(given.lr_scheduler) else given.lr_scheduler
    )
    source = (
        ScheduleSource(resolved.scheduler, total_steps)
        if scheduler is None and resolved.scheduler is not None
        else None
    )
    scheduler = (
        build_scheduler(source.spec, optimizer, total_steps=total_steps)
        if source is not None
        else scheduler
    )
    if given.optimizer is not None or given.lr_scheduler is not None:
        refuse_different_optimizers(optimizer, scheduler, mesh)
    stepper = sharded.stepper(
        optimizer,
        in_backward=in_backward,
        scheduler=scheduler,
        configured=configured,
        schedule_source=source,
    )
    torch.manual_seed(generator_seed(resolved.seed, mesh))
    return Engine(
        sharded, stepper, with_balance_loss(loss_fn, model, parts.noted(RouterStatistics))
    )


def _as_loss(loss_fn: Any, weight_fn: Callable[[Any], Any] | None) -> Loss | None:
    if loss_fn is None or isinstance(loss_fn, Loss):
        return loss_fn
    if weight_fn is None:
        raise InputError(
            "loss_fn is a plain function: train_batch divides by the global weight before the first"
            " backward, so it must know the weight from the batch; pass weight_fn=lambda batch:"
            " ..., or use plait.causal_lm_loss or plait.per_sample(...)"
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
            "pass loss_fn=plait.causal_lm_loss, or use 0; in your own training loop call"
            " plait.chunked_causal_lm_loss",
        )
    )


def _optimizer(
    given: OptimizerLike | None, resolved: Resolved, model: nn.Module, named: dict[int, str]
) -> torch.optim.Optimizer:
    if given is None:
        return build_optimizer(resolved.optimizer, list(model.named_parameters()))
    if resolved.optimizer.states is not None:
        rule = "the optimizer was given to plait.initialize, which keeps its states as it does"
        raise ConfigError(
            Problem(
                "optimizer.states",
                resolved.optimizer.states,
                rule,
                "leave `optimizer=` or the setting out",
            )
        )
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise InputError(
                "optimizer= takes a torch.optim.Optimizer or a function of a parameter list, not a"
                f" {type(given).__name__}"
            )
        trained = [p for p in model.parameters() if p.requires_grad]
        return checked_optimizer(given(trained or [{"params": []}]), model)  # type: ignore[list-item]  # a pipeline stage may train nothing
    if given.state:
        raise InputError(
            "the optimizer already holds state of the unsharded parameters; pass it before its"
            " first step, or pass a function of the parameters"
        )
    now = dict(model.named_parameters())
    for group in given.param_groups:
        unknown = [p for p in group["params"] if id(p) not in named]
        if unknown:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that is not"
                " the model's; build it over model.parameters()"
            )
        # Those of other pipeline stages are updated there.
        group["params"] = [now[named[id(p)]] for p in group["params"] if named[id(p)] in now]
    return checked_optimizer(given, model)
