"""Files of Accelerate and of the Trainer, written for these tests: what each says, and what becomes of it."""

from __future__ import annotations

from typing import Any

STAGE, SHARD, REPLICATE = "zero_optimization.stage", "parallel.dp_shard", "parallel.dp_replicate"

ACCELERATE: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (the YAML file, some of the resolved values for a micro batch of 2 and as many processes as the file says, else 4)
    "replicas": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndowncast_bf16: 'no'\ngpu_ids: all\nmachine_rank: 0\n"
        "main_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\nrdzv_backend: static\nsame_network: true\n"
        "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n",
        {STAGE: 0, REPLICATE: 4, "precision.compute": "bfloat16", "precision.reduce": "float32"},
    ),
    "one process": (
        "distributed_type: 'NO'\nmixed_precision: no\nnum_processes: 8\n",
        {STAGE: 0, "run.processes": 1, REPLICATE: 1},
    ),
    "an unquoted NO": ("distributed_type: NO\nfp16: false\n", {STAGE: 0, "run.processes": "auto"}),
    "the older fp16": (
        "distributed_type: MULTI_CPU\nuse_cpu: true\nfp16: true\n",
        {
            "precision.compute": "float16",
            "precision.reduce": "float32",
            "fp16.loss_scale_window": 2000,
            "fp16.hysteresis": 1,
        },
    ),
    "dynamo": (
        "distributed_type: MULTI_GPU\ndebug: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n"
        "  dynamo_use_dynamic: false\n  use_fullgraph: false\n  use_regional_compilation: true\n",
        {
            "compile.enabled": True,
            "compile.backend": "inductor",
            "compile.mode": "max-autotune",
            "faults.check_collectives": True,
        },
    ),
    "the older dynamo": (
        "distributed_type: MULTI_GPU\ndynamo_backend: 'NO'\ndynamo_config: {}\nfp8_config: {}\n",
        {"compile.enabled": False},
    ),
    "zero 2": (
        "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 4\ndeepspeed_config:\n"
        "  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 2\n  gradient_clipping: 0.5\n"
        "  offload_optimizer_device: none\n  offload_param_device: none\n"
        "  offload_optimizer_nvme_path: none\n  zero3_init_flag: false\n",
        {
            STAGE: 2,
            SHARD: 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "fp16.loss_scale_window": 1000,
        },
    ),
    "zero 3 on nvme": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: 'true'\n  zero3_save_16bit_model: true\n"
        "  gradient_clipping: auto\n  gradient_accumulation_steps: auto\n  offload_param_device: nvme\n  offload_param_nvme_path: /tmp\n"
        "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /tmp\n  deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock\n"
        "  deepspeed_hostfile: hosts\n  deepspeed_inclusion_filter: worker-0\n  deepspeed_exclusion_filter: null\n",
        {
            STAGE: 3,
            "zero_optimization.offload_param.device": "nvme",
            "zero_optimization.offload_optimizer.nvme_path": "/tmp",
        },
    ),
    "Ulysses": (
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\nparallelism_config:\n"
        "  parallelism_config_sp_size: 2\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_sp_backend: deepspeed\n"
        "  parallelism_config_sp_seq_length_is_variable: true\n  parallelism_config_sp_attn_implementation: sdpa\n",
        {STAGE: 3, SHARD: 2, "parallel.cp": 2, "parallel.context": "ulysses"},
    ),
    "fsdp 1": (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n"
        "  fsdp_offload_params: false\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        "  fsdp_sync_module_states: true\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n  fsdp_use_orig_params: true\n",
        {STAGE: 3, SHARD: 4, "precision.compute": "bfloat16", "precision.reduce": "bfloat16"},
    ),
    "fsdp 1 by number": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n  fsdp_min_num_params: 100000000\n"
        "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n",
        {STAGE: 2, SHARD: 4},
    ),
    "fsdp 1 in text": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: '1', sharding_strategy: '3'}\n",
        {STAGE: 0, REPLICATE: 4},
    ),
    "fsdp 1 without a strategy": (
        "distributed_type: FSDP\nmixed_precision: fp16\n",
        {STAGE: 3, SHARD: 4, "fp16.hysteresis": 1},
    ),
    "fsdp 1 by the other name": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: shard_grad_op}\n",
        {STAGE: 2},
    ),
    "hybrid": (
        "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
        {STAGE: 3, SHARD: 2, REPLICATE: 2},
    ),
    "hybrid zero 2": (
        "distributed_type: FSDP\nnum_machines: 1\nnum_processes: 2\nfsdp_config: {fsdp_sharding_strategy: 5}\n",
        {STAGE: 2, SHARD: 2, REPLICATE: 1},
    ),
    "fsdp 2": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: true\n"
        "  fsdp_cpu_ram_efficient_loading: false\n  fsdp_ignored_modules: null\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n",
        {STAGE: 3, "parallel.recompute.mode": "full", "parallel.activation_offload.fraction": 1.0},
    ),
    "fsdp 2 that keeps parameters": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: 'false', fsdp_limit_all_gathers: true}\n",
        {STAGE: 2},
    ),
    "fsdp 2 on the host": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n",
        {
            STAGE: 3,
            "zero_optimization.offload_param.device": "cpu",
            "zero_optimization.offload_optimizer.device": "cpu",
        },
    ),
    "three dimensions": (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
        "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n"
        "  parallelism_config_cp_size: 1\n  parallelism_config_cp_comm_strategy: allgather\n",
        {STAGE: 3, REPLICATE: 2, SHARD: 2, "parallel.tp": 2},
    ),
    "context": (
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n  parallelism_config_cp_size: 4\n"
        "  parallelism_config_cp_backend: torch\n  parallelism_config_cp_comm_strategy: alltoall\n",
        {"parallel.cp": 4, "parallel.context": "ring"},
    ),
    "degrees of 1": (
        "distributed_type: MULTI_GPU\nnum_processes: 4\nparallelism_config:\n  parallelism_config_dp_replicate_size: 1\n"
        "  parallelism_config_tp_size: 1\n",
        {STAGE: 0, REPLICATE: 4},
    ),
    "the other section is not read": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"
        "deepspeed_config: {zero_stage: 1, gradient_clipping: 0.1}\nmegatron_lm_config: {megatron_lm_tp_degree: 4}\n",
        {STAGE: 3, "gradient_clipping": 1.0, "parallel.tp": 1},
    ),
}

