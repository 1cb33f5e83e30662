"""Table of aliases: other names of a setting.

They are names of DeepSpeed, Megatron and Accelerate, and legacy or misspelt keys. `examine` moves a
value from its alias to the target, and refuses two names of a target whose values disagree. A
target is a field or section of the schema, or a key of the DeepSpeed table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Absent:
    """Type of `ABSENT`, the result of `Alias.convert` for a value that leaves the target unset."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def _identity(value: Any) -> Any:
    return value


def _zero_is_off(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        return ABSENT
    return value


def _auto_is_off(value: Any) -> Any:
    if value == "auto":
        return ABSENT
    return value


def _flag(on: Any, off: Any = ABSENT) -> Callable[[Any], Any]:
    """Return a function that replaces true by `on` and false by `off`, and keeps other values."""

    def convert(value: Any) -> Any:
        # Invalid values stay for the check of the target's type.
        if not isinstance(value, bool):
            return value
        if value:
            return on
        return off

    return convert


_TO_DEVICE = _flag("cpu", "none")


@dataclass(frozen=True)
class Alias:
    """Alias of a setting."""

    target: str
    """Path of the setting or section."""
    note: str
    """Origin of the name, as `plait config explain` shows it."""
    convert: Callable[[Any], Any] = _identity
    """Conversion of the value to the target's."""


_MEGATRON = "Megatron's name"
_ACCELERATE = "accelerate's name"
_AUTOTP = "DeepSpeed's name; 0 leaves tensor parallelism off"
_SPELLING = "misspelt in published files"
_OLD = "an older name"
_FIELD = "the name inside DeepSpeed"
_ULYSSES = (
    "DeepSpeed's Ulysses degree: as many processes share a sequence, here by context parallelism"
)

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

ALIASES: dict[str, Alias] = {
    # Degrees of parallelism.
    "tensor_parallel.tp_size": Alias("parallel.tp", "DeepSpeed's name"),
    "tensor_parallel.autotp_size": Alias("parallel.tp", _AUTOTP, _zero_is_off),
    "tensor_parallel.tp.tp_size": Alias("parallel.tp", "DeepSpeed's name"),
    "tensor_parallel.tensor_parallel": Alias("tensor_parallel.tp", _FIELD),
    "tensor_model_parallel_size": Alias("parallel.tp", _MEGATRON),
    "model_parallel_size": Alias("parallel.tp", "the older name of Megatron and GPT-NeoX"),
    "tensor_parallel_size": Alias("parallel.tp", "the name of vLLM and others"),
    "mp_size": Alias("parallel.tp", "an older name of DeepSpeed"),
    "pipeline.stages": Alias(
        "parallel.pp", 'DeepSpeed\'s name; "auto" means no pipeline', _auto_is_off
    ),
    "pipeline_parallel.stages": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_parallel.size": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_parallel.pp_size": Alias("parallel.pp", "the number of pipeline stages"),
    "pipeline_model_parallel_size": Alias("parallel.pp", _MEGATRON),
    "pipeline_parallel_size": Alias("parallel.pp", "a name that DeepSpeed does not read"),
    "pipe_parallel_size": Alias(
        "parallel.pp", "GPT-NeoX's name; 0 leaves pipeline parallelism off", _zero_is_off
    ),
    "context_parallel_size": Alias("parallel.cp", _MEGATRON),
    "expert_model_parallel_size": Alias("parallel.ep", _MEGATRON),
    "sequence_parallel_size": Alias("parallel.cp", _ULYSSES),
    **{
        f"{axis}_size": Alias(f"parallel.{axis}", _ACCELERATE)
        for axis in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
    },
    # Batch sizes of Megatron-LM.
    "micro_batch_size": Alias("train_micro_batch_size_per_gpu", _MEGATRON),
    "global_batch_size": Alias("train_batch_size", _MEGATRON),
    # Older and misspelt names of DeepSpeed, and the names of its attributes.
    "bfloat16": Alias("bf16", _OLD),
    "fp32_allreduce": Alias(
        "communication_data_type", "an older name; false leaves it unset", _flag("fp32")
    ),
    "bf16.check_overflow": Alias("bf16.check_grad_overflow", _OLD),
    "compile.disable": Alias("compile.enabled", "an older name, negated", _flag(False, True)),
    "zero_optimization.ignore_unused_parameters": Alias(
        "parallel.unused_parameters", "DeepSpeed's name"
    ),
    "zero_optimization.zero_quantized_weights": Alias(
        "parallel.compress_weights", "DeepSpeed's name; true is int8", _flag("int8")
    ),
    "zero_optimization.zero_quantized_gradients": Alias(
        "parallel.compress_gradients", "DeepSpeed's name; true is int4", _flag("int4")
    ),
    "zero_optimization.zero_hpz_partition_size": Alias(
        "parallel.secondary_partition", "DeepSpeed's name; 1 is off"
    ),
    "zero_optimization.cpu_offload": Alias(
        "zero_optimization.offload_optimizer.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.cpu_offload_param": Alias(
        "zero_optimization.offload_param.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.cpu_offload_params": Alias(
        "zero_optimization.offload_param.device", _OLD, _TO_DEVICE
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Alias(_GATHER, _OLD),
    "zero_optimization.gather_fp16_weights_on_model_save": Alias(_GATHER, _OLD),
    "zero_optimization.gather_16bit_weights_on_model_save": Alias(_GATHER, _FIELD),
    "zero_optimization.prefetch_bucket_size": Alias(
        "zero_optimization.stage3_prefetch_bucket_size", _FIELD
    ),
    "zero_optimization.param_persistence_threshold": Alias(
        "zero_optimization.stage3_param_persistence_threshold", _FIELD
    ),
    "zero_optimization.stage3_param_persitence_threshold": Alias(
        "zero_optimization.stage3_param_persistence_threshold", _SPELLING
    ),
    "zero_optimization.model_persistence_threshold": Alias(
        "zero_optimization.stage3_model_persistence_threshold", _FIELD
    ),
    "zero_optimization.max_live_parameters": Alias(
        "zero_optimization.stage3_max_live_parameters", _FIELD
    ),
    "zero_optimization.max_reuse_distance": Alias(
        "zero_optimization.stage3_max_reuse_distance", _FIELD
    ),
    "zero_optimization.module_granularity_threshold": Alias(
        "zero_optimization.stage3_module_granularity_threshold", _FIELD
    ),
    "zero_optimization.use_all_reduce_for_fetch_params": Alias(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params", _FIELD
    ),
    "zero_optimization.allgather_sequential": Alias(
        "zero_optimization.stage3_allgather_sequential", _FIELD
    ),
    "activation_checkpointing.partitioned_activations": Alias(
        "activation_checkpointing.partition_activations", _SPELLING
    ),
    "aio.thread_count": Alias("aio.intra_op_parallelism", _OLD),
}
"""Aliases by their path. An alias may also rename a section (`bfloat16`)."""


def _expand_zero(value: Any) -> Any:
    """Expand `"zero_optimization": true`, DeepSpeed's first form of ZeRO, which means stage 1."""
    if isinstance(value, bool):
        return {"stage": int(value)}
    return value


def _expand_pipeline(value: Any) -> Any:
    """Expand a number of pipeline stages."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"size": value}
    return value


SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "zero_optimization": _expand_zero,
    "pipeline_parallel": _expand_pipeline,
}
"""Sections that may be written as a single value, and their expansion."""
