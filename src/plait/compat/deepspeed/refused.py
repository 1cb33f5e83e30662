"""What DeepSpeed has and this has not, with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cluster import accelerator
from plait.errors import InputError


class MissingName(InputError, AttributeError):
    """A name of DeepSpeed's that is not there. An AttributeError too, so that `hasattr` answers."""


_RECOMPUTE = 'write "parallel": {"recompute": {"mode": "full"}} in the configuration'
FUNCTIONS: Mapping[str, str] = {
    "tp_model_init": 'write "parallel": {"tp": 2} in the configuration',
    "checkpointing": f"call torch.utils.checkpoint.checkpoint, or {_RECOMPUTE}",
    "moe": "experts are not distributed by Plait",
    "runtime": (
        "pass what its classes are for to initialize (an optimizer, a schedule of torch);"
        " torch.manual_seed seeds"
    ),
    "DeepSpeedConfig": "call plait.load_config(file)",
    "OnDevice": "build the model under torch.device('meta')",
}
"""By name in the module `deepspeed`."""

_LOCAL = "parts differ from layout to layout; call the function with `full` in the place of `local`"
_LEAF = "units are the model's blocks; name them in parallel.blocks"
UTILS: Mapping[str, str] = {
    **{
        f"safe_{verb}_local_{what}": _LOCAL
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
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
"""By name in `deepspeed.utils`."""

_PRECISION = 'write "bf16": {"enabled": true} or "fp16" in the configuration'
_SIZES = (
    "write it in the configuration and call initialize again; checkpoints load with other batch"
    " sizes"
)
_BACKWARD = "call engine.backward(loss), which scales and divides"
_OFFLOAD = (
    'write "zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the configuration'
)
METHODS: Mapping[str, str] = {
    "to": "initialize has moved the model to engine.device",
    accelerator.NAME: "initialize has moved the model to engine.device",
    "cpu": "save_16bit_model or module_state_dict give the weights",
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
"""Of the engine."""
_LISTED = "docs/deepspeed-scripts.md lists what is there; `plait` itself may have it"


def missing(
    where: str, name: str, table: Mapping[str, str], *, otherwise: str = _LISTED
) -> MissingName:
    """The error for a name that is not there; its remedy is the table's, or `otherwise`."""
    return MissingName(
        f"{where}.{name}: plait.compat.deepspeed has no such name; {table.get(name, otherwise)}"
    )


def refuse_given(function: str, remedies: Mapping[str, str], **given: object) -> None:
    """Refuse arguments that cannot be honoured: those that are not None."""
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"deepspeed.{function}({name}=...) cannot be honoured; leave it out:"
                f" {remedies[name]}"
            )
