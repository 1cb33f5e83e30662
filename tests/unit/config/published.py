"""Configurations of the kinds that projects publish, written for these tests: what each says, and what becomes of it."""

from __future__ import annotations

from typing import Any

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FP16_AUTO = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ADAMW_AUTO = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP_AUTO = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
TO_CPU = {"device": "cpu", "pin_memory": True}
ZERO_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (the file, some of the resolved values for 4 processes and a caller whose micro batch is 2 and who trains in bf16)
    "transformers zero2": (
        {
            **AUTO_BATCH,
            "fp16": FP16_AUTO,
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW_AUTO,
            "scheduler": WARMUP_AUTO,
            "zero_optimization": ZERO_2,
        },
        {
            "zero_optimization.stage": 2,
            "precision.compute": "bfloat16",
            "precision.reduce": "bfloat16",
            "optimizer.params.lr": 5e-05,
        },
    ),
    "transformers zero3": (
        {
            **AUTO_BATCH,
            "fp16": FP16_AUTO,
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW_AUTO,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {**WARMUP_AUTO["params"], "total_num_steps": "auto"},
            },  # type: ignore[dict-item]
            "zero_optimization": ZERO_3,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {
            "zero_optimization.stage": 3,
            "parallel.dp_shard": 4,
            "scheduler.params.total_num_steps": 50,
            "scheduler.params.warmup_max_lr": 5e-05,
        },
    ),
    "axolotl zero1": (
        {
            **AUTO_BATCH,
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": {"enabled": "auto"},
            "fp16": {**FP16_AUTO, "auto_cast": False, "initial_scale_power": 32},
            "wall_clock_breakdown": False,
        },
        {"zero_optimization.stage": 1, "train_batch_size": 8},
    ),
    "axolotl zero2 with torch compile": (
        {
            "compile": {"disable": False, "backend": "inductor"},
            "zero_optimization": {"stage": 2, "contiguous_gradients": True},
            **AUTO_BATCH,
        },
        {"compile.enabled": True, "compile.backend": "inductor"},
    ),
    "axolotl zero3 bf16": (
        {
            "zero_optimization": {
                **ZERO_3,
                "sub_group_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            },
            "bf16": {"enabled": True},
            **AUTO_BATCH,
        },
        {
            "precision.compute": "bfloat16",
            "precision.check_overflow": True,
            "gradient_clipping": 1.0,
        },
    ),
    "llama-factory zero0": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16_AUTO,
            "zero_optimization": {**ZERO_2, "stage": 0},
        },
        {
            "zero_optimization.stage": 0,
            "parallel.dp_replicate": 4,
            "parallel.bucket_mib": 5e8 * 4 / 2**20,
        },
    ),
    "llama-factory zero2 autotp": (
        {
            "_comment": "supported models: see the tutorial",
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": FP16_AUTO,
            "bf16": {"enabled": "auto"},
            "zero_optimization": ZERO_2,
            "tensor_parallel": {"autotp_size": 2},
        },
        {"parallel.tp": 2, "parallel.dp_shard": 2, "train_batch_size": 4},
    ),
    "ms-swift zero3 with zero++ left off": (
        {
            **AUTO_BATCH,
            "zero_optimization": {
                **ZERO_3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
                "zero_hpz_partition_size": 1,
            },
        },
        {"parallel.dp_shard": 4},
    ),
    "zero++": (
        {
            "train_batch_size": 8,
            "zero_optimization": {
                **ZERO_3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 2,
                "zero_quantized_gradients": True,
            },
        },
        {
            "parallel.compress_weights": "int8",
            "parallel.compress_gradients": "int4",
            "parallel.secondary_partition": 2,
        },
    ),
    "megatron-deepspeed fp16": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 11,
            },
            "curriculum_learning": {
                "enabled": False,
                "curriculum_type": "seqlen",
                "schedule_config": {"total_curriculum_step": 1000},
            },
            "wall_clock_breakdown": False,
            "zero_allow_untested_optimizer": True,
        },
        {
            "gradient_accumulation_steps": 4,
            "fp16.initial_scale_power": 11,
            "fp16.loss_scale_window": 500,
            "precision.compute": "float16",
        },
    ),
    "gpt-neox": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8},
            },
            "fp16": {
                "fp16": True,
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "zero_optimization": {**ZERO_2, "stage": 1, "cpu_offload": False},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10,
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {"optimizer.type": "Adam", "optimizer.params.betas": (0.9, 0.95), "train_batch_size": 16},
    ),
    "deepspeed examples cifar": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {
                "enabled": True,
                "fp16_master_weights_and_grads": False,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "initial_scale_power": 15,
            },
            "wall_clock_breakdown": False,
            "zero_optimization": {
                **ZERO_2,
                "stage": 0,
                "allgather_bucket_size": 50000000,
                "cpu_offload": False,
            },
        },
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "scheduler.type": "WarmupLR",
            "precision.reduce": "float16",
        },
    ),
    "an old zero3 with misspelt keys": (
        {
            "train_batch_size": 32,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e9,
                "stage3_param_persitence_threshold": 1e5,
                "stage3_model_persistence_threshold": 1e9,
                "stage3_gather_fp16_weights_on_model_save": True,
                "reduce_bucket_size": 1e7,
                "cpu_offload_use_pin_memory": True,
                "elastic_checkpoint": False,
            },
            "bfloat16": {"enabled": True, "loss_scale": 0},
            "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "x"},
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
            },
            "activation_checkpointing": {
                "partition_activations": False,
                "number_checkpoints": 4,
                "cpu_checkpointing": False,
            },
        },
        {
            "zero_optimization.stage": 3,
            "precision.compute": "bfloat16",
            "train_micro_batch_size_per_gpu": 8,
        },
    ),
    "openrlhf": (
        {
            "steps_per_print": 100,
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {
                **ZERO_3,
                "stage3_max_live_parameters": "auto",
                "stage3_max_reuse_distance": "auto",
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "sub_group_size": "auto",
                "zero_hpz_partition_size": 1,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {"gradient_accumulation_steps": 2},
    ),
    "transformers zero2 with offload": (
        {**AUTO_BATCH, "zero_optimization": {**ZERO_2, "offload_optimizer": TO_CPU}},
        {
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.pin_memory": True,
        },
    ),
    "llama-factory zero3 with offload": (
        {
            **AUTO_BATCH,
            "zero_optimization": {**ZERO_3, "offload_optimizer": TO_CPU, "offload_param": TO_CPU},
        },
        {
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_param.device": "cpu",
        },
    ),
    "zero3 with everything on nvme": (
        {
            **AUTO_BATCH,
            "zero_optimization": {
                **ZERO_3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 4,
                    "fast_init": False,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "/local_nvme",
                    "pin_memory": True,
                    "buffer_count": 5,
                    "buffer_size": 1e8,
                    "max_in_cpu": 1e9,
                },
            },
        },
        {
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_param.buffer_size": 100_000_000,
        },
    ),
    "zero2 of 2020": (
        {"train_batch_size": 8, "zero_optimization": {**ZERO_2, "cpu_offload": True}},
        {"zero_optimization.offload_optimizer.device": "cpu"},
    ),
    "compression and data efficiency, all off": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": False, "quantizer_kernel": False},
                    "different_groups": {},
                }
            },
            "data_efficiency": {
                "enabled": False,
                "seed": 1234,
                "data_sampling": {"enabled": False, "num_workers": 0},
            },
            "autotuning": {"enabled": False, "metric": "throughput"},
            "elasticity": {"enabled": False, "max_train_batch_size": 2000},
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
            "monitor_config": {"enabled": False},
            "comms_config": {"verbose": False},
            "comms_logger": {"enabled": False, "prof_ops": []},
        },
        {"train_batch_size": 4},
    ),
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    # name: (the file, the keys that are named)
    "zero++ on fewer processes than its secondary partition": (
        {
            "train_batch_size": 8,
            "zero_optimization": {
                **ZERO_3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_gradients": True,
            },
        },
        ["parallel.secondary_partition"],
    ),
    "mics": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": 8}},
        ["zero_optimization.mics_shard_size"],
    ),
    "fp8": (
        {
            **AUTO_BATCH,
            "fp8": {"enabled": True, "hysteresis": 2},
            "fp16": {**FP16_AUTO, "enabled": False},
        },
        ["fp8"],
    ),
    "alst": (
        {**AUTO_BATCH, "sequence_parallel": {"enabled": True, "size": 4, "mode": "ulysses"}},
        ["sequence_parallel"],
    ),
    "bert with 1-bit adam": (
        {
            "train_batch_size": 4096,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False},
            },
        },
        ["optimizer.type"],
    ),
    "bert with sparse attention": (
        {
            "train_batch_size": 8,
            "sparse_attention": {"mode": "fixed", "block": 16},
            "sparse_gradients": True,
        },
        ["sparse_attention"],
    ),
    "autotuning": (
        {"train_batch_size": "auto", "autotuning": {"enabled": True, "fast": False}},
        ["autotuning.enabled"],
    ),
    "both half precisions": (
        {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        ["fp16.enabled and bf16.enabled"],
    ),
    "curriculum": (
        {
            "train_batch_size": 8,
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
            },
        },
        ["curriculum_learning"],
    ),
    "deepcompile": (
        {"train_batch_size": 8, "compile": {"deepcompile": True, "passes": ["z3"]}},
        ["compile.deepcompile"],
    ),
    "a clip in the optimizer": (
        {
            "train_batch_size": 8,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}},
        },
        ["optimizer.params.max_grad_norm"],
    ),
}


def leaves(tree: dict[str, Any], at: str = "") -> list[str]:
    """The dotted paths of all values."""
    found = []
    for name, value in tree.items():
        found += leaves(value, f"{at}{name}.") if isinstance(value, dict) else [f"{at}{name}"]
    return found