ACCELERATE_REFUSED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # name: (the YAML file, [(the key, part of the message)])
    "no type": (
        "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n",
        [("distributed_type", "is missing")],
    ),
    "another type": (
        "distributed_type: MULTI_ABACUS\n",
        [("distributed_type", "no type that Accelerate has")],
    ),
    "tpu": (
        "distributed_type: XLA\ntpu_use_cluster: true\n",
        [("distributed_type", "GPUs and CPUs"), ("tpu_use_cluster", "use false")],
    ),
    "cloud": (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3\n",
        [
            ("compute_environment", "use LOCAL_MACHINE"),
            ("ec2_instance_type", "unknown key of Accelerate"),
        ],
    ),
    "megatron": (
        "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n",
        [("distributed_type", "convert -- --tensor")],
    ),
    "a misspelt key": (
        "distributed_type: FSDP\nnum_procesess: 2\nfsdp_config: {fsdp_shardin_strategy: 1}\n",
        [
            ("num_procesess", "did you mean num_processes?"),
            ("fsdp_config.fsdp_shardin_strategy", "did you mean fsdp_sharding_strategy?"),
        ],
    ),
    "a short name": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {tp_size: 2}\n",
        [
            (
                "parallelism_config.tp_size",
                "write parallelism_config_tp_size; Accelerate does not read the short name",
            )
        ],
    ),
    "a section that is none": (
        "distributed_type: FSDP\nfsdp_config: 3\n",
        [("fsdp_config", "is a section and needs an object")],
    ),
    "a list for a section": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: [1]\n",
        [("deepspeed_config", "needs an object")],
    ),
    "a precision that is none": (
        "distributed_type: MULTI_GPU\nmixed_precision: int8\n",
        [("mixed_precision", "is none of no, fp16, bf16")],
    ),
    "fp8": (
        "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config: {backend: TE}\n",
        [("mixed_precision", "use bf16")],
    ),
    "a list for a precision": (
        "distributed_type: MULTI_GPU\nmixed_precision: [bf16]\n",
        [("mixed_precision", "is none of")],
    ),
    "a strategy that is none": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_ALL}\n",
        [("fsdp_config.fsdp_sharding_strategy", "use FULL_SHARD, SHARD_GRAD_OP")],
    ),
    "strategy 6": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 6}\n",
        [("fsdp_config.fsdp_sharding_strategy", "1 to 5")],
    ),
    "two strategies": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: SHARD_GRAD_OP}\n",
        [("fsdp_config.fsdp_reshard_after_forward", "disagree")],
    ),
    "a strategy for fsdp 2": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: HYBRID_SHARD}\n",
        [("fsdp_config.fsdp_sharding_strategy", "Accelerate does not read it")],
    ),
    "a name for fsdp 2": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: FULL_SHARD}\n",
        [("fsdp_config.fsdp_reshard_after_forward", "is true or false in FSDP2")],
    ),
    "a flag for fsdp 1": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: true}\n",
        [("fsdp_config.fsdp_reshard_after_forward", "a strategy's name in FSDP1")],
    ),
    "fsdp 3": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n",
        [("fsdp_config.fsdp_version", "use 2")],
    ),
    "hybrid without processes": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
        [("fsdp_config.fsdp_sharding_strategy", "set num_processes and num_machines")],
    ),
    "ignored modules": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_ignored_modules: 'lm_head'}\n",
        [("fsdp_config.fsdp_ignored_modules", "leave it out")],
    ),
    "a text for a flag": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: maybe}\n",
        [("fsdp_config.fsdp_offload_params", "must be true or false")],
    ),
    "processes over machines": (
        "distributed_type: MULTI_GPU\nnum_processes: 5\nnum_machines: 2\n",
        [("num_processes", "num_machines = 2")],
    ),
    "no processes": (
        "distributed_type: MULTI_GPU\nnum_processes: 0\n",
        [("num_processes", "cannot be shared out")],
    ),
    "processes in a list": (
        "distributed_type: MULTI_GPU\nnum_processes: [4]\n",
        [("num_processes", "cannot be shared out")],
    ),
    "more degrees than processes": (
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n",
        [("parallel", "dp_shard 4 = 4, and 4 processes leave 2")],
    ),
    "nothing to shard over": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_tp_size: 2}\n",
        [("parallelism_config", "set parallelism_config_dp_shard_size")],
    ),
    "cp and sp": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
        "  parallelism_config_sp_size: 4\n",
        [("parallelism_config.parallelism_config_sp_size", "both set parallel.cp and disagree")],
    ),
    "a degree in words": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_tp_size: two}\n",
        [
            ("parallelism_config.parallelism_config_tp_size", "must be a whole number"),
        ],
    ),
    "a graph without breaks": (
        "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR, dynamo_use_fullgraph: true}\n",
        [("dynamo_config.dynamo_use_fullgraph", "use false")],
    ),
    "two backends": (
        "distributed_type: MULTI_GPU\ndynamo_backend: EAGER\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
        [("dynamo_backend", "both set compile.backend and disagree")],
    ),
    "stage 7": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 7}\n",
        [("deepspeed_config.zero_stage", "0, 1, 2 or 3")],
    ),
    "keys of DeepSpeed": (
        "distributed_type: DEEPSPEED\nzero_optimization: {stage: 2}\n",
        [("zero_optimization", "a file is one of Accelerate or one of Plait's")],
    ),
    "a file that is not there": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: nowhere.json}\n",
        [("deepspeed_config.deepspeed_config_file: nowhere.json", "there is no such file")],
    ),
    "a file in a number": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: 3}\n",
        [("deepspeed_config.deepspeed_config_file", "must be text")],
    ),
}

