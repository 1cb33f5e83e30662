"""`plait.initialize`: an engine from a model and a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.cluster.topology import keep_host_memory
from plait.comm.failures import run_on_all_ranks
from plait.config.resolving.resolve import Resolved
from plait.config.resolving.resolved_parts import AUTO_RATE
from plait.engine.engine import Engine
from plait.engine.generators import generator_seed
from plait.engine.resume import configured_groups, refuse_unfit_scheduler
from plait.engine.trackers import EngineTrackers, check_trackers
from plait.errors import ConfigError, InputError, Problem
from plait.losses.balance_loss import with_balance_loss
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import CausalLMLoss, Loss
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.lr_schedules import Scheduler, ScheduleSource, build_scheduler
from plait.optim.optimizer import build_optimizer, step_by_placement
from plait.parallel.hooks import Hooks
from plait.parallel.micro_batches import Forward, default_forward
from plait.sharded.alike import refuse_different_optimizers
from plait.sharded.assemble import (
    CheckedModel,
    ConfigLike,
    checked_model,
    destroying_new_group,
    resolved_for,
    shard,
)
from plait.sharded.misuse import (
    checked_optimizer,
    refuse_loss_of_samples,
    refuse_trained_loss,
    warn_of_unused_sections,
    with_callers_seed,
)
from plait.sharded.model import ShardedModel, refuse_taken, take_over
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_FULL_WEIGHTS = (
    "`for bucket in plait.iterate_weights(engine.sharded): ...` on every process, and save its"
    " tensors in one"
)
OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@destroying_new_group()
def initialize(
    model: nn.Module,
    config: ConfigLike,
    *,
    loss_fn: Loss | None = None,
    forward: Forward = default_forward,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    weights: str | Path | None = None,
    total_steps: int | None = None,
) -> Engine:
    """Shard a model in place, and return the engine that trains it. Collective.

    An existing process group is reused. Errors that can be found early are raised before the model
    is changed.

    Args:
        model: A model with real weights, which are taken from rank 0, or one that was built under
            `torch.device("meta")`. A model on meta is filled from `weights`, or initialised by its
            own classes, bitwise equal on every layout.
        config: A path, a mapping or a loaded Config. A DeepSpeed file is valid as it is.
        loss_fn: Loss, such as `plait.causal_lm_loss`. `plait.WeightedLoss` and `plait.per_sample`
            make one from functions.
        forward: Maps (model, micro-batch) to the output.
        optimizer: Optimizer without state over the model's parameters, or a function that builds
            one from a list of parameters. The default is the configuration's optimizer.
        lr_scheduler: LR scheduler, or a function that builds one from the optimizer. The default is
            the configuration's schedule.
        weights: Folder of safetensors for a model on meta.
        total_steps: Length of the run in optimizer steps, if the LR schedule needs it.

    Raises:
        ConfigError: The configuration does not fit the model or the processes.
        ModelError: The model cannot be trained, or cannot be split as the configuration says.
        InputError: An argument is wrong, or ranks differ.
    """
    refuse_taken(model)
    _refuse_plain_function(loss_fn)
    refuse_trained_loss(loss_fn, model)
    resolved = resolved_for(model, config, total_steps=total_steps)
    warn_of_unused_sections(resolved, optimizer=optimizer, lr_scheduler=lr_scheduler)
    refuse_loss_of_samples(loss_fn, resolved)
    check_trackers(resolved)
    # From here on, a previous owner of the model can no longer be used.
    take_over(model)
    arguments = InitializeArguments(loss_fn, forward, optimizer, lr_scheduler, weights, total_steps)
    engine = build_engine(checked_model(model, resolved), arguments)
    # With a pipeline the state dict lacks layers, which a script may not notice.
    if resolved.layout.pp > 1:
        refuse_shards_as_weights(model, remedy=_FULL_WEIGHTS, is_partial=True)
    if resolved.trackers:
        _start_trackers(engine)
    return engine


def _start_trackers(engine: Engine) -> None:
    """Start the trackers on the first rank. Collective: if it fails, all ranks raise InputError."""

    def start() -> None:
        if engine.rank == 0:
            engine.trackers = EngineTrackers(engine.config)

    run_on_all_ranks(
        start, device=engine.device, activity="starting the trackers", error_class=InputError
    )


@dataclass(frozen=True)
class InitializeArguments:
    """Arguments of `initialize` other than the model and the configuration."""

    loss_fn: Loss | None = None
    forward: Forward = default_forward
    optimizer: OptimizerLike | None = None
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None
    weights: str | Path | None = None
    total_steps: int | None = None


@destroying_new_group()
def build_engine(checked: CheckedModel, arguments: InitializeArguments) -> Engine:
    """Return the engine of a checked model. This is the second half of `initialize`. Collective.

    Args:
        checked: The checked model.
        arguments: Arguments of `initialize`.
    """
    model = checked.model
    resolved = checked.resolved
    loss_fn = arguments.loss_fn
    forward = arguments.forward
    if resolved.loss_chunk_tokens:
        loss_fn = _chunked_loss(loss_fn, resolved.loss_chunk_tokens)
        forward = deferred(forward, model)

    # Sharding replaces the parameters. The caller's optimizer still holds these.
    names = {id(p): name for name, p in model.named_parameters()}
    mesh, parts, seed = shard(checked, weights=arguments.weights, loss_fn=loss_fn, forward=forward)
    resolved = with_callers_seed(resolved, seed)

    optimizer = _build_optimizer(arguments.optimizer, resolved, model, names)
    if arguments.optimizer is not None:
        step_by_placement(optimizer)
        resolved = _with_rates_of(optimizer, resolved)
    in_backward = None
    if resolved.data_parallel.update_in_backward:
        in_backward = BackwardOptimizer(optimizer)
        # The first hook: after a failed step it raises, before others clear their state.
        parts = replace(parts, hooks=Hooks((in_backward, *parts.hooks.all)))

    sharded = ShardedModel(parts, mesh, resolved, forward=forward)
    if sharded.tier is not None:
        sharded.tier.drive(optimizer)
    elif mesh.device.type == "cpu":
        # A run with states in files leaves the memory that it frees to other programs.
        keep_host_memory()

    # Before the schedule, which changes the values.
    configured = configured_groups(optimizer)
    scheduler, source = _build_scheduler(arguments, resolved, optimizer)
    if arguments.optimizer is not None or arguments.lr_scheduler is not None:
        refuse_different_optimizers(optimizer, scheduler, mesh)
    stepper = sharded.stepper(
        optimizer,
        in_backward=in_backward,
        scheduler=scheduler,
        configured=configured,
        schedule_source=source,
    )
    # From here on ranks draw different random numbers, for example for dropout.
    torch.manual_seed(generator_seed(resolved.seed, mesh))
    loss_fn = with_balance_loss(loss_fn, model, parts.router_statistics)
    return Engine(sharded, stepper, loss_fn)


def _with_rates_of(optimizer: torch.optim.Optimizer, resolved: Resolved) -> Resolved:
    """Return the configuration with the rates of the caller's optimizer as "auto" `warmup_max_lr`.

    `resolve` took the rate of the configuration's optimizer, which is not used.
    """
    name = "warmup_max_lr"
    if resolved.scheduler is None or resolved.sources.get(f"scheduler.params.{name}") != AUTO_RATE:
        return resolved
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    params = {**resolved.scheduler.params, name: rates}
    scheduler = resolved.scheduler.model_copy(update={"params": params})
    return resolved.model_copy(update={"scheduler": scheduler})


def _build_scheduler(
    arguments: InitializeArguments, resolved: Resolved, optimizer: torch.optim.Optimizer
) -> tuple[Scheduler | None, ScheduleSource | None]:
    """Return (LR scheduler or None, specification of the configuration's schedule or None)."""
    scheduler = arguments.lr_scheduler
    if callable(scheduler):
        scheduler = scheduler(optimizer)
    if scheduler is not None:
        refuse_unfit_scheduler(scheduler)
        return scheduler, None
    if resolved.scheduler is None:
        return None, None
    source = ScheduleSource(resolved.scheduler, arguments.total_steps)
    return build_scheduler(source.spec, optimizer, total_steps=arguments.total_steps), source


def _refuse_plain_function(loss_fn: Any) -> None:
    if loss_fn is not None and not isinstance(loss_fn, Loss):
        raise InputError(
            "loss_fn is a plain function: train_batch divides by the global weight before the first"
            " backward, so it must know the weight from the batch; pass"
            " plait.WeightedLoss(loss_fn, lambda batch: ...), or use plait.causal_lm_loss or"
            " plait.per_sample(...)"
        )


def _chunked_loss(loss: Loss | None, tokens: int) -> Loss:
    if type(loss) is CausalLMLoss:
        return ChunkedCausalLMLoss(chunk_tokens=tokens)
    reason = "no loss is given"
    if loss is not None:
        reason = f"the loss is a {type(loss).__name__}"
    raise ConfigError(
        Problem(
            "parallel.loss_chunk_tokens",
            tokens,
            f"only plait.causal_lm_loss is computed in chunks, but {reason}",
            "pass loss_fn=plait.causal_lm_loss, or use 0; in your own training loop call"
            " plait.chunked_causal_lm_loss",
        )
    )


def _build_optimizer(
    optimizer: OptimizerLike | None, resolved: Resolved, model: nn.Module, names: dict[int, str]
) -> torch.optim.Optimizer:
    """Return the optimizer over the sharded parameters.

    Args:
        optimizer: Argument of `initialize`.
        resolved: The configuration.
        model: The sharded model.
        names: Names of the parameters before sharding, keyed by id.
    """
    if optimizer is None:
        return build_optimizer(resolved.optimizer, list(model.named_parameters()))
    states = resolved.optimizer.states
    if states is not None:
        raise ConfigError(
            Problem(
                "optimizer.states",
                states,
                "an optimizer that is passed to plait.initialize stores its states in its own form",
                "leave `optimizer=` or the setting out",
            )
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return checked_optimizer(_with_shards(optimizer, model, names), model)
    if not callable(optimizer):
        raise InputError(
            "optimizer= takes a torch.optim.Optimizer or a function of a parameter list, not a"
            f" {type(optimizer).__name__}"
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    # A pipeline stage may train nothing, and torch's optimizers refuse an empty list.
    return checked_optimizer(optimizer(trained or [{"params": []}]), model)  # type: ignore[list-item]


def _with_shards(
    optimizer: torch.optim.Optimizer, model: nn.Module, names: dict[int, str]
) -> torch.optim.Optimizer:
    """Replace the parameters of an optimizer that was built before sharding."""
    if optimizer.state:
        raise InputError(
            # Adagrad creates its state when it is built, so not "pass it before its first step".
            "the optimizer already holds state of the unsharded parameters; pass a function of the"
            " parameters, which builds it, in its place"
        )
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise InputError(
                f"the optimizer holds a parameter of shape {tuple(unknown[0].shape)} that is not"
                " the model's; build it over model.parameters()"
            )
        # Other pipeline stages update the parameters that this stage does not have.
        group_names = [names[id(p)] for p in group["params"]]
        group["params"] = [sharded[name] for name in group_names if name in sharded]
    return optimizer
