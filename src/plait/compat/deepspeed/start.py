"""`deepspeed.initialize`, which builds Plait's engine from DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from plait.cluster.topology import place
from plait.compat.deepspeed.comm import PORT, refuse_no_group, refuse_port
from plait.compat.deepspeed.engine import DeepSpeedEngine, DeepSpeedOptimizer
from plait.compat.deepspeed.loaders import StreamLoader
from plait.compat.deepspeed.pipe import PipelineEngine, PipelineModule
from plait.compat.deepspeed.refused import refuse_arguments
from plait.compat.deepspeed.zero import refuse_lost_writes
from plait.config.resolving.resolve import Resolved, load
from plait.config.resolving.resolved_parts import CALLER_SOURCE, MICRO_KEY
from plait.config.source import read
from plait.engine.build import initialize as plait_initialize
from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.losses.loss import WeightedLoss
from plait.optim.optimizer import build_optimizer
from plait.sharded.assemble import resolved_for
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_DEGREES = (
    'write the degrees of parallelism in the configuration: "parallel": {"tp": 2}, and "pp" for a'
    " PipelineModule"
)
_REMEDIES = {
    "mpu": _DEGREES,
    "mesh_param": _DEGREES,
}

_FULL_WEIGHTS = (
    "engine.module_state_dict() on every process (and save it in one),"
    " engine.save_16bit_model(folder)"
)
_FULL_STEPS = (
    "plait.initialize(model, config, loss_fn=plait.causal_lm_loss) and its engine.train_batch"
)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DataLoader[Any] | StreamLoader | None, Any]:
    """Shard a model in place and return its engine. Collective.

    Args:
        args: Arguments of the script. `args.deepspeed_config` is a configuration.
            `args.local_rank`, if it exists, is overwritten with the launcher's value.
        model: Model, the same on every rank.
        optimizer: Optimizer over the model's parameters, or a function that returns one for
            `model_parameters`. It replaces the optimizer of the configuration.
        model_parameters: Parameters, or groups of them, for the configuration's optimizer. If None,
            all parameters that require a gradient.
        training_data: Data set of the returned loader.
        lr_scheduler: Schedule, or a function that returns one for the optimizer.
        distributed_port: Must be the default.
        mpu: Must be None.
        dist_init_required: If False, the process group must exist.
        collate_fn: Combines samples of `training_data` into a micro-batch.
        config: Configuration. It must be None if `args` has one.
        mesh_param: Must be None.
        config_params: Older name of `config`.

    Returns:
        The engine, the optimizer, the loader of `training_data` or None, and the schedule. Without
        any optimizer the engine only runs forward, and optimizer and schedule are None.

    Raises:
        ConfigError: The configuration is invalid or does not fit the model.
        ModelError: The model cannot be parallelized.
        InputError: An argument is not supported.
    """
    refuse_arguments("initialize", _REMEDIES, mpu=mpu, mesh_param=mesh_param)
    refuse_port(distributed_port)
    refuse_no_group(dist_init_required)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"deepspeed.initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}"
        )
    if torch.get_default_device().type == "meta":
        raise InputError(
            "deepspeed.initialize inside zero.Init(): tensors have no memory there; build"
            " only the model inside, and call deepspeed.initialize after it"
        )
    # This has to run before the model is sharded, which draws its weights.
    refuse_lost_writes(model)
    _set_local_rank(args)
    source = _select_config(args, config, config_params)
    resolved = _resolve_config(source, model)
    _convert_to_master_weights(model, resolved)

    trains = optimizer is not None or resolved.sources.get("optimizer.type", "default") != "default"
    if trains:
        # It may be an iterator, such as model.parameters().
        parameters = list(model_parameters) if model_parameters is not None else None
        plait_optimizer = _select_optimizer(resolved, model, optimizer, parameters)
    else:
        # SGD without momentum has no states, which an engine that only runs forward does not need.
        plait_optimizer = partial(torch.optim.SGD, lr=0.0)
    if plait_optimizer is not None and optimizer is None:
        # It was built from the configuration, or replaces none. Without this, Plait would warn that
        # the configuration's optimizer is not used.
        sources = {**resolved.sources, "optimizer.type": "default"}
        resolved = resolved.model_copy(update={"sources": sources})

    # A pipeline computes the loss inside the engine, which calls `loss_fn` on its last stage.
    engine_class = DeepSpeedEngine
    loss: WeightedLoss | None = None
    if isinstance(model, PipelineModule):
        engine_class = PipelineEngine
        loss = WeightedLoss(_micro_batch_loss(model), lambda batch: 1)
    plait_engine = plait_initialize(
        model, resolved, loss_fn=loss, optimizer=plait_optimizer, lr_scheduler=lr_scheduler
    )
    engine = engine_class(
        plait_engine,
        trains=trains,
        config=source,
        collate_fn=collate_fn,
        drop_last=_drop_last(source),
    )
    refuse_shards_as_weights(model, remedy=_FULL_WEIGHTS)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _set_local_rank(args: Any) -> None:
    """Set `args.local_rank`, if it exists, to the launcher's local rank, as DeepSpeed does."""
    local_rank = getattr(args, "local_rank", None)
    if local_rank is None:
        return
    launched = place().local_rank
    if local_rank not in (-1, launched):
        raise InputError(
            f"args.local_rank = {local_rank}: the launcher set {launched}; leave --local_rank out"
        )
    args.local_rank = launched


