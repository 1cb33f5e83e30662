"""DeepSpeed's keys that are not fields of the schema: ignored or refused, with reasons.

The table contains all keys that Plait does not support, from DeepSpeed 0.19.8, older releases and
published files. Supported keys are fields of the schema, which documents them.

A key is ignored if it only tunes DeepSpeed's implementation or its logging. A key is refused if it
would change the results, the memory or an output that a user expects (a tracker, a checkpoint). A
refused key may stay in the file if its value is one of `off`. "auto" is valid for every ignored
key, as in DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from plait.config.schema.config import Status

Kind = Literal["flag", "integer", "number", "text", "list", "object", "any"]
"""Type of a value. The keys of an `object` are not checked."""


@dataclass(frozen=True)
class Key:
    """Key that the schema does not have, and the reason why it is ignored or refused."""

    path: str
    status: Status
    kind: Kind
    why: str
    off: tuple[Any, ...] = ()
    """Values of a refused key that request nothing, so that the key may stay in the file."""
    remedy: str = ""


def _each(section: str, names: str, value: Any) -> dict[str, Any]:
    """Return the same value for every name (separated by spaces) in a section."""
    return {f"{section}.{name}": value for name in names.split()}


IGNORED: tuple[tuple[str, dict[str, Kind]], ...] = (
    (
        "gradients are reduced and parameters gathered block by block, overlapped with compute",
        {
            **_each(
                "zero_optimization",
                "overlap_comm contiguous_gradients reduce_scatter allgather_partitions"
                " use_multi_rank_bucket_allreduce round_robin_gradients"
                " stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
                "flag",
            ),
            "zero_optimization.allgather_bucket_size": "integer",
            "disable_allgather": "flag",
        },
    ),
    (
        "the unit that is gathered and freed is a block of the model, so there is no budget to set",
        {
            **_each(
                "zero_optimization",
                "stage3_prefetch_bucket_size stage3_param_persistence_threshold"
                " stage3_model_persistence_threshold stage3_max_live_parameters"
                " stage3_max_reuse_distance stage3_module_granularity_threshold sub_group_size",
                "integer",
            ),
            "zero_optimization.leaf_module": "object",
        },
    ),
    (
        "a detail of DeepSpeed's implementation; results do not depend on it",
        {
            **_each(
                "zero_optimization",
                "compute_grad_norm parameter_alignment memory_efficient_linear"
                " override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings"
                " enable_sanity_checks legacy_stage1",
                "flag",
            ),
            "bf16.immediate_grad_update": "flag",
            "optimizer.legacy_fusion": "flag",
            "disable_python_gc": "flag",
            "use_data_before_expert_parallelism": "flag",
            **_each("pipeline", "pipe_partitioned grad_partitioned use_reentrant", "flag"),
        },
    ),
    (
        (
            "inputs of recomputed blocks are kept as they come; the allocator's expandable segments"
            " avoid fragments"
        ),
        {"activation_checkpointing.contiguous_memory_optimization": "flag"},
    ),
    (
        (
            "gradients of embeddings are reduced as dense tensors, which gives the same sums;"
            " DeepSpeed removed the sparse form too"
        ),
        {"sparse_gradients": "flag"},
    ),
    (
        "the optimizer runs on the host once backward has finished, and computes the same",
        {"zero_optimization.offload_optimizer.super_offload": "flag"},
    ),
    (
        (
            "weights and optimizer states are read and written shard by shard, on any layout;"
            " nothing is gathered on one process"
        ),
        _each(
            "zero_optimization",
            "stage3_gather_16bit_weights_on_model_save load_from_fp32_weights elastic_checkpoint",
            "flag",
        ),
    ),
    (
        (
            "a detail of DeepSpeed's copies; offloaded tensors are files in `nvme_path`, which"
            " threads prefetch and write asynchronously"
        ),
        {
            **_each(
                "zero_optimization",
                "cpu_offload_use_pin_memory pin_memory save_muon_momentum_buffer_in_memory",
                "flag",
            ),
            **_each(
                "zero_optimization.offload_optimizer",
                "pipeline pipeline_read pipeline_write fast_init",
                "flag",
            ),
            "zero_optimization.offload_optimizer.cpuadam_cores_perc": "number",
            "zero_force_ds_cpu_optimizer": "flag",
        },
    ),
    (
        (
            "only the buffers stay in memory, offload_param.buffer_count x buffer_size"
            " elements; all shards are in files"
        ),
        {"zero_optimization.offload_param.max_in_cpu": "integer"},
    ),
    (
        (
            "files are mapped and need no pinned memory; with device cpu,"
            " offload_optimizer.pin_memory pins shards and gradients together"
        ),
        {"zero_optimization.offload_param.pin_memory": "flag"},
    ),
    (
        (
            "a detail of how DeepSpeed reads and writes files; Plait uses one thread for each of"
            " the two"
        ),
        {
            **_each("aio", "block_size queue_depth intra_op_parallelism", "integer"),
            **_each("aio", "single_submit overlap_events use_gds", "flag"),
        },
    ),
    (
        "any torch.optim.Optimizer works at every stage, so there is nothing to allow",
        {"zero_allow_untested_optimizer": "flag"},
    ),
    (
        (
            "the loss is divided by the global number of targets before the backward pass and"
            " gradients are summed: nothing to prescale"
        ),
        {"prescale_gradients": "flag", "gradient_predivide_factor": "number"},
    ),
    ("inputs of the model are always cast to the compute dtype", {"fp16.auto_cast": "flag"}),
    ("no such key in DeepSpeed; `fp16.enabled` decides", {"fp16.fp16": "any"}),
    (
        "bfloat16 has the range of float32 and needs no loss scale; these keys belong to fp16",
        {
            "bf16.auto_cast": "flag",
            "bf16.loss_scale": "number",
            "bf16.min_loss_scale": "number",
            **_each("bf16", "initial_scale_power loss_scale_window hysteresis", "integer"),
        },
    ),
    (
        "a setting of torch autocast, which is off",
        {"torch_autocast.dtype": "text", "torch_autocast.lower_precision_safe_modules": "list"},
    ),
    (
        "`plait train` prints every `run.log_every` steps and writes every step to metrics.jsonl",
        {
            "steps_per_print": "number",
            "wall_clock_breakdown": "flag",
            "memory_breakdown": "flag",
            "dump_state": "flag",
            "log_level": "any",
            "log": "object",
            "timers.throughput.enabled": "flag",
            "timers.throughput.synchronized": "flag",
        },
    ),
    (
        "every step is sent to Comet, which thins them out itself",
        {"comet.samples_log_interval": "integer"},
    ),
    (
        (
            "the file is copied to the folder of the run; Comet reads the key from COMET_API_KEY or"
            " its own configuration file"
        ),
        {"comet.api_key": "text"},
    ),
    (
        "a report that changes no result; Plait does not write it",
        {
            "flops_profiler.enabled": "flag",
            "flops_profiler.detailed": "flag",
            "flops_profiler.profile_step": "integer",
            "flops_profiler.top_modules": "integer",
            "flops_profiler.module_depth": "number",
            "flops_profiler.recompute_fwd_factor": "number",
            "flops_profiler.output_file": "text",
            **_each("comms_logger", "enabled verbose prof_all debug", "flag"),
            "comms_logger.prof_ops": "list",
            "comms_config": "object",
        },
    ),
    (
        "`plait train` reads the `data` section; your own training loop has its own loader",
        {"dataloader_drop_last": "flag"},
    ),
    (
        "DeepSpeed only warns when it is not a multiple of 8; the model decides its vocabulary",
        {"vocabulary_size": "integer"},
    ),
    (
        "an all-to-all of sequence parallelism that context parallelism does not have",
        {"seq_parallel_communication_data_type": "text"},
    ),
    (
        "checkpoints are Plait's own, one file per process, and processes agree on their name",
        {
            "checkpoint.tag_validation": "text",
            "checkpoint.checkpoint_serialization": "flag",
            "checkpoint.parallel_write.pipeline_stage": "flag",
            "checkpoint.writer.type": "text",
            "checkpoint.writer.data_parallel": "text",
            "checkpoint.writer.io_buffer_size": "integer",
            "checkpoint.writer.io_multiplier": "integer",
            **_each("checkpoint.writer", "io_buffer_double show_statistics decoupled", "flag"),
            "datastates_ckpt": "any",
        },
    ),
    (
        "parallel.recompute selects the recomputed blocks; there is nothing else to arrange",
        {
            "activation_checkpointing.number_checkpoints": "integer",
            "activation_checkpointing.synchronize_checkpoint_boundary": "flag",
            "activation_checkpointing.profile": "flag",
        },
    ),
    (
        "the plan of tensor parallelism is derived from the model",
        {
            **_each("tensor_parallel", "preset_model vocab_parallel_ce_backend dtype", "text"),
            **_each(
                "tensor_parallel",
                "tp_overlap_comm vocab_parallel_lm_head keep_module_on_host",
                "flag",
            ),
            "tensor_parallel.tp_grain_size": "integer",
            "tensor_parallel.tp.tp_grain_size": "integer",
        },
    ),
    (
        "weights are initialised by parameter name, the same for every layout",
        {"pipeline.seed_layers": "flag"},
    ),
    (
        "a setting of DeepCompile; `compile` uses torch.compile",
        {
            **_each(
                "compile",
                "free_activation offload_activation_pin_memory autoep_non_moe double_buffer"
                " symmetric_memory debug_log sync_before_reduce sync_after_reduce"
                " sync_before_allgather sync_after_allgather keep_int_input_tensors"
                " keep_all_input_tensors",
                "flag",
            ),
            "compile.free_activation_threshold": "integer",
            "compile.passes": "list",
        },
    ),
    (
        "a setting of autotuning, which is off",
        _each(
            "autotuning",
            "fast metric metric_path start_profile_step end_profile_step tuner_type"
            " tuner_early_stopping tuner_num_trials overwrite results_dir exps_dir arg_mappings"
            " mp_size model_info model_info_path max_train_batch_size min_train_batch_size"
            " max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu"
            " num_tuning_micro_batch_sizes",
            "any",
        ),
    ),
    (
        "a setting of the hybrid engine, which is off",
        _each(
            "hybrid_engine",
            "max_out_tokens inference_tp_size release_inference_cache pin_parameters"
            " tp_gather_partition_size enable_cuda_graph",
            "any",
        ),
    ),
    (
        "a setting of expert parallelism, which is off",
        _each(
            "expert_parallel",
            "expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model"
            " moe_layer_pattern expert_pattern router_pattern use_grouped_mm"
            " disable_triton_grouped_mm route_norm route_scale score_apply combine_impl"
            " row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin"
            " comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k"
            " routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr"
            " has_shared_experts shared_experts_pattern shared_experts_gate_pattern"
            " expert_activation load_balance_coeff",
            "any",
        ),
    ),
    (
        "a setting of elastic batch sizes, which are off",
        _each(
            "elasticity",
            "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version"
            " prefer_larger_batch ignore_non_elastic_batch_info num_gpus_per_node"
            " model_parallel_size",
            "any",
        ),
    ),
    ("data sampling is off", {"data_efficiency.seed": "integer"}),
    (
        "nccl on GPUs and gloo on CPUs, or the process group that exists",
        {"distributed_backend": "text"},
    ),
    (
        "describes the model, which comes from the caller or from the `model` section",
        {"hidden_size": "integer", "num_attention_heads": "integer"},
    ),
)
"""Pairs (reason, keys). The type of the value is checked, and `plait config explain` shows the
reason.
"""


@dataclass(frozen=True)
class RefusedKeys:
    """Keys that are refused for the same reason."""

    why: str
    remedy: str
    keys: dict[str, tuple[Kind, tuple[Any, ...]]]
    """Type of each key, and the values with which it is not refused."""


_FLAG: tuple[Kind, tuple[Any, ...]] = ("flag", (False,))
_ANY: tuple[Kind, tuple[Any, ...]] = ("any", (False,))
_SWITCHED: tuple[Kind, tuple[Any, ...]] = ("object", ())
"""Section of a feature that is off unless the section contains `"enabled": true`."""
_PRESENT: tuple[Kind, tuple[Any, ...]] = ("object", ({},))
"""Section of a feature that is on unless the section contains `"enabled": false`."""

REFUSED: tuple[RefusedKeys, ...] = (
    RefusedKeys(
        "compiled code offloads nothing",
        "set it to false or leave it out; parallel.activation_offload and"
        " zero_optimization.offload_optimizer work without compilation",
        _each("compile", "offload_activation offload_opt_states offload_parameters", _FLAG),
    ),
    RefusedKeys(
        "ZenFlow updates part of the gradient late and on the CPU, which changes the training",
        "leave the section out",
        _each(
            "zero_optimization.zenflow",
            "topk_ratio select_strategy select_interval update_interval overlap_step offload"
            " auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
            _ANY,
        ),
    ),
    RefusedKeys(
        "parameters that are not trained are quantised with the others or not at all",
        "leave it out and set zero_quantized_weights",
        {"zero_optimization.zero_quantized_nontrainable_weights": _FLAG},
    ),
    RefusedKeys(
        "DeepSpeed removed it; parallel.error_feedback keeps the full residual",
        "leave it out and set parallel.error_feedback",
        {"zero_optimization.zeropp_loco_param": _ANY},
    ),
    RefusedKeys(
        "DeepSpeed removed it",
        "leave it out; for shards that stay inside a node set parallel.dp_replicate to the number"
        " of nodes",
        {
            "zero_optimization.mics_shard_size": ("number", (-1, 0, 1)),
            "zero_optimization.mics_hierarchical_params_gather": _FLAG,
        },
    ),
    RefusedKeys(
        "master weights, gradients and optimizer states are kept in float32",
        "set it to false or leave it out",
        {
            "fp16.fp16_master_weights_and_grads": _FLAG,
            "bf16.bf16_master_weights_and_grads": _FLAG,
            "bf16.bf16_optimizer_states": _FLAG,
        },
    ),
    RefusedKeys(
        "parameters and buffers keep the dtype of the model; `fp16` and `bf16` set the dtype of the"
        " computation",
        "leave it out",
        {"data_types.param_dtype": _ANY, "data_types.buffer_dtype": _ANY},
    ),
    RefusedKeys(
        "the whole computation has one dtype; torch.autocast is not used",
        'leave the section out and set "bf16": {"enabled": true}',
        {"torch_autocast.enabled": _FLAG},
    ),
    RefusedKeys(
        "Apex is not used; DeepSpeed removed it too",
        'leave the section out and set "bf16": {"enabled": true}',
        {"amp": _SWITCHED},
    ),
    RefusedKeys(
        "this release computes in fp16, bf16 or the dtype of the model",
        "leave the section out",
        {"fp8": _PRESENT},
    ),
    RefusedKeys(
        "gradients are those of the mean over all targets of the step",
        'use "mean" or leave it out',
        {"gradient_allreduce_op": ("text", ("mean",))},
    ),
    RefusedKeys(
        "the engine decides which micro-batch ends a step",
        "leave it out, or use plait.parallelize and its accumulate() in your own training loop",
        {"managed_gradient_accumulation": ("flag", (True,))},
    ),
    RefusedKeys(
        "the norm of all gradients is clipped by `gradient_clipping`, not by the optimizer",
        "leave it out and set gradient_clipping",
        {"optimizer.params.max_grad_norm": ("number", (0,))},
    ),
    RefusedKeys(
        "blocks are recomputed one by one, not in groups",
        'leave it out and set parallel.recompute.mode = "full"',
        {"pipeline.activation_checkpoint_interval": ("integer", (0,))},
    ),
    RefusedKeys(
        "compilation is torch.compile, a block at a time",
        'set it to false or leave it out; "compile": {"enabled": true} compiles with torch.compile',
        {"compile.deepcompile": _FLAG},
    ),
    RefusedKeys(
        "torch.compile is called with `backend` and `mode` and nothing else",
        "set compile.mode",
        {"compile.kwargs": _PRESENT},
    ),
    RefusedKeys(
        "layers are split by the plan of the model's family, or by parallel.plan",
        "leave it out, or write its rules as parallel.plan",
        {
            **_each(
                "tensor_parallel", "partition_config injection_policy_tuple mpu tp_group", _ANY
            ),
            "tensor_parallel.replace_with_kernel_inject": _FLAG,
            "tensor_parallel.kernel_inject": _FLAG,
            "tensor_parallel.tp.mpu": _ANY,
            "tensor_parallel.tp.tp_group": _ANY,
        },
    ),
    RefusedKeys(
        "stages are balanced by their predicted time",
        'use "best" or leave it out',
        {"pipeline.partition": ("text", ("best", "parameters"))},
    ),
    RefusedKeys(
        "sequences are split by context parallelism, of which only the degree is set",
        "leave the section out and set parallel.cp",
        {"sequence_parallel": _PRESENT},
    ),
    RefusedKeys(
        "experts are split over processes by one degree",
        "leave the section out and set parallel.ep",
        {"expert_parallel.enabled": _FLAG, "expert_parallel.autoep_size": ("integer", (0, 1))},
    ),
    RefusedKeys(
        "Plait launches no autotuning runs",
        "set it to false or leave the section out, and set the batch sizes",
        {"autotuning.enabled": _FLAG},
    ),
    RefusedKeys(
        "training and generation do not share an engine",
        "set it to false or leave the section out",
        {"hybrid_engine.enabled": _FLAG},
    ),
    RefusedKeys(
        "data is neither selected nor dropped by difficulty in this release",
        "set it to false or leave the section out",
        {
            "data_efficiency.enabled": _FLAG,
            **_each("data_efficiency", "data_sampling data_routing dynamic_batching", _SWITCHED),
            "curriculum_learning": _SWITCHED,
        },
    ),
    RefusedKeys(
        "models are trained as they are; DeepSpeed removed this feature too",
        "leave the section out",
        {
            "compression_training": _SWITCHED,
            "quantize_training": _SWITCHED,
            "eigenvalue": _SWITCHED,
            "progressive_layer_drop": _SWITCHED,
            "sparse_attention": _PRESENT,
            "graph_harvesting": _FLAG,
        },
    ),
    RefusedKeys(
        "each tracker has a section of its own",
        "leave it out, and write the section of the tracker (tensorboard, wandb, comet,"
        " csv_monitor)",
        {"monitor_config": _SWITCHED},
    ),
    RefusedKeys(
        "weights are not quantised", "leave the section out", {"weight_quantization": _PRESENT}
    ),
    RefusedKeys(
        "the batch size does not follow the number of processes; DeepSpeed removed this too",
        "leave the section out and set train_batch_size; checkpoints load on any number of"
        " processes",
        {"elasticity.enabled": _FLAG},
    ),
    RefusedKeys(
        "checkpoints are Plait's own files, which Azure's Nebula service does not handle",
        "leave it out; run.checkpoints takes a store's URL",
        {"nebula": _SWITCHED},
    ),
    RefusedKeys(
        "a checkpoint is one folder that all processes see",
        "leave it out, and name a folder that all machines share, or a store's URL, in"
        " run.checkpoints",
        {"checkpoint.use_node_local_storage": _FLAG},
    ),
    RefusedKeys(
        "DeepSpeed's universal checkpoints are not read; Plait's own load on any layout without"
        " conversion",
        "set it to false or leave it out",
        {"checkpoint.load_universal": _FLAG},
    ),
)


def _table() -> dict[str, Key]:
    keys = []
    for why, kinds in IGNORED:
        keys += [Key(path, Status.IGNORED, kind, why) for path, kind in kinds.items()]
    for group in REFUSED:
        for path, (kind, off) in group.keys.items():
            keys.append(Key(path, Status.REFUSED, kind, group.why, off, group.remedy))
    table = {key.path: key for key in keys}
    # Of two reasons for a key, one would be lost.
    assert len(table) == len(keys), "a key is in the table twice"
    return table


TABLE: dict[str, Key] = _table()
"""All keys of the table, by dotted path."""

SECRETS = ("comet.api_key",)
"""Keys whose value is never printed."""


_NAMES: dict[Kind, str] = {
    "flag": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "list": "a list",
    "object": "an object",
}


def type_problem(key: Key, value: Any) -> tuple[str, str] | None:
    """Return (rule, remedy) for a value of the wrong type, or None.

    As in DeepSpeed, "auto" is valid for every key, and quoted numbers and booleans are parsed.
    """
    number = _parse_number(value)
    valid = {
        "any": True,
        "flag": as_flag(value) is not None,
        # False for infinity and NaN, whose quotient is NaN.
        "integer": number is not None and number == number // 1,
        "number": number is not None,
        "text": isinstance(value, str),
        "list": isinstance(value, list),
        "object": isinstance(value, dict | bool),
    }
    if value == "auto" or valid[key.kind]:
        return None
    return f"must be {_NAMES[key.kind]}", "correct it or leave it out: " + key.why


def requests_nothing(key: Key, value: Any) -> bool:
    """Return True if a refused key may stay in the file with this value.

    "auto" selects DeepSpeed's default, which requests nothing.
    """
    if key.kind == "flag":
        value = as_flag(value)
    if value is None or value == "auto":
        return True

    for off in key.off:
        # Python's 0 == False, but a number is not a flag.
        if value == off and isinstance(value, bool) == isinstance(off, bool):
            return True
    return key.kind == "object" and not _is_enabled(value, default=key.off != ())


def as_flag(value: Any) -> bool | None:
    """Parse a boolean such as `true`, "false" or 1. Return None for other values and "auto"."""
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())


def _is_enabled(value: Any, *, default: bool) -> bool:
    """Return True if any `enabled` key of a section, at its top level or nested, is true.

    Args:
        value: The section, or a boolean in place of it.
        default: Result for a section that is not empty and contains no `enabled` key.
    """
    switches = _switches(value)
    if switches:
        return any(switches)
    return bool(value) and default


def _switches(value: Any) -> list[bool]:
    """Return the values of the outermost `enabled` keys of a section."""
    if isinstance(value, bool):
        return [value]
    if not isinstance(value, dict):
        return []
    if "enabled" in value:
        switch = value["enabled"]
        # "yes" and other texts are true in DeepSpeed, which does not check the type.
        return [switch not in (None, "auto") and as_flag(switch) is not False]

    switches: list[bool] = []
    for item in value.values():
        if isinstance(item, dict):
            switches += _switches(item)
    return switches


def _parse_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