TRAINER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (the JSON file, some of the resolved values for 4 processes and a micro batch of 2)
    "fsdp alone": ({"fsdp": True}, {STAGE: 3, SHARD: 4}),
    "options": ({"fsdp": "full_shard auto_wrap"}, {STAGE: 3}),
    "options in a list": ({"fsdp": ["shard_grad_op", "auto_wrap"], "fsdp_config": {}}, {STAGE: 2}),
    "offload": (
        {"fsdp": "full_shard offload auto_wrap"},
        {
            STAGE: 3,
            "zero_optimization.offload_param.device": "cpu",
            "zero_optimization.offload_optimizer.device": "cpu",
        },
    ),
    "fsdp 1": (
        {
            "fsdp": "shard_grad_op",
            "fsdp_config": {
                "version": 1,
                "forward_prefetch": "true",
                "use_orig_params": "true",
                "limit_all_gathers": True,
            },
        },
        {STAGE: 2},
    ),
    "no shards": (
        {"fsdp": "no_shard", "fsdp_config": {"fsdp_version": 1}},
        {STAGE: 0, REPLICATE: 4},
    ),
    "two that agree": (
        {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": "true"}},
        {STAGE: 3},
    ),
    "off": (
        {"fsdp": "", "fsdp_config": {"activation_checkpointing": True}},
        {STAGE: 0, "parallel.recompute.mode": "none"},
    ),
    "off in JSON": ({"fsdp": False}, {STAGE: 0}),
    "a preset": (
        {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "fsdp_version": 2,
                "reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_ram_efficient_loading": True,
                "state_dict_type": "SHARDED_STATE_DICT",
                "activation_checkpointing": True,
                "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
            },
        },
        {STAGE: 3, "parallel.recompute.mode": "full"},
    ),
    "the file alone": (
        {
            "backward_prefetch": "backward_pre",
            "min_num_params": 0,
            "xla": False,
            "xla_fsdp_grad_ckpt": False,
            "activation_checkpointing": True,
        },
        {STAGE: 3, "parallel.recompute.mode": "full"},
    ),
    "the file with prefixes": (
        {"fsdp_reshard_after_forward": False, "fsdp_sync_module_states": True},
        {STAGE: 2},
    ),
}

