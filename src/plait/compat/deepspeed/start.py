"""`deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from plait.cluster.topology import place
from plait.compat.deepspeed import held
from plait.compat.deepspeed.constructor import refuse_lost_writes
from plait.compat.deepspeed.distributed import PORT, refuse_no_group, refuse_port
from plait.compat.deepspeed.engine import DeepSpeedEngine
from plait.compat.deepspeed.loaders import StreamLoader
from plait.compat.deepspeed.optimizer import EngineOptimizer
from plait.compat.deepspeed.pipe import PipelineModule
from plait.compat.deepspeed.pipeline_engine import PipelineEngine
from plait.compat.deepspeed.refused import refuse_given
from plait.config.reading.source import read
from plait.config.resolving.batch import CALLERS, MICRO
from plait.config.resolving.resolve import Resolved, load
from plait.engine.build import initialize as plait_initialize
from plait.errors import ConfigError, InputError, Problem, refuse
from plait.optim.optimizer import build_optimizer
from plait.sharded.assemble import resolved_for
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_REMEDIES = {
    "mpu": 'write the degrees of parallelism in the configuration: "parallel": {"tp": 2, "pp": 2}',
    "mesh_param": (
        'write the degrees of parallelism in the configuration: "parallel": {"tp": 2, "cp": 2}'
    ),
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
) -> tuple[DeepSpeedEngine, EngineOptimizer | None, DataLoader[Any] | StreamLoader | None, Any]:
    """Shard `model` in place as the configuration says. Returns (engine, optimizer, data loader of
    `training_data` or None, schedule). Without any optimizer the engine computes forwards alone,
    and optimizer and schedule are None.

    The configuration is `args.deepspeed_config` or `config`, never both; `config_params` is read
    where neither is given. `optimizer` is an optimizer over the model's parameters or a function of
    `model_parameters`, and takes the place of the configuration's; that one is built over
    `model_parameters`, parameters or groups of them (all trained ones where it is not given).
    `lr_scheduler` is a schedule or a function of the optimizer. Collective. Raises ConfigError,
    ModelError or InputError before any harm, and InputError for what cannot be honoured.
    """
    refuse_given("initialize", _REMEDIES, mpu=mpu, mesh_param=mesh_param)
    refuse_port(distributed_port)
    refuse_no_group(dist_init_required)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"deepspeed.initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}"
        )
    if torch.get_default_device().type == "meta":
        raise InputError(
            "deepspeed.initialize inside of zero.Init(): tensors have no memory there; build the"
            " model inside, and call it after"
        )
    refuse_lost_writes(model)
    _set_local_rank(args)
    source = _configuration(args, config, config_params)
    resolved = _resolved(source, model)
    _keep_master_weights(model, resolved)
    trains = optimizer is not None or resolved.sources.get("optimizer.type", "default") != "default"
    listed = list(model_parameters) if model_parameters is not None else None
    chosen = _optimizer(resolved, model, optimizer, listed) if trains else _no_optimizer
    # it is the configuration's, over the caller's groups
    if chosen is not None and optimizer is None:
        resolved = resolved.model_copy(
            update={"sources": {**resolved.sources, "optimizer.type": "default"}}
        )
    loss: dict[str, Any] = (
        {"loss_fn": _mean(model), "weight_fn": lambda batch: 1}
        if isinstance(model, PipelineModule)
        else {}
    )
    engine = plait_initialize(model, resolved, optimizer=chosen, lr_scheduler=lr_scheduler, **loss)
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    ours = kind(
        engine, trains=trains, config=source, collate_fn=collate_fn, drop_last=_drops_last(source)
    )
    held.remember(ours)
    refuse_shards_as_weights(model, remedy=_FULL_WEIGHTS)
    if training_data is not None:
        ours.training_dataloader = ours.deepspeed_io(training_data)
    return ours, ours.optimizer, ours.training_dataloader, ours.lr_scheduler


def _set_local_rank(args: Any) -> None:
    """`args.local_rank`, where a script has it, is that of the launcher, as DeepSpeed sets it."""
    given = getattr(args, "local_rank", None)
    if given is None:
        return
    found = place().local_rank
    if given not in (-1, found):
        raise InputError(
            f"args.local_rank = {given}: it is {found} here; leave --local_rank out, the launcher's"
            " variables say it"
        )
    args.local_rank = found


def _keep_master_weights(model: nn.Module, resolved: Resolved) -> None:
    """A model in float16 or bfloat16 that computes in one of them keeps float32 master weights, as
    under DeepSpeed.
    """
    if resolved.precision.compute is not None:
        for parameter in model.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


def _drops_last(source: Any) -> bool:
    """`dataloader_drop_last` of the configuration, which says nothing about training."""
    tree = read(source).tree if isinstance(source, str | Path | Mapping) else {}
    return bool(tree.get("dataloader_drop_last", False))


def _configuration(args: Any, config: Any, config_params: Any) -> Any:
    config = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        raise InputError(
            "deepspeed.initialize was given a configuration in args.deepspeed_config and one in"
            " config=; leave one of them out"
        )
    found = from_args if from_args is not None else config
    if found is None:
        raise InputError(
            "deepspeed.initialize needs a configuration: pass config=, or --deepspeed_config FILE"
            " in args"
        )
    return found


def _resolved(config: Any, model: nn.Module) -> Resolved:
    overrides = []
    if isinstance(model, PipelineModule):
        overrides += [f"parallel.pp={model.num_stages}"] if model.num_stages is not None else []
        overrides += ["parallel.recompute.mode=full"] if model.recomputed else []
    resolved = resolved_for(model, load(config, overrides))
    if resolved.sources.get(MICRO) == CALLERS:
        rule = "the configuration has no batch size, and DeepSpeed's calls count samples"
        raise ConfigError(Problem(MICRO, None, rule, f"write {MICRO} or train_batch_size"))
    refuse(
        Problem(
            f"parallel.{axis}",
            degree,
            f"DeepSpeed's calls give a model its batch as it is, {why}",
            f"use 1, or {_FULL_STEPS}",
        )
        for axis, degree, why in (
            ("cp", resolved.layout.cp, "and no process may have all of a sequence"),
            ("ep", resolved.layout.ep, "which is not proven with experts on different processes"),
        )
        if degree > 1
    )
    return resolved


def _optimizer(
    resolved: Resolved, model: nn.Module, given: Any, parameters: list[Any] | None
) -> Any:
    """What Plait is given: an optimizer, a function of a parameter list, or None for the
    configuration's over all parameters.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(parameters) if callable(given) and parameters is not None else given
    if parameters is None:
        return None
    groups = (
        parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    )
    groups = [
        {**group, "params": [p[1] if isinstance(p, tuple) else p for p in _listed(group["params"])]}
        for group in groups
    ]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    own = [p for group in groups for p in group["params"] if p.requires_grad]
    if len(groups) == 1 and set(groups[0]) == {"params"} and {id(p) for p in own} == trained:
        return None
    return _grouped(resolved, model, groups, {id(p) for p in own})


