"""Other names for the same setting: of DeepSpeed, Megatron and accelerate for the degrees of
parallelism, and legacy or misspelt keys.

Data only; `examine` moves a value from its written name to the target, through `convert`. Two names
of one target that disagree are refused there. A target is a field of the schema or a key of the
DeepSpeed table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Absent:
    """What `convert` returns when a value asks for nothing, so that the target stays unset."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def _same(value: Any) -> Any:
    return value


def _zero_is_off(value: Any) -> Any:
    return ABSENT if value == 0 and not isinstance(value, bool) else value


def _auto_is_off(value: Any) -> Any:
    return ABSENT if value == "auto" else value


def _flag(on: Any, off: Any = ABSENT) -> Callable[[Any], Any]:
    """What true and false stand for; other values stay."""
    return lambda value: (on if value else off) if isinstance(value, bool) else value


_TO_DEVICE = _flag("cpu", "none")


@dataclass(frozen=True)
class Alias:
    """One other name."""

    target: str
    note: str
    convert: Callable[[Any], Any] = _same


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
    # the degrees of parallelism
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
    # Megatron's batch sizes
    "micro_batch_size": Alias("train_micro_batch_size_per_gpu", _MEGATRON),
    "global_batch_size": Alias("train_batch_size", _MEGATRON),
    # DeepSpeed
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
"""Written name to its target. A complete section may be renamed (`bfloat16`)."""

SHORT_FORMS: dict[str, Callable[[Any], Any]] = {
    "zero_optimization": lambda value: {"stage": int(value)} if isinstance(value, bool) else value,
    "pipeline_parallel": lambda value: (
        {"size": value} if isinstance(value, int) and not isinstance(value, bool) else value
    ),
}
"""Sections that may be written as one value: DeepSpeed's first form of ZeRO, and a bare number of
stages.
"""
