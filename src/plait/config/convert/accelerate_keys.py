"""Tables of the keys of `accelerate launch`: what each sets, or why it is ignored or refused.

The tables contain the fields of Accelerate 1.15's `ClusterConfig`, `ipex_config` of earlier
releases, and the options of `accelerate launch` that the sections become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.config.convert.fsdp_keys import ACCELERATE_KEYS, ignored, on, refused, renamed
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


Sets = Callable[[Any], Mapping[str, Any]]
"""Function from a key's value to settings by path."""


def _sets(path: str) -> Sets:
    """Return a function that sets a path to the value."""
    return lambda value: {path: value}


def _sets_unless(off: str, path: str, **more: Any) -> Sets:
    """Return a function that sets a path to the value, and `more`, unless the value is `off`."""

    def sets(value: Any) -> Mapping[str, Any]:
        if str(value).lower() == off:
            return {}
        return {path: value, **more}

    return sets


def _one_of(choices: Mapping[str, Mapping[str, Any]]) -> Sets:
    """Return a function that refuses values other than `choices`."""

    def sets(value: Any) -> Mapping[str, Any]:
        settings = choices.get(str(value).lower())
        if settings is None:
            raise ValueError(f"is none of {', '.join(choices)}; use one of them")
        return settings

    return sets


def _compile_settings(backend: Any) -> Mapping[str, Any]:
    name = str(backend).lower()
    if name == "no":
        return {}
    return {"compile.enabled": True, "compile.backend": name}


def _ignored_keys(names: str, why: str) -> tuple[ForeignKey, ...]:
    """Return keys of any type (names separated by spaces) that are ignored for the same reason."""
    return tuple(ignored(name, "any", why) for name in names.split())


TOP: tuple[ForeignKey, ...] = (
    refused(
        "compute_environment",
        "text",
        "this release starts processes on machines of your own",
        "use LOCAL_MACHINE",
        "LOCAL_MACHINE",
    ),
    *_ignored_keys(
        "machine_rank main_process_ip main_process_port rdzv_backend same_network"
        " main_training_function gpu_ids enable_cpu_affinity mpirun_config num_machines",
        _LAUNCHER,
    ),
    *_ignored_keys(
        "downcast_bf16 tpu_name tpu_zone tpu_use_sudo commands command_file tpu_vm tpu_env",
        _TPU,
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
"""Keys at the top of the file. `accelerate` reads `distributed_type`, `mixed_precision` and
`num_processes`, which depend on each other.
"""

_INIT = "plait.from_pretrained builds the model without its weights, at every stage"
DEEPSPEED: tuple[ForeignKey, ...] = (
    renamed("zero_stage", "integer", _sets("zero_optimization.stage")),
    renamed("gradient_accumulation_steps", "integer", _sets("gradient_accumulation_steps")),
    renamed("gradient_clipping", "number", _sets("gradient_clipping")),
    renamed(
        "offload_optimizer_device", "text", _sets("zero_optimization.offload_optimizer.device")
    ),
    renamed("offload_param_device", "text", _sets("zero_optimization.offload_param.device")),
    renamed(
        "offload_optimizer_nvme_path",
        "text",
        _sets_unless("none", "zero_optimization.offload_optimizer.nvme_path"),
    ),
    renamed(
        "offload_param_nvme_path",
        "text",
        _sets_unless("none", "zero_optimization.offload_param.nvme_path"),
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
    *_ignored_keys(
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter"
        " deepspeed_inclusion_filter",
        _LAUNCHER,
    ),
)
"""Keys of `deepspeed_config`, except for `deepspeed_config_file`."""

IN_DEEPSPEED_FILE = frozenset(
    {
        "zero_stage",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_save_16bit_model",
    }
)
"""Keys of `deepspeed_config` that Accelerate reads from DeepSpeed's file if one is named."""

FSDP = tuple(
    ForeignKey(f"fsdp_{key.path}", key.status, key.kind, key.why, key.off, key.remedy, key.sets)
    for key in ACCELERATE_KEYS
)
"""Keys of `fsdp_config`, except for those that determine the sharding."""

PARALLELISM: tuple[ForeignKey, ...] = (
    renamed("parallelism_config_dp_replicate_size", "integer", _sets("parallel.dp_replicate")),
    renamed("parallelism_config_dp_shard_size", "integer", _sets("parallel.dp_shard")),
    renamed("parallelism_config_tp_size", "integer", _sets("parallel.tp")),
    renamed(
        "parallelism_config_cp_size",
        "integer",
        _sets_unless("1", "parallel.cp"),
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
        "integer",
        _sets_unless("1", "parallel.cp", **{"parallel.context": "ulysses"}),
        "DeepSpeed's Ulysses: as many processes share a sequence; 1 is off",
    ),
    *_ignored_keys(
        "parallelism_config_sp_backend parallelism_config_sp_seq_length"
        " parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        "a detail of DeepSpeed's Ulysses; sequences may have any length, and attention is the"
        " model's",
    ),
)
"""Keys of `parallelism_config`."""

DYNAMO: tuple[ForeignKey, ...] = (
    renamed(
        "dynamo_backend",
        "text",
        _compile_settings,
        "no is off",
    ),
    renamed("dynamo_mode", "text", _sets_unless("default", "compile.mode")),
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
"""Keys of `dynamo_config`, whose prefix `dynamo_` is optional."""

SECTIONS: dict[str, dict[str, ForeignKey]] = {
    "deepspeed_config": {key.path: key for key in DEEPSPEED},
    "fsdp_config": {key.path: key for key in FSDP},
    "parallelism_config": {key.path: key for key in PARALLELISM},
    "dynamo_config": {key.path: key for key in DYNAMO},
}
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""Prefixes that Accelerate adds to the names in a section if they are missing."""

GRAD_SCALER: Mapping[str, Any] = {"fp16.loss_scale_window": 2000, "fp16.hysteresis": 1}
"""Defaults of torch's GradScaler, which Accelerate uses. Plait's defaults are DeepSpeed's."""


def is_on(value: Any) -> bool:
    """Return True if a precision is enabled. Accelerate's YAML reads `no` as false."""
    return str(value).lower() not in ("no", "none") and as_flag(value) is not False
