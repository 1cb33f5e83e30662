"""What every key of a file of `accelerate launch` means to Plait, as one table: what it sets, or
ignored, or refused, and why.

Data only; `accelerate` reads it. The list is the fields of Accelerate 1.15's `ClusterConfig`,
`ipex_config` of earlier releases, and the options of `accelerate launch` that its sections become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.config.convert.fsdp_keys import OF_ACCELERATE, ignored, on, refused, renamed
from plait.config.convert.translated import ForeignKey
from plait.config.dialects.table_values import as_flag

REPLICATED = (
    "NO",
    *(
        f"MULTI_{kind}"
        for kind in ["CPU", "GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON"]
    ),
)
"""Values of `distributed_type` that train a replica on every process."""

_LAUNCHER = "an option of the launcher; see `plait launch --help`"
_TPU = "an option of TPUs, which this file does not use"


def _sets(path: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda value: {path: value}


def _one_of(choices: Mapping[str, Mapping[str, Any]]) -> Callable[[Any], Mapping[str, Any]]:
    def sets(value: Any) -> Mapping[str, Any]:
        found = choices.get(str(value).lower())
        if found is None:
            raise ValueError(f"is none of {', '.join(choices)}; use one of them")
        return found

    return sets


def _unless(off: str, path: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda value: {} if str(value).lower() == off else {path: value}


def _many(names: str, make: Callable[[str], ForeignKey]) -> tuple[ForeignKey, ...]:
    return tuple(make(name) for name in names.split())


def _degree(path: str, **more: Any) -> Callable[[Any], Mapping[str, Any]]:
    """A degree of parallelism; one that is more than 1 takes `more` with it."""
    return lambda value: {path: value} | ({} if str(value) == "1" else more)


TOP: tuple[ForeignKey, ...] = (
    refused(
        "compute_environment",
        "text",
        "this release starts processes on machines of your own",
        "use LOCAL_MACHINE",
        "LOCAL_MACHINE",
    ),
    *_many(
        "machine_rank main_process_ip main_process_port rdzv_backend same_network"
        " main_training_function gpu_ids enable_cpu_affinity mpirun_config num_machines",
        lambda name: ignored(name, "any", _LAUNCHER),
    ),
    *_many(
        "downcast_bf16 tpu_name tpu_zone tpu_use_sudo commands command_file tpu_vm tpu_env",
        lambda name: ignored(name, "any", _TPU),
    ),
    refused("tpu_use_cluster", "flag", "this release does not run on TPUs", "use false", False),
    ignored("ipex_config", "any", "PyTorch runs on Intel devices without the extension"),
    ignored(
        "use_cpu", "flag", "Plait uses the GPUs that it finds, and the CPU where there is none"
    ),
    renamed(
        "debug",
        "flag",
        on({"faults.check_collectives": True}),
        "shapes are compared before every collective",
    ),
)
"""The top of the file, besides what `accelerate` reads together: `distributed_type`,
`mixed_precision`, `num_processes` and sections.
"""

_INIT = "plait.from_pretrained builds the model without its weights, at every stage"
DEEPSPEED: tuple[ForeignKey, ...] = (
    renamed("zero_stage", "whole", _sets("zero_optimization.stage")),
    renamed("gradient_accumulation_steps", "whole", _sets("gradient_accumulation_steps")),
    renamed("gradient_clipping", "number", _sets("gradient_clipping")),
    renamed(
        "offload_optimizer_device", "text", _sets("zero_optimization.offload_optimizer.device")
    ),
    renamed("offload_param_device", "text", _sets("zero_optimization.offload_param.device")),
    renamed(
        "offload_optimizer_nvme_path",
        "text",
        _unless("none", "zero_optimization.offload_optimizer.nvme_path"),
    ),
    renamed(
        "offload_param_nvme_path",
        "text",
        _unless("none", "zero_optimization.offload_param.nvme_path"),
    ),
    ignored("zero3_init_flag", "flag", _INIT),
    ignored(
        "zero3_save_16bit_model",
        "flag",
        "weights are written shard by shard, at every stage; nothing is gathered on one process",
    ),
    ignored(
        "deepspeed_moe_layer_cls_names",
        "text",
        "the unit that is gathered is a block of the model, its experts with it",
    ),
    *_many(
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter"
        " deepspeed_inclusion_filter",
        lambda name: ignored(name, "any", _LAUNCHER),
    ),
)
"""`deepspeed_config`, besides `deepspeed_config_file`."""

_OF_DEEPSPEED = (
    "zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device"
    " offload_param_device offload_optimizer_nvme_path offload_param_nvme_path"
    " zero3_save_16bit_model"
)
BELONGS_IN_DEEPSPEED = frozenset(_OF_DEEPSPEED.split())
"""What Accelerate takes from the file of DeepSpeed, where there is one."""

FSDP = tuple(
    ForeignKey(f"fsdp_{key.path}", key.status, key.kind, key.why, key.off, key.remedy, key.sets)
    for key in OF_ACCELERATE
)
"""`fsdp_config`, besides what says how it shards."""

_ULYSSES = {"parallel.context": "ulysses"}
PARALLELISM: tuple[ForeignKey, ...] = (
    renamed("parallelism_config_dp_replicate_size", "whole", _sets("parallel.dp_replicate")),
    renamed("parallelism_config_dp_shard_size", "whole", _sets("parallel.dp_shard")),
    renamed("parallelism_config_tp_size", "whole", _sets("parallel.tp")),
    renamed(
        "parallelism_config_cp_size",
        "whole",
        lambda value: {} if str(value) == "1" else {"parallel.cp": value},
        "1 is off",
    ),
    refused(
        "parallelism_config_cp_backend",
        "text",
        "context parallelism is Plait's own, as torch's is",
        "use torch",
        "torch",
    ),
    renamed(
        "parallelism_config_cp_comm_strategy",
        "text",
        _one_of(
            {
                "allgather": {"parallel.context": "all-gather-kv"},
                "alltoall": {"parallel.context": "ring"},
            }
        ),
        "torch's alltoall hands keys and values around a ring",
    ),
    renamed(
        "parallelism_config_sp_size",
        "whole",
        lambda value: {} if str(value) == "1" else {"parallel.cp": value, **_ULYSSES},
        "DeepSpeed's Ulysses: as many processes share a sequence; 1 is off",
    ),
    *_many(
        "parallelism_config_sp_backend parallelism_config_sp_seq_length"
        " parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        lambda name: ignored(
            name,
            "any",
            "a detail of DeepSpeed's Ulysses; sequences may have any length, and attention is the"
            " model's",
        ),
    ),
)
"""`parallelism_config`."""

DYNAMO: tuple[ForeignKey, ...] = (
    renamed(
        "dynamo_backend",
        "text",
        lambda value: (
            {}
            if str(value).lower() == "no"
            else {"compile.enabled": True, "compile.backend": str(value).lower()}
        ),
        "no is off",
    ),
    renamed("dynamo_mode", "text", _unless("default", "compile.mode")),
    ignored("dynamo_use_regional_compilation", "flag", "blocks are always compiled one by one"),
    refused("dynamo_use_fullgraph", "flag", "a graph may have breaks", "use false", False),
    refused(
        "dynamo_use_dynamic",
        "flag",
        "shapes are torch.compile's to find out",
        "use false, or leave it out",
        False,
    ),
)
"""`dynamo_config`, whose keys may be written without `dynamo_`."""

SECTIONS: dict[str, dict[str, ForeignKey]] = {
    "deepspeed_config": {key.path: key for key in DEEPSPEED},
    "fsdp_config": {key.path: key for key in FSDP},
    "parallelism_config": {key.path: key for key in PARALLELISM},
    "dynamo_config": {key.path: key for key in DYNAMO},
}
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""What Accelerate puts before the names of a section where it is left out."""

GRAD_SCALER: Mapping[str, Any] = {"fp16.loss_scale_window": 2000, "fp16.hysteresis": 1}
"""torch's GradScaler, where Plait's defaults are DeepSpeed's."""


def is_on(value: Any) -> bool:
    """Whether a precision is asked for (`no` is YAML's false to Accelerate)."""
    return str(value).lower() not in ("no", "none") and as_flag(value) is not False
