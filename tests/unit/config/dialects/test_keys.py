"""Every key of DeepSpeed is known, and a typo finds the key that was meant."""

import random
import string

import pytest

from plait.config.dialects import keys
from plait.config.dialects.deepspeed import TABLE
from plait.config.dialects.keys import ALIASES, SHORT_FORMS
from plait.config.schema.config import Status
from tests.unit.config.cases import check_refusals, load, parse_tree

DEEPSPEED = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation gradient_clipping fp16 bf16 bfloat16 torch_autocast data_types
        communication_data_type seq_parallel_communication_data_type prescale_gradients
        gradient_predivide_factor gradient_allreduce_op optimizer zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer scheduler steps_per_print wall_clock_breakdown memory_breakdown
        dump_state log_level timers disable_python_gc dataloader_drop_last disable_allgather
        vocabulary_size sequence_parallel_size data_parallel_size zero_optimization aio
        tensor_parallel expert_parallel pipeline activation_checkpointing compile checkpoint
        datastates_ckpt comms_logger comms_config monitor_config tensorboard wandb csv_monitor comet
        flops_profiler autotuning data_efficiency hybrid_engine weight_quantization elasticity
        sparse_gradients compression_training curriculum_learning sparse_attention amp nebula
        quantize_training eigenvalue progressive_layer_drop graph_harvesting
        use_data_before_expert_parallelism
    """,
    "zero_optimization": """
        stage overlap_comm contiguous_gradients reduce_scatter allgather_partitions
        use_multi_rank_bucket_allreduce reduce_bucket_size allgather_bucket_size
        stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        sub_group_size stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module
        round_robin_gradients ignore_unused_parameters load_from_fp32_weights elastic_checkpoint
        legacy_stage1 compute_grad_norm parameter_alignment memory_efficient_linear
        override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory offload_optimizer offload_param
        zero_quantized_weights zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zenflow cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save
        gather_16bit_weights_on_model_save mics_shard_size mics_hierarchical_params_gather
        zeropp_loco_param stage3_param_persitence_threshold
    """,
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio
        super_offload cpuadam_cores_perc
    """,
    "zero_optimization.offload_param": """
        device nvme_path buffer_count buffer_size max_in_cpu pin_memory
    """,
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads fp16
    """,
    "bf16": """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states
    """,
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "aio": """
        block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events
        use_gds
    """,
    "tensor_parallel": """
        autotp_size tp_size tp_overlap_comm preset_model partition_config vocab_parallel_lm_head
        vocab_parallel_ce_backend dtype
    """,
    "pipeline": """
        stages partition seed_layers activation_checkpoint_interval pipe_partitioned
        grad_partitioned use_reentrant
    """,
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile
    """,
    "compile": """
        deepcompile passes offload_activation offload_opt_states offload_parameters free_activation
        double_buffer symmetric_memory backend disable
    """,
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write writer",
    "checkpoint.writer": "type io_buffer_size io_buffer_double decoupled data_parallel",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "flops_profiler": """
        enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor
    """,
    "hybrid_engine": """
        enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters
        tp_gather_partition_size enable_cuda_graph
    """,
}
"""Keys by section in files of DeepSpeed 0.19.8, and in published files."""


def test_every_key_of_deepspeed_is_known():
    for section, names in DEEPSPEED.items():
        assert not set(names.split()) - set(keys.names_in(section)), section


def test_a_key_is_a_setting_an_alias_or_in_the_table():
    assert not set(TABLE) & set(keys.schema_fields())
    assert not set(ALIASES) & (set(TABLE) | set(keys.schema_fields()))


def test_aliases_lead_to_a_setting_or_to_the_table():
    targets = {*keys.schema_fields(), *TABLE, *keys.sections()}
    for name, alias in ALIASES.items():
        assert alias.target in targets, name
        assert alias.note
    assert set(SHORT_FORMS) <= keys.sections()


def test_every_row_has_a_reason_and_every_refusal_a_remedy():
    for key in TABLE.values():
        assert key.why, key.path
        assert (key.status is Status.REFUSED) == bool(key.remedy), key.path
        assert key.status in (Status.IGNORED, Status.REFUSED)


def test_every_setting_is_documented():
    for path, field in keys.schema_fields().items():
        assert field.description.strip(), path


def typos(name, draw):
    """Return the name with one letter removed, doubled, replaced, inserted, or two swapped."""
    letters = string.ascii_lowercase + "_"
    variants = set()
    for position in range(len(name)):
        before, letter, after = name[:position], name[position], name[position + 1 :]
        other = draw.choice(letters)
        variants |= {before + after, before + letter + letter + after}
        variants |= {before + other + after, before + other + letter + after}
        variants.add(before + after[:1] + letter + after[1:])
    return variants


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.proof)])
def test_a_one_letter_typo_finds_the_key(count):
    failures = []
    for path in sorted(keys.known_paths()):
        section, _, name = path.rpartition(".")
        known = set(keys.names_in(section))
        draw = random.Random(path)
        for typo in draw.sample(sorted(typos(name, draw)), k=min(count, len(name))):
            # A key that begins with an underscore is a comment.
            if typo in known or len(typo) < 2 or typo.startswith("_"):
                continue
            remedy = keys.remedy_for(section, typo)
            suggestions = remedy.removeprefix("did you mean ").removesuffix("?").split(" or ")
            if not remedy.startswith("did you mean ") or path not in suggestions:
                failures.append(f"{path}: {typo}: {remedy}")
    assert not failures


def test_a_key_in_the_wrong_section_gets_the_right_one():
    remedy = keys.remedy_for("", "reduce_bucket_size")
    assert remedy == "it belongs elsewhere: zero_optimization.reduce_bucket_size"
    remedy = keys.remedy_for("run", "sequence_length")
    assert remedy.endswith("data.sequence_length or parallel.recompute.sequence_length")


def test_a_name_unlike_any_other_gets_the_list():
    assert keys.remedy_for("", "qqqqqqq") == "`plait config schema` lists what is known"
    start = "known here are auto_cast, bf16_master_weights_and_grads, "
    assert keys.remedy_for("bf16", "qqqqqqq").startswith(start)


UNKNOWN = """
    gradient_cliping=0.3 -> gradient_cliping = 0.3: unknown key; did you mean gradient_clipping?
    zero_optimisation.stage=2 -> zero_optimisation = {'stage': 2}: unknown key; \
        did you mean zero_optimization?
    zero_optimization.stag=2 -> zero_optimization.stag = 2: unknown key; \
        did you mean zero_optimization.stage?
    tensor-model-parallel-size=2 -> did you mean tensor_model_parallel_size?
    parallel.recompute.mod=full -> parallel.recompute.mod = 'full': unknown key; \
        did you mean parallel.recompute.mode?
    parallel.tpp=2 -> did you mean parallel.pp or parallel.tp?
"""


def test_unknown_keys_are_refused_with_a_suggestion():
    check_refusals(UNKNOWN, lambda text: load(parse_tree(text)))
