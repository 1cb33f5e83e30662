"""Names of DeepSpeed that are not supported, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cluster import accelerator
from plait.errors import InputError


class MissingName(InputError, AttributeError):
    """Unsupported name of DeepSpeed. It is an AttributeError, so that `hasattr` returns False."""


_RECOMPUTE = 'write "parallel": {"recompute": {"mode": "full"}} in the configuration'
FUNCTIONS: Mapping[str, str] = {
    "tp_model_init": 'write "parallel": {"tp": 2} in the configuration',
    "checkpointing": f"call torch.utils.checkpoint.checkpoint, or {_RECOMPUTE}",
    "moe": (
        "use a mixture-of-experts model of Transformers, for experts on several processes with"
        ' plait.initialize and "parallel": {"ep": 2} in the configuration'
    ),
    "runtime": (
        "pass an optimizer and a schedule of torch to initialize; torch.manual_seed sets the seed"
    ),
    "DeepSpeedConfig": "call plait.load_config(file)",
    "OnDevice": "build the model under torch.device('meta')",
}
"""Remedies for names in the module `deepspeed`."""

_LOCAL = "shards depend on the layout; call the function with `full` in place of `local`"
_LEAF = "units are the model's blocks; name them in parallel.blocks"
UTILS: Mapping[str, str] = {
    **{
        f"safe_{verb}_local_{tensor}": _LOCAL
        for verb in ("get", "set")
        for tensor in ("fp32_param", "grad", "optimizer_state")
    },
    "safe_update_full_grad_vectorized": (
        "call safe_get_full_grad and safe_set_full_grad for each parameter"
    ),
    "set_z3_leaf_modules": _LEAF,
    "unset_z3_leaf_modules": _LEAF,
    "z3_leaf_module": _LEAF,
    "groups": "engine.plait.mesh has the process groups",
    "OnDevice": FUNCTIONS["OnDevice"],
}
"""Remedies for names in `deepspeed.utils`."""

_PRECISION = 'write "bf16": {"enabled": true} or "fp16" in the configuration'
_SIZES = (
    "build the model again, and call initialize with the new sizes; checkpoints load with other"
    " batch sizes"
)
_BACKWARD = "call engine.backward(loss), which scales and divides"
_OFFLOAD = (
    'write "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}} in the'
    " configuration"
)
METHODS: Mapping[str, str] = {
    "to": "initialize has moved the model to engine.device",
    accelerator.NAME: "initialize has moved the model to engine.device",
    "cpu": "call save_16bit_model or module_state_dict to get the weights",
    "half": _PRECISION,
    "bfloat16": _PRECISION,
    "float": _PRECISION,
    "double": _PRECISION,
    "type": _PRECISION,
    "scale": _BACKWARD,
    "allreduce_gradients": _BACKWARD,
    "set_train_batch_size": _SIZES,
    "set_train_micro_batch_size": _SIZES,
    "compile": 'write "compile": {"enabled": true} in the configuration',
    "offload_states": _OFFLOAD,
    "reload_states": _OFFLOAD,
    "coalesce_grad_reduction": "use engine.no_sync(), which works at every ZeRO stage",
    "train_batch": (
        "call engine(batch), engine.backward(loss) and engine.step(); pipelines (PipelineModule)"
        " have train_batch"
    ),
    "eval_batch": "call engine.eval() and engine(batch)",
    "monitor": "write what the engine returns to a tracker of your own",
    "timers": "measure with time.perf_counter()",
    "tput_timer": "measure with time.perf_counter()",
    "save_fp16_model": "call engine.save_16bit_model",
    "generate": "call engine.plait.generate(prompts, ...)",
}
"""Remedies for names of the engine."""
_DOCUMENTATION = "docs/how-to/deepspeed-scripts.md lists the names; `plait` itself may have it"


def missing(
    owner: str, name: str, remedies: Mapping[str, str], *, default: str = _DOCUMENTATION
) -> MissingName:
    """Return the error for an unsupported name.

    Args:
        owner: Module or object that should have the name.
        name: The name.
        remedies: Remedies by name.
        default: Remedy for names that are not in `remedies`.
    """
    remedy = remedies.get(name, default)
    return MissingName(f"{owner}.{name}: plait.compat.deepspeed has no such name; {remedy}")


def refuse_arguments(function: str, remedies: Mapping[str, str], **arguments: object) -> None:
    """Raise InputError if one of the arguments is not None. `remedies` has a remedy for each."""
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"deepspeed.{function}({name}=...) is not supported; leave it out: {remedies[name]}"
            )
