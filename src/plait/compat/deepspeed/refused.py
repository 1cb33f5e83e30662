"""What DeepSpeed has and this has not, with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import InputError


class MissingName(InputError, AttributeError):
    """A name of DeepSpeed's that is not there. An AttributeError too, so that `hasattr` answers."""


FUNCTIONS: Mapping[str, str] = {
    "init_inference": "call plait.generate(model, prompts, config=...), or generate of the engine that has the model",
    "tp_model_init": 'write "parallel": {"tp": 2} in the configuration',
    "comm": "call torch.distributed, whose default group is the one that Plait uses",
    "ops": 'write "optimizer" in the configuration, or pass an optimizer of torch',
    "checkpointing": 'write "parallel": {"recompute": {"mode": "full"}} in the configuration',
    "moe": "experts are not distributed by Plait",
    "runtime": "pass what its classes are for to initialize (an optimizer, a schedule of torch)",
    "DeepSpeedConfig": "call plait.load_config(file)",
}
"""By name in the module `deepspeed`."""

_PRECISION = 'write "bf16": {"enabled": true} or "fp16" in the configuration; parameters and optimizer keep the dtype of the model'
_SIZES = "write it in the configuration and call initialize again; checkpoints load with other batch sizes"
_BACKWARD = "call engine.backward(loss), which scales and divides"
METHODS: Mapping[str, str] = {
    "to": "initialize has moved the model to engine.device",
    "cuda": "initialize has moved the model to engine.device",
    "cpu": "save_16bit_model or module_state_dict give the weights on the CPU",
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
    "offload_states": 'write "zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the configuration',
    "reload_states": 'write "zero_optimization": {"offload_optimizer": {"device": "cpu"}} in the configuration',
    "coalesce_grad_reduction": "use engine.no_sync(), which works at every ZeRO stage",
    "train_batch": "call engine(batch), engine.backward(loss) and engine.step(); pipelines (PipelineModule) have train_batch",
    "eval_batch": "call engine.eval() and engine(batch)",
    "monitor": "write what the engine returns to a tracker of your own",
    "save_fp16_model": "call engine.save_16bit_model",
    "generate": "call engine.plait.generate(prompts, ...)",
}
"""Of the engine."""


def missing(where: str, name: str, table: Mapping[str, str]) -> MissingName:
    """The error for a name that is not there."""
    remedy = table.get(name, "docs/deepspeed-scripts.md lists what is there; `plait` itself may have it")
    return MissingName(f"{where}.{name}: plait.compat.deepspeed has no such name; {remedy}")


def refuse_given(function: str, remedies: Mapping[str, str], **given: object) -> None:
    """Refuse arguments that cannot be honoured: those that are not None."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"deepspeed.{function}({name}=...) cannot be honoured; leave it out: {remedies[name]}")