def _convert_to_master_weights(model: nn.Module, resolved: Resolved) -> None:
    """Convert float16 and bfloat16 parameters to float32 under mixed precision.

    As under DeepSpeed, the optimizer then updates float32 master weights. Copies in the compute
    dtype are made for the computation.
    """
    if resolved.precision.compute is not None:
        for parameter in model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


def _drop_last(source: Any) -> bool:
    """Return `dataloader_drop_last` of a configuration, which `Resolved` does not contain."""
    if not isinstance(source, str | Path | Mapping):
        return False
    return bool(read(source).tree.get("dataloader_drop_last", False))


def _select_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the only configuration among the arguments of `initialize`."""
    if config is None:
        config = config_params
    args_config = getattr(args, "deepspeed_config", None)
    if args_config is not None and config is not None:
        raise InputError(
            "deepspeed.initialize was given a configuration in args.deepspeed_config and one in"
            " config=; leave one of them out"
        )
    if args_config is not None:
        return args_config
    if config is None:
        raise InputError(
            "deepspeed.initialize needs a configuration: pass config=, or --deepspeed_config FILE"
            " in args"
        )
    return config


def _resolve_config(config: Any, model: nn.Module) -> Resolved:
    overrides = []
    if isinstance(model, PipelineModule):
        if model.num_stages is not None:
            overrides.append(f"parallel.pp={model.num_stages}")
        if model.recomputed:
            overrides.append("parallel.recompute.mode=full")
    resolved = resolved_for(model, load(config, overrides))
    if resolved.sources.get(MICRO_KEY) == CALLER_SOURCE:
        rule = "the configuration has no batch size, and DeepSpeed's calls count samples"
        raise ConfigError(Problem(MICRO_KEY, None, rule, f"write {MICRO_KEY} or train_batch_size"))

    problems = []
    for axis, degree, reason in (
        ("cp", resolved.layout.cp, "and no process may have all of a sequence"),
        ("ep", resolved.layout.ep, "which is not tested with experts on different processes"),
    ):
        if degree > 1:
            rule = f"DeepSpeed's calls give a model its batch as it is, {reason}"
            problems.append(Problem(f"parallel.{axis}", degree, rule, f"use 1, or {_FULL_STEPS}"))
    raise_problems(problems)
    return resolved


def _select_optimizer(
    resolved: Resolved, model: nn.Module, optimizer: Any, parameters: list[Any] | None
) -> Any:
    """Return the optimizer for Plait's engine.

    Returns:
        An optimizer, a function that returns one for a list of parameters, or None for the
        configuration's optimizer over all parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer is not None:
        if callable(optimizer) and parameters is not None:
            return optimizer(parameters)
        return optimizer
    if parameters is None:
        return None

    groups = _parameter_groups(parameters)
    # Parameters are compared by identity; tensors compare elementwise.
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    grouped = {
        id(parameter)
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    if len(groups) == 1 and set(groups[0]) == {"params"} and grouped == trained:
        # The same as without `model_parameters`.
        return None
    return _build_with_groups(resolved, model, groups, grouped)


def _parameter_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Return parameter groups.

    Args:
        parameters: Parameters, (name, parameter) pairs, or groups with either in `params`.
    """
    groups = [{"params": parameters}]
    if parameters and isinstance(parameters[0], dict):
        groups = parameters
    return [{**group, "params": _parameter_list(group["params"])} for group in groups]


def _parameter_list(parameters: Any) -> list[Any]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in parameters]


def _build_with_groups(
    resolved: Resolved, model: nn.Module, groups: list[dict[str, Any]], parameter_ids: set[int]
) -> torch.optim.Optimizer:
    """Build the configuration's optimizer over the caller's groups."""
    named_parameters = []
    for name, parameter in model.named_parameters():
        if id(parameter) in parameter_ids:
            named_parameters.append((name, parameter))
    optimizer = build_optimizer(resolved.optimizer, named_parameters)
    if len(optimizer.param_groups) != 1:
        raise InputError(
            f"deepspeed.initialize(model_parameters=...): {resolved.optimizer.type} creates its own"
            " parameter groups; pass all of the model's parameters, or an optimizer"
        )
    common = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    if "fused" in common:
        # The kernel that fits is not known before the parameters are sharded.
        common["fused"] = None
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group({**common, **group})
    return optimizer


def _micro_batch_loss(model: PipelineModule) -> Callable[[Any, Any], tuple[torch.Tensor, int]]:
    """Return the model's loss function in the form of Plait's engine: (loss, weight).

    As in DeepSpeed, the loss of a step is a mean of means: every micro-batch has the same weight.
    """
    loss_fn = model.loss_fn
    if loss_fn is None:
        raise InputError(
            "deepspeed.initialize: the PipelineModule has no loss; pass loss_fn=, a function of"
            " (output, labels), to the PipelineModule"
        )
    return lambda output, batch: (loss_fn(output, batch[-1]), 1)
