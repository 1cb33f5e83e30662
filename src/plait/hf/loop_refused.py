"""Refusals of arguments of Accelerate's Accelerator that Plait cannot honour."""

from __future__ import annotations

from typing import Any

from plait.cluster.topology import launchers_variable
from plait.errors import InputError

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
    "deepspeed_plugins": "one model is trained; give plait_config= one configuration",
    "rng_types": "ranks that share a batch draw the same numbers, others do not; leave it out",
}

# Configuration that replaces each setting of `accelerate launch`.
_LAUNCHERS = {
    "ACCELERATE_USE_FSDP": '{"zero_optimization": {"stage": 3}}',
    "ACCELERATE_USE_MEGATRON_LM": '{"parallel": {"tp": 2}}',
    "ACCELERATE_USE_PARALLELISM_CONFIG": '{"parallel": {"tp": 2}}',
}

# Values of DataLoaderConfiguration that have no effect.
_DATA = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_stateful_dataloader": False,
}
_PRECISION_HANDLERS = (
    "FP8RecipeKwargs",
    "AORecipeKwargs",
    "TERecipeKwargs",
    "MSAMPRecipeKwargs",
    "GradScalerKwargs",
)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raise InputError for arguments, or settings of `accelerate launch`, that cannot be honoured.

    Args:
        arguments: Keyword arguments of the Accelerator.
    """
    for name, value in arguments.items():
        if name in _ARGUMENTS and value:
            raise InputError(
                f"plait.hf.Accelerator({name}=...) cannot be honoured: {_ARGUMENTS[name]}"
            )
    for variable, config in _LAUNCHERS.items():
        if launchers_variable(variable, "false") == "true":
            raise InputError(
                f"accelerate launch set {variable}, which plait.hf.Accelerator cannot honour: write"
                f" plait_config={config}, and start the script with plait launch, torchrun, or"
                " accelerate launch without that section"
            )
    data = arguments.get("dataloader_config")
    for name, default in _DATA.items():
        if data is not None and getattr(data, name, default) != default:
            raise InputError(
                f"DataLoaderConfiguration({name}={getattr(data, name)}) is not supported: Plait"
                " splits the batches over ranks itself, each sample once; leave it out"
            )
    project = arguments.get("project_config")
    if getattr(project, "automatic_checkpoint_naming", False):
        raise InputError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) cannot be honoured: name the"
            " folder of every checkpoint in accelerator.save_state(folder)"
        )
    plugin = arguments.get("gradient_accumulation_plugin")
    if getattr(plugin, "sync_each_batch", False):
        raise InputError(
            "GradientAccumulationPlugin(sync_each_batch=True) cannot be honoured: gradients are"
            " reduced when the ZeRO stage needs it; leave it out"
        )
    for handler in arguments.get("kwargs_handlers") or ():
        if type(handler).__name__ in _PRECISION_HANDLERS:
            raise InputError(
                f"{type(handler).__name__} cannot be honoured: precision and loss scale are the"
                ' engine\'s; write {"fp16": {"enabled": true, ...}} in plait_config='
            )