TRAINER_REFUSED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "another option": ({"fsdp": "full_shard warp"}, [("fsdp", "'warp' is no option of fsdp")]),
    "a number": ({"fsdp": 3}, [("fsdp", "must be true, false, or a text")]),
    "hybrid in fsdp 2": ({"fsdp": "hybrid_shard"}, [("fsdp", "true or false in FSDP2")]),
    "hybrid": (
        {"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}},
        [("fsdp", "set parallel.dp_shard in what is written")],
    ),
    "disagreeing": (
        {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}},
        [("fsdp_config.reshard_after_forward", "fsdp says full_shard")],
    ),
    "xla": (
        {"fsdp": True, "fsdp_config": {"xla": True, "xla_fsdp_settings": {}}},
        [("fsdp_config.xla", "does not run on XLA")],
    ),
    "a name of Accelerate's": (
        {"fsdp": True, "fsdp_config": {"offload_params": True}},
        [("fsdp_config.offload_params", "write cpu_offload")],
    ),
    "a strategy": (
        {"fsdp": True, "fsdp_config": {"sharding_strategy": 1}},
        [("fsdp_config.sharding_strategy", "write reshard_after_forward")],
    ),
    "misspelt": (
        {"fsdp": True, "fsdp_config": {"reshard_after_foward": True}},
        [("fsdp_config.reshard_after_foward", "did you mean reshard_after_forward?")],
    ),
    "another argument": (
        {"fsdp": True, "learning_rate": 1e-4},
        [("learning_rate", "unknown key next to fsdp and fsdp_config")],
    ),
    "a list": ({"fsdp": True, "fsdp_config": []}, [("fsdp_config", "is an object or the path")]),
    "no such file": (
        {"fsdp": True, "fsdp_config": "nowhere.json"},
        [("fsdp_config: nowhere.json", "there is no such file")],
    ),
    "a section of Plait": (
        {"fsdp": True, "parallel": {"tp": 2}},
        [("parallel", "unknown key next to")],
    ),
}