def _no_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """For an engine that computes forwards alone: it has no states."""
    return torch.optim.SGD(parameters, lr=0.0)


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _grouped(
    resolved: Resolved, model: nn.Module, groups: list[dict[str, Any]], wanted: set[int]
) -> torch.optim.Optimizer:
    """The configuration's optimizer over the caller's groups."""
    made = build_optimizer(
        resolved.optimizer, [(name, p) for name, p in model.named_parameters() if id(p) in wanted]
    )
    if len(made.param_groups) != 1:
        raise InputError(
            f"deepspeed.initialize(model_parameters=...): {resolved.optimizer.type} makes groups of"
            " its own; pass all of the model's parameters, or an optimizer"
        )
    common = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    if "fused" in common:
        common["fused"] = None  # which kernel fits is not known before the parameters are cut
    made.param_groups.clear()
    for group in groups:
        made.add_param_group({**common, **group})
    return made


def _mean(model: PipelineModule) -> Callable[[Any, Any], tuple[torch.Tensor, int]]:
    """A mean of means: every micro-batch counts the same, as in DeepSpeed."""
    loss_fn = model.loss_fn
    if loss_fn is None:
        raise InputError(
            "deepspeed.initialize: PipelineModule(loss_fn=...) is missing, a function of (output,"
            " labels)"
        )
    return lambda output, batch: (loss_fn(output, batch[-1]), 1)
