"""Configuration of an Accelerate loop: the file, completed by the arguments of the Accelerator.

`refuse_arguments` refuses arguments that Plait cannot honour.
"""

from __future__ import annotations

from typing import Any

from plait.cluster.topology import launchers_variable
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.resolving.resolved_parts import ACCUMULATION_KEY, MICRO_KEY, TRAIN_KEY
from plait.config.schema.config import Bf16Section, Config, Fp16Section
from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.hf.arguments import ConfigSource, tracker_problems
from plait.hf.fields import SUPPORTED_BATCHING, unsupported_settings

PRECISIONS = ("no", "bf16", "fp16")


def precision_of(argument: str | None) -> str:
    """Return the precision of a loop.

    Args:
        argument: Argument `mixed_precision`. None: the setting of `accelerate launch`.

    Raises:
        InputError: Plait does not support the precision.
    """
    if argument is not None:
        precision = str(argument).lower()
    else:
        precision = launchers_variable("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISIONS:
        raise InputError(
            f"plait.hf.Accelerator(mixed_precision={precision!r}): Plait computes in"
            f" {', '.join(PRECISIONS)}; use one of them"
        )
    return precision


def checked_config(source: ConfigSource | None, *, precision: str, accumulation: int) -> Config:
    """Return the configuration of a file, with defaults from the arguments.

    Args:
        source: Configuration as a path, a mapping or a Config, or None.
        precision: Precision of the loop.
        accumulation: Number of micro-batches per step.

    Raises:
        ConfigError: The file contradicts the arguments, or has an optimizer or a scheduler.
    """
    config = load(source if source is not None else {})
    update: dict[str, Any] = {}
    problems = []
    if config.origin("gradient_clipping") == "default":
        update["gradient_clipping"] = 0.0  # accelerator.clip_grad_norm_ sets it.

    # `mixed_precision` is the default of the file, and must not contradict it.
    written = {
        name: getattr(config, name).enabled
        for name in ("bf16", "fp16")
        if config.origin(f"{name}.enabled") != "default"
    }
    if not written:
        update["bf16"] = Bf16Section(enabled=precision == "bf16")
        update["fp16"] = Fp16Section(enabled=precision == "fp16")
    for name, value in written.items():
        if precision != "no" and value not in ("auto", precision == name):
            problems.append(_contradiction(f"{name}.enabled", value, "mixed_precision", precision))

    configured = config.gradient_accumulation_steps
    if configured is None:
        update[ACCUMULATION_KEY] = accumulation
    elif configured not in ("auto", accumulation):
        argument = "gradient_accumulation_steps"
        problems.append(_contradiction(ACCUMULATION_KEY, configured, argument, accumulation))

    for name, arguments in (
        ("optimizer", "optimizer, ..."),
        ("scheduler", "optimizer, scheduler, ..."),
    ):
        section = getattr(config, name)
        if section is not None:
            rule = f"the loop passes its own, accelerator.prepare(model, {arguments})"
            remedy = "leave it out of the configuration"
            problems.append(Problem(name, section.type, rule, remedy))
    raise_problems(problems)
    return config.model_copy(update=update).with_provenance(config.provenance)


def resolved_of(
    config: Config,
    *,
    world_size: int,
    precision: str,
    accumulation: int,
    micro: int,
    hidden_size: int | None,
) -> Resolved:
    """Resolve the configuration of a loop.

    Args:
        config: The result of `checked_config`.
        world_size: Number of processes.
        precision: Precision of the loop.
        accumulation: Number of micro-batches per step.
        micro: Number of samples in a batch of the loader.
        hidden_size: Hidden size of the model, if it is known.

    Raises:
        ConfigError: A setting does not support a loop with `accelerator.backward(loss)`.
    """
    auto = {
        MICRO_KEY: micro,
        ACCUMULATION_KEY: accumulation,
        TRAIN_KEY: None,
        "gradient_clipping": 0.0,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    resolved = resolve(
        config, world_size=world_size, hidden_size=hidden_size, micro_batch_size=micro, auto=auto
    )
    raise_problems(_unsupported(resolved))
    return resolved


def _contradiction(path: str, value: Any, argument: str, argument_value: Any) -> Problem:
    rule = f"Accelerator({argument}={argument_value!r}) decides it too"
    return Problem(path, value, rule, 'write "auto" in the file, or the same in both')


def _unsupported(resolved: Resolved) -> list[Problem]:
    """Return a problem for each setting that Accelerate loops do not support."""
    layout = resolved.layout
    problems = []
    rules = (
        (
            "pp",
            layout.pp,
            "a pipeline has no loss to call accelerator.backward on",
            "plait.hf.Trainer, or sharded.forward_backward of plait.parallelize",
        ),
        (
            "cp",
            layout.cp,
            "the loop passes its batch to the model unchanged, and no process has all of a"
            " sequence",
            "or engine.train_batch with plait.causal_lm_loss",
        ),
        (
            "ep",
            layout.ep,
            "your own training loop with experts on different processes is not tested",
            "plait.hf.Trainer, or engine.train_batch",
        ),
    )
    for axis, degree, rule, alternative in rules:
        if degree > 1:
            problems.append(Problem(f"parallel.{axis}", degree, rule, f"use 1, {alternative}"))

    problems += tracker_problems(
        resolved,
        "the loop records its own numbers with accelerator.log",
        'write Accelerator(log_with="{name}")',
        csv="write the numbers of the loop to a file",
    )
    if resolved.data_parallel.update_in_backward:
        rule = "the loop clips and steps between the backward and the update"
        problems.append(Problem("parallel.optimizer_in_backward", True, rule, "use false"))

    chunk_tokens = resolved.loss_chunk_tokens
    if chunk_tokens:
        rule = (
            "only plait.causal_lm_loss is computed in chunks, and the loop computes its loss itself"
        )
        remedy = "use 0, or call plait.chunked_causal_lm_loss"
        problems.append(Problem("parallel.loss_chunk_tokens", chunk_tokens, rule, remedy))

    for setting, value, off in resolved.routing.loss_settings:
        rule = "Plait adds it to plait.causal_lm_loss, and the loop computes its loss itself"
        problems.append(Problem(setting, value, rule, f"use {off}, or engine.train_batch"))
    return problems


def refuse_another_clipping(config: Config, max_norm: float) -> None:
    """Raise ConfigError if `max_norm` of `clip_grad_norm_` differs from `gradient_clipping`."""
    configured = config.gradient_clipping
    if configured not in ("auto", 0, max_norm):
        rule = f"accelerator.clip_grad_norm_ was called with {max_norm}, and both decide it"
        raise ConfigError(Problem("gradient_clipping", configured, rule, "leave one of them out"))


_FILE = "leave it out, and write it in plait_config="

# Remedy of each argument.
_ARGUMENTS = {
    "split_batches": (
        "a batch of the loader is one rank's; leave it out, and give the DataLoader the batch size"
        " of a rank"
    ),
    "fsdp_plugin": f'{_FILE}: {{"zero_optimization": {{"stage": 3}}}}',
    "torch_tp_plugin": f'{_FILE}: {{"parallel": {{"tp": 2}}}}',
    "parallelism_config": f'{_FILE}: {{"parallel": {{"tp": 2}}}}',
    "megatron_lm_plugin": (
        f'{_FILE}: {{"parallel": {{"tp": 2}}}}; flags of Megatron-LM: plait config convert'
    ),
    "dynamo_backend": f'{_FILE}: {{"compile": {{"enabled": true}}}}',
    "dynamo_plugin": f'{_FILE}: {{"compile": {{"enabled": true}}}}',
    "deepspeed_plugins": "one model is trained; pass plait_config= one configuration",
    "rng_types": "ranks that share a batch draw the same numbers, others do not; leave it out",
}

# Configuration that replaces each setting of `accelerate launch`.
_LAUNCHERS = {
    "ACCELERATE_USE_FSDP": '{"zero_optimization": {"stage": 3}}',
    "ACCELERATE_USE_MEGATRON_LM": '{"parallel": {"tp": 2}}',
    "ACCELERATE_USE_PARALLELISM_CONFIG": '{"parallel": {"tp": 2}}',
}

# Supported values of DataLoaderConfiguration.
_DATA = {**SUPPORTED_BATCHING, "use_stateful_dataloader": (False,)}
_PRECISION_HANDLERS = (
    "FP8RecipeKwargs",
    "AORecipeKwargs",
    "TERecipeKwargs",
    "MSAMPRecipeKwargs",
    "GradScalerKwargs",
)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raise InputError for arguments, or settings of `accelerate launch`, that are not supported.

    Args:
        arguments: Keyword arguments of the Accelerator.
    """
    for name, value in arguments.items():
        if name in _ARGUMENTS and value:
            raise InputError(
                f"plait.hf.Accelerator({name}=...) is not supported: {_ARGUMENTS[name]}"
            )
    for variable, config in _LAUNCHERS.items():
        if launchers_variable(variable, "false") == "true":
            raise InputError(
                f"accelerate launch set {variable}, which plait.hf.Accelerator cannot honour: write"
                f" plait_config={config}, and start the script with plait launch, torchrun, or"
                " accelerate launch with a configuration that does not set it"
            )
    data = arguments.get("dataloader_config")
    for name in unsupported_settings(data, _DATA):
        raise InputError(
            f"DataLoaderConfiguration({name}={getattr(data, name)}) is not supported: Plait"
            " splits the batches over ranks itself, and every sample is used once; leave it out"
        )
    if getattr(arguments.get("project_config"), "automatic_checkpoint_naming", False):
        raise InputError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) is not supported: name the"
            " folder of every checkpoint in accelerator.save_state(folder)"
        )
    if getattr(arguments.get("gradient_accumulation_plugin"), "sync_each_batch", False):
        raise InputError(
            "GradientAccumulationPlugin(sync_each_batch=True) is not supported: gradients are"
            " reduced when the ZeRO stage needs it; leave it out"
        )
    for handler in arguments.get("kwargs_handlers") or ():
        if type(handler).__name__ in _PRECISION_HANDLERS:
            raise InputError(
                f"{type(handler).__name__} is not supported: precision and loss scale are the"
                ' engine\'s; write {"fp16": {"enabled": true, ...}} in plait_config='
            )
