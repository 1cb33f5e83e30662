"""`deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from plait.compat.deepspeed import held
from plait.compat.deepspeed.distributed import PORT, refuse_no_group, refuse_port
from plait.compat.deepspeed.engine import DeepSpeedEngine, PipelineEngine
from plait.compat.deepspeed.optimizer import EngineOptimizer
from plait.compat.deepspeed.pipe import PipelineModule
from plait.compat.deepspeed.refused import refuse_given
from plait.config.resolving.batch import CALLERS, MICRO
from plait.config.resolving.resolve import Resolved, load
from plait.engine.build import initialize as plait_initialize
from plait.engine.engine import Engine
from plait.errors import ConfigError, InputError, Problem
from plait.optim.optimizer import build_optimizer
from plait.sharded.assemble import resolved_for

_REMEDIES = {
    "mpu": 'write the degrees of parallelism in the configuration: "parallel": {"tp": 2, "pp": 2}',
    "mesh_param": 'write the degrees of parallelism in the configuration: "parallel": {"tp": 2, "cp": 2}',
}


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
) -> tuple[DeepSpeedEngine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """Shard `model` in place as the configuration says. Returns (engine, optimizer, data loader of `training_data` or None, schedule).

    The configuration is `args.deepspeed_config` or `config`, never both; `config_params` is read where neither is given. `optimizer` is an
    optimizer over the model's parameters or a function of `model_parameters`, and takes the place of the configuration's; that one is built
    over `model_parameters`, parameters or groups of them (all trained ones where it is not given). `lr_scheduler` is a schedule or a function
    of the optimizer. Collective. Raises ConfigError, ModelError or InputError before any harm, and InputError for what cannot be honoured.
    """
    refuse_given("initialize", _REMEDIES, mpu=mpu, mesh_param=mesh_param)
    refuse_port(distributed_port)
    refuse_no_group(dist_init_required)
    if not isinstance(model, nn.Module):
        raise InputError(f"deepspeed.initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}")
    resolved = _resolved(_configuration(args, config, config_params), model)
    chosen = _optimizer(resolved, model, optimizer, list(model_parameters) if model_parameters is not None else None)
    if chosen is not None and optimizer is None:  # it is the configuration's, over the caller's groups
        resolved = resolved.model_copy(update={"sources": {**resolved.sources, "optimizer.type": "default"}})
    loss: dict[str, Any] = {"loss_fn": _mean(model), "weight_fn": lambda batch: 1} if isinstance(model, PipelineModule) else {}
    engine = plait_initialize(model, resolved, optimizer=chosen, lr_scheduler=lr_scheduler, **loss)
    ours = PipelineEngine(engine) if isinstance(model, PipelineModule) else DeepSpeedEngine(engine)
    held.remember(ours)
    if training_data is not None:
        ours.training_dataloader = _loader(engine, training_data, collate_fn)
    return ours, ours.optimizer, ours.training_dataloader, ours.lr_scheduler


def _configuration(args: Any, config: Any, config_params: Any) -> Any:
    config = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        raise InputError("deepspeed.initialize was given a configuration in args.deepspeed_config and one in config=; leave one of them out")
    found = from_args if from_args is not None else config
    if found is None:
        raise InputError("deepspeed.initialize needs a configuration: pass config=, or --deepspeed_config FILE in args")
    return found


def _resolved(config: Any, model: nn.Module) -> Resolved:
    stages = model.num_stages if isinstance(model, PipelineModule) else None
    resolved = resolved_for(model, load(config, [f"parallel.pp={stages}"] if stages is not None else []))
    if resolved.sources.get(MICRO) == CALLERS:
        rule = "the configuration has no batch size, and DeepSpeed's calls count samples"
        raise ConfigError(Problem(MICRO, None, rule, f"write {MICRO} or train_batch_size"))
    return resolved


def _optimizer(resolved: Resolved, model: nn.Module, given: Any, parameters: list[Any] | None) -> Any:
    """What Plait is given: an optimizer, a function of a parameter list, or None for the configuration's over all parameters."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        return given(parameters) if callable(given) and parameters is not None else given
    if resolved.sources.get("optimizer.type", "default") == "default":
        raise InputError(
            'deepspeed.initialize was given no optimizer: write "optimizer" in the configuration or pass optimizer=; a model that is not '
            "trained needs no engine (plait.generate, plait.parallelize)"
        )
    if parameters is None:
        return None
    groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    groups = [{**group, "params": [p[1] if isinstance(p, tuple) else p for p in _listed(group["params"])]} for group in groups]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    own = [p for group in groups for p in group["params"] if p.requires_grad]
    if len(groups) == 1 and set(groups[0]) == {"params"} and {id(p) for p in own} == trained:
        return None
    return _grouped(resolved, model, groups, {id(p) for p in own})


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _grouped(resolved: Resolved, model: nn.Module, groups: list[dict[str, Any]], wanted: set[int]) -> torch.optim.Optimizer:
    """The configuration's optimizer over the caller's groups."""
    made = build_optimizer(resolved.optimizer, [(name, p) for name, p in model.named_parameters() if id(p) in wanted])
    if len(made.param_groups) != 1:
        raise InputError(
            f"deepspeed.initialize(model_parameters=...): {resolved.optimizer.type} makes groups of its own; pass all of the model's "
            "parameters, or an optimizer"
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
        raise InputError("deepspeed.initialize: PipelineModule(loss_fn=...) is missing, a function of (output, labels)")
    return lambda output, batch: (loss_fn(output, batch[-1]), 1)


def _loader(engine: Engine, data: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> DataLoader[Any]:
    """Micro-batches of this data-parallel rank's samples, shuffled as torch's DistributedSampler does."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise InputError(
            "deepspeed.initialize(training_data=...) takes a data set with a length: ranks would all read the same of a stream; make a "
            "DataLoader of your own over the part of engine.plait.dp_rank"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=engine.dp_size, rank=engine.dp_rank)
    return DataLoader(
        data,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=sampler,
        collate_fn=collate_fn,
        pin_memory=engine.device.type != "cpu",
    )
