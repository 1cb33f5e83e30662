"""Conversion of Megatron-LM's command line, such as `["--bf16", "--lr", "1e-4"]`.

The table contains the equivalent setting of each flag, or the reason why it is ignored or refused.
Flags that describe Megatron's own model and data loader are ignored: Plait receives the model from
its caller, or builds it from the `model` section.

For flags that are left out, Megatron-LM's defaults are converted where they differ from Plait's.
The optimizer and its schedule are converted if any flag describes them; --lr is then required.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.config.convert.translated import Settings, TranslatedDocument, Translation
from plait.config.dialects.keys import nearest
from plait.config.schema.config import KeyReport, Status
from plait.config.source import scalar
from plait.errors import ConfigError, Problem
from plait.sizes import is_count

Takes = Literal["switch", "value", "values"]
"""Number of values after a flag: none, one, or several."""


@dataclass(frozen=True)
class Flag:
    """Flag of Megatron-LM, and how it is converted."""

    status: Status
    why: str = ""
    """Reason for ignoring or refusing the flag."""
    target: str = ""
    """Path of the setting."""
    takes: Takes = "value"
    convert: Callable[[Any], Any] | None = None
    """Conversion of the value to that of the setting. Raises ValueError with `rule; remedy`."""
    off: tuple[Any, ...] = ()
    """Values of a refused flag that request nothing."""
    remedy: str = ""


def _sets(target: str, takes: Takes = "value", convert: Callable[[Any], Any] | None = None) -> Flag:
    return Flag(Status.SUPPORTED, target=target, takes=takes, convert=convert)


def _ignored(why: str, names: str, takes: Takes = "value") -> dict[str, Flag]:
    return {name: Flag(Status.IGNORED, why, takes=takes) for name in names.split()}


def _refused(
    why: str, remedy: str, names: str, takes: Takes = "value", off: tuple[Any, ...] = ()
) -> dict[str, Flag]:
    return {
        name: Flag(Status.REFUSED, why, takes=takes, off=off, remedy=remedy)
        for name in names.split()
    }


def _log2(scale: Any) -> int:
    """Return the exponent of a loss scale, which is a power of two."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if is_number and scale > 0:
        power = math.log2(scale)
        if power == int(power):
            return int(power)
    raise ValueError("is not a power of two; use for example 65536")


_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD", "muon": "Muon", "lion": "Lion"}


def _one_of(choices: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a function that looks a value up in `choices`, and refuses other values."""

    def convert(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"is none of {', '.join(choices)}; use one of them")
        return choices[value]

    return convert


def _minutes_to_seconds(minutes: Any) -> Any:
    return 60 * minutes


def _constant(setting: Any) -> Callable[[Any], Any]:
    """Return a function that converts a flag without a value to `setting`."""
    return lambda _switch: setting


_MODEL = (
    "describes Megatron's own model; Plait takes the model from plait.initialize, or from the"
    " `model` section"
)
_DATA = (
    "describes Megatron's own data loader; `plait train` reads the `data` section, your own"
    " training loop provides its batches"
)
_ALWAYS = "communication and compute always overlap"
_KERNELS = "a kernel or a backend of Megatron; Plait runs the model's own code"
_TRACKER = "a tracker is named in the file, with its folder or its project"
_LOGGING = "every step is written to metrics.jsonl in `run.folder`"
_DECAY_STYLES = {
    name: name for name in ("constant", "linear", "cosine", "inverse-square-root", "WSD")
}
_WSD_DECAY_STYLES = {name: name for name in ("exponential", "linear", "cosine", "minus_sqrt")}
DISTRIBUTED = "--use-distributed-optimizer"
LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Targets of flags whose meaning depends on other flags. `read_flags` replaces both targets with
settings.
"""

DEFAULTS: Mapping[str, Any] = {"run.seed": 1234, "run.log_every": 100, "run.validate_every": 1000}
"""Megatron-LM's defaults that differ from Plait's."""
FP16_DEFAULTS: Mapping[str, Any] = {"fp16.initial_scale_power": 32}
"""Further defaults with --fp16."""
BF16_DEFAULTS: Mapping[str, Any] = {"communication_data_type": "fp32"}
"""Further defaults with --bf16: Megatron-LM accumulates and reduces gradients in float32."""
OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
    "SGD": {"weight_decay": 0.01, "momentum": 0.9},
    "Lion": {"weight_decay": 0.01},
    "Muon": {"weight_decay": 0.01},
}
"""Default parameters of the optimizers, by type."""

FLAGS: dict[str, Flag] = {
    "tensor_model_parallel_size": _sets("parallel.tp"),
    "pipeline_model_parallel_size": _sets("parallel.pp"),
    "context_parallel_size": _sets("parallel.cp"),
    "expert_model_parallel_size": _sets("parallel.ep"),
    "cp_comm_type": _sets(
        "parallel.context",
        convert=_one_of({"p2p": "ring", "all_gather": "all-gather-kv", "a2a": "ulysses"}),
    ),
    "sequence_parallel": _sets("parallel.sequence_parallel", "switch"),
    "moe_router_bias_update_rate": _sets("experts.bias_update_rate"),
    "moe_z_loss_coeff": _sets("experts.z_loss"),
    **_refused(
        "biases of experts are updated only if their rate is given",
        "leave it out, and pass --moe-router-bias-update-rate (Megatron-LM's default is 1e-3)",
        "moe_router_enable_expert_bias",
        "switch",
    ),
    "recompute_granularity": _sets(
        "parallel.recompute.mode", convert=_one_of({"full": "full", "selective": "selective"})
    ),
    **_refused(
        "selective recomputation keeps the products with weights, as Megatron-LM's core_attn does",
        "leave it out; parallel.recompute.keep in the converted file says what is kept",
        "recompute_modules",
        "values",
        off=(["core_attn"],),
    ),
    "recompute_activations": _sets("parallel.recompute.mode", "switch", _constant("selective")),
    "checkpoint_activations": _sets("parallel.recompute.mode", "switch", _constant("full")),
    "distribute_saved_activations": _sets(
        "activation_checkpointing.partition_activations", "switch"
    ),
    "num_layers": _sets("num_layers"),
    "num_distributed_optimizer_instances": _sets("parallel.dp_replicate"),
    "use_distributed_optimizer": _sets(DISTRIBUTED, "switch", _constant(1)),
    "use_torch_fsdp2": _sets("zero_optimization.stage", "switch", _constant(3)),
    "data_parallel_sharding_strategy": _sets(
        "zero_optimization.stage", convert=_one_of(_STRATEGIES)
    ),
    "ddp_bucket_size": _sets("zero_optimization.reduce_bucket_size"),
    "micro_batch_size": _sets("train_micro_batch_size_per_gpu"),
    "global_batch_size": _sets("train_batch_size"),
    "fp16": _sets("fp16.enabled", "switch"),
    "bf16": _sets("bf16.enabled", "switch"),
    "loss_scale": _sets("fp16.loss_scale"),
    "initial_loss_scale": _sets("fp16.initial_scale_power", convert=_log2),
    "min_loss_scale": _sets("fp16.min_loss_scale"),
    "loss_scale_window": _sets("fp16.loss_scale_window"),
    "hysteresis": _sets("fp16.hysteresis"),
    "accumulate_allreduce_grads_in_fp32": _sets(
        "communication_data_type", "switch", _constant("fp32")
    ),
    "grad_reduce_in_bf16": _sets("communication_data_type", "switch", _constant("bf16")),
    "clip_grad": _sets("gradient_clipping"),
    "optimizer": _sets("optimizer.type", convert=_one_of(_OPTIMIZERS)),
    "lr": _sets("optimizer.params.lr"),
    "weight_decay": _sets("optimizer.params.weight_decay"),
    "adam_beta1": _sets("optimizer.params.beta1"),
    "adam_beta2": _sets("optimizer.params.beta2"),
    "adam_eps": _sets("optimizer.params.eps"),
    "sgd_momentum": _sets("optimizer.params.momentum"),
    "lr_decay_style": _sets("scheduler.params.decay_style", convert=_one_of(_DECAY_STYLES)),
    "lr_wsd_decay_style": _sets(
        "scheduler.params.wsd_decay_style", convert=_one_of(_WSD_DECAY_STYLES)
    ),
    "lr_wsd_decay_iters": _sets("scheduler.params.wsd_decay_steps"),
    "lr_decay_iters": _sets("scheduler.params.total_num_steps"),
    "lr_warmup_iters": _sets("scheduler.params.warmup_num_steps"),
    "lr_warmup_fraction": _sets("scheduler.params.warmup_fraction"),
    "lr_warmup_init": _sets("scheduler.params.init_lr"),
    "min_lr": _sets("scheduler.params.min_lr"),
    "train_iters": _sets("run.steps"),
    "seed": _sets("run.seed"),
    "save": _sets("run.folder"),
    "load": _sets("run.folder"),
    "save_interval": _sets("run.checkpoint_every"),
    "eval_interval": _sets("run.validate_every"),
    "log_interval": _sets("run.log_every"),
    **_ignored(
        _ALWAYS,
        "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step"
        " tp_comm_overlap",
        "switch",
    ),
    **_ignored(
        _ALWAYS,
        "no_delay_grad_reduce delay_param_gather align_grad_reduce overlap_p2p_communication",
        "switch",
    ),
    **_ignored("the strategy of sharding decides", "use_megatron_fsdp use_custom_fsdp", "switch"),
    **_ignored("buckets are sized in bytes by parallel.bucket_mib", "ddp_num_buckets"),
    "distributed_timeout_minutes": _sets("faults.timeout_seconds", convert=_minutes_to_seconds),
    **_ignored(
        "nccl on GPUs and gloo on CPUs, or the process group that exists",
        "distributed_backend local_rank",
    ),
    **_ignored(
        _MODEL,
        "encoder_num_layers decoder_num_layers hidden_size ffn_hidden_size num_attention_heads"
        " num_query_groups kv_channels max_position_embeddings seq_length encoder_seq_length"
        " decoder_seq_length position_embedding_type rotary_base rotary_percent normalization"
        " norm_epsilon layernorm_epsilon attention_dropout hidden_dropout init_method_std"
        " vocab_size make_vocab_size_divisible_by rotary_seq_len_interpolation_factor"
        " attention_backend num_experts",
    ),
    **_ignored(
        _MODEL,
        "group_query_attention swiglu squared_relu untie_embeddings_and_output_weights"
        " disable_bias_linear add_qkv_bias qk_layernorm use_rotary_position_embeddings"
        " apply_layernorm_1p attention_softmax_in_fp32 no_query_key_layer_scaling"
        " apply_query_key_layer_scaling fp16_lm_cross_entropy no_position_embedding",
        "switch",
    ),
    **_ignored(_KERNELS, "transformer_impl cross_entropy_fusion_impl"),
    **_ignored(
        _KERNELS,
        "use_flash_attn use_mcore_models use_legacy_models no_masked_softmax_fusion"
        " no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion"
        " no_gradient_accumulation_fusion no_rope_fusion no_persist_layer_norm"
        " cross_entropy_loss_fusion no_async_tensor_model_parallel_allreduce"
        " no_check_for_nan_in_loss_and_grad manual_gc",
        "switch",
    ),
    **_ignored(
        _DATA,
        "tokenizer_type tokenizer_model vocab_file merge_file split data_cache_path num_workers"
        " eval_iters dataloader_type num_dataset_builder_threads",
    ),
    **_ignored(_DATA, "data_path train_data_path valid_data_path test_data_path", "values"),
    **_ignored(
        _DATA,
        "mock_data no_mmap_bin_files no_create_attention_mask_in_dataloader reset_position_ids"
        " eod_mask_loss",
        "switch",
    ),
    **_ignored(
        _LOGGING,
        "tensorboard_queue_size wandb_exp_name wandb_save_dir timing_log_level log_memory_interval",
    ),
    **_refused(
        _TRACKER,
        'leave it out, and write "tensorboard": {"enabled": true} or "wandb": {"enabled": true}'
        " in the converted file",
        "tensorboard_dir wandb_project",
        off=("",),
    ),
    **_ignored(
        _LOGGING,
        "log_throughput log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard"
        " log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_progress",
        "switch",
    ),
    **_ignored("checkpoints are Plait's own, one file per process", "ckpt_format dist_ckpt_format"),
    **_ignored(
        "checkpoints are Plait's own, one file per process", "use_dist_ckpt async_save", "switch"
    ),
    "num_virtual_stages_per_pipeline_rank": _sets("parallel.pipeline.stages_per_rank"),
    "num_layers_per_virtual_pipeline_stage": _sets(LAYERS_PER_STAGE),
    **_refused(
        "stages are given by their number, and by parallel.pipeline.blocks_per_stage",
        "pass --num-virtual-stages-per-pipeline-rank",
        "pipeline_model_parallel_layout",
    ),
    **_refused(
        "pipeline stages are balanced by their predicted time",
        "leave it out",
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    ),
    **_refused(
        "experts are distributed (--expert-model-parallel-size), and none of them is split",
        "use 1 or leave it out",
        "expert_tensor_parallel_size",
        off=(1,),
    ),
    **_refused(
        "blocks are recomputed one by one, not in groups, and not only the first ones",
        "leave it out, and set --recompute-granularity",
        "recompute_method recompute_num_layers checkpoint_num_layers",
        off=("uniform", 1),
    ),
    **_refused(
        "Megatron-LM offloads its own parts of the optimizer and of the activations",
        "leave it out, and set zero_optimization.offload_optimizer, or parallel.activation_offload,"
        " in the converted file",
        "optimizer_cpu_offload cpu_offloading",
        "switch",
    ),
    **_refused(
        "this release computes in fp16, bf16 or the dtype of the model",
        "use --bf16",
        "fp8_format fp8_recipe fp4_format",
    ),
    **_refused(
        "master weights and optimizer states are kept in the dtype of the model",
        "leave it out",
        "main_params_dtype main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        off=("fp32",),
    ),
    **_refused(
        "the batch size is the same at every step",
        "leave it out and pass --global-batch-size",
        "rampup_batch_size",
        "values",
    ),
    **_refused(
        "the length of a run is counted in steps",
        "use --train-iters",
        "train_samples",
    ),
    **_refused(
        "the length of a run is counted in steps", "use --lr-decay-iters", "lr_decay_samples"
    ),
    **_refused(
        "the length of a run is counted in steps", "use --lr-warmup-iters", "lr_warmup_samples"
    ),
    **_refused(
        "the length of a run is counted in steps",
        "use --lr-wsd-decay-iters",
        "lr_wsd_decay_samples",
    ),
    **_refused(
        "weight decay is the same at every step",
        "use --weight-decay",
        "start_weight_decay end_weight_decay",
    ),
    **_refused(
        "weight decay is the same at every step",
        "use --weight-decay",
        "weight_decay_incr_style",
        off=("constant",),
    ),
    **_refused(
        "all parameters have one learning rate", "use --lr", "decoupled_lr decoupled_min_lr"
    ),
    **_refused(
        "a run ends after its steps", "use --train-iters", "exit_interval exit_duration_in_mins"
    ),
    **_refused(
        "a checkpoint is complete and a run resumes all of it",
        "leave it out; to start from weights only, set model.path",
        "finetune no_load_optim no_load_rng no_save_optim no_save_rng",
        "switch",
    ),
}
"""Flags by name, without leading dashes and with `_` for `-`."""


def read_flags(tokens: Sequence[str]) -> TranslatedDocument:
    """Translate a list of flags. Problems of single flags are collected.

    Raises:
        ConfigError: The list does not consist of flags and their values.
    """
    translation = Translation()
    for name, values in _split(tokens):
        flag = FLAGS.get(name[2:].replace("-", "_"))
        if flag is None:
            translation.problems.append(Problem(name, None, "unknown flag", _unknown_remedy(name)))
            continue
        try:
            value = _parse_value(flag, values)
        except ValueError as error:
            rule, _, remedy = str(error).partition("; ")
            translation.problems.append(Problem(name, " ".join(values) or None, rule, remedy))
            continue

        if flag.status is Status.REFUSED and value not in flag.off:
            translation.problems.append(
                Problem(name, value if values else None, flag.why, flag.remedy)
            )
        elif flag.status is Status.SUPPORTED:
            translation.set(flag.target, name, value)
        translation.rows.append(_row(name, flag, value))

    settings = translation.settings
    _set_stage(settings, translation.problems)
    _set_stages_per_rank(settings, translation.problems)
    _set_betas(settings)
    defaults = _defaults(settings, translation.problems)
    return translation.finish("the command line", "Megatron", defaults, noun="flag")


def _set_betas(settings: Settings) -> None:
    """Translate Megatron-LM's two flags for Adam's betas to a single setting."""
    first = settings.pop("optimizer.params.beta1", None)
    second = settings.pop("optimizer.params.beta2", None)
    beta = first or second
    if beta is not None:
        # The beta that no flag gives has the default of Megatron-LM.
        betas = [first[1] if first else 0.9, second[1] if second else 0.999]
        settings["optimizer.params.betas"] = (beta[0], betas)


def _set_stage(settings: Settings, problems: list[Problem]) -> None:
    """Translate the distributed optimizer, which is ZeRO 1 unless a sharding strategy is given."""
    distributed = settings.pop(DISTRIBUTED, None)
    stage = settings.get("zero_optimization.stage")
    if distributed is None:
        return
    if stage is None:
        settings["zero_optimization.stage"] = distributed
    # A sharding strategy refines the distributed optimizer. Any other flag contradicts it.
    elif stage[0] != "--data-parallel-sharding-strategy":
        problems.append(
            Problem(
                distributed[0],
                distributed[1],
                f"{stage[0]} says {stage[1]}; both set zero_optimization.stage and disagree",
                "keep one of them",
            )
        )


def _set_stages_per_rank(settings: Settings, problems: list[Problem]) -> None:
    """Translate layers per virtual stage to stages per rank, given the number of layers."""
    flag = settings.pop(LAYERS_PER_STAGE, None)
    if flag is None:
        return
    name, layers_per_stage = flag
    _, layers = settings.get("num_layers", ("", None))
    _, pp = settings.get("parallel.pp", ("", 1))
    if not all(map(is_count, (layers_per_stage, layers, pp))):
        problems.append(
            Problem(
                name,
                layers_per_stage,
                "the stages of a rank are --num-layers / --pipeline-model-parallel-size / this, and"
                " not all three are whole numbers",
                "pass them, or --num-virtual-stages-per-pipeline-rank instead of this",
            )
        )
        return

    divisor = pp * layers_per_stage
    if layers % divisor:
        problems.append(
            Problem(
                name,
                layers_per_stage,
                f"{layers} layers over {pp} x {layers_per_stage}: {layers} % {divisor} ="
                f" {layers % divisor}",
                "use a number that divides the layers of a rank",
            )
        )
        return
    settings["parallel.pipeline.stages_per_rank"] = (name, layers // divisor)


def _defaults(settings: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Return Megatron-LM's defaults that differ from Plait's, by path."""
    defaults = dict(DEFAULTS)
    if "fp16.enabled" in settings:
        defaults |= FP16_DEFAULTS
    if "bf16.enabled" in settings:
        defaults |= BF16_DEFAULTS
    # Megatron-LM's selective mode recomputes only the core of attention.
    _, mode = settings.get("parallel.recompute.mode", ("", ""))
    if mode == "selective":
        defaults["parallel.recompute.keep"] = ["matmul"]

    # Without a flag of the optimizer, the script builds its own.
    optimizer_flags = [
        name
        for path, (name, _) in settings.items()
        if path.startswith(("optimizer.", "scheduler."))
    ]
    if not optimizer_flags:
        return defaults
    if "optimizer.params.lr" not in settings:
        problems.append(
            Problem(
                "--lr",
                None,
                f"{optimizer_flags[0]} describes an optimizer, and Megatron-LM has no default for"
                " its learning rate",
                "pass it",
            )
        )

    _, kind = settings.get("optimizer.type", ("", "AdamW"))
    defaults["optimizer.type"] = kind
    for name, value in OPTIMIZER_DEFAULTS.get(kind, {}).items():
        defaults[f"optimizer.params.{name}"] = value
    defaults["scheduler.type"] = "MegatronLR"
    defaults["scheduler.params.decay_style"] = "linear"
    # Without --lr-decay-iters the decay ends with the run.
    defaults["scheduler.params.total_num_steps"] = "auto"
    return defaults


def _row(name: str, flag: Flag, value: Any) -> KeyReport:
    if flag.status is Status.SUPPORTED:
        return KeyReport(
            name, value, Status.RENAMED, f"{flag.target} (Megatron's flag)", flag.target
        )
    if flag.status is Status.REFUSED and value in flag.off:
        return KeyReport(
            name,
            value,
            Status.IGNORED,
            f"this value requests nothing; other values are refused: {flag.why}",
        )
    return KeyReport(name, value, flag.status, flag.why)


def _split(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the flags with their values: [("--lr", ["1e-4"]), ("--bf16", [])].

    A value follows its flag, or is joined to it with `=`.
    """
    flags: list[tuple[str, list[str]]] = []
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(
                Problem(
                    "the command line", token, "flags and their values must be strings", "quote it"
                )
            )
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            _, values = flags[-1]
            values.append(token)
        else:
            raise ConfigError(
                Problem(
                    "the command line",
                    token,
                    "begins with a value and not with a flag",
                    "begin with a flag such as --bf16",
                )
            )
    return flags


def _parse_value(flag: Flag, values: list[str]) -> Any:
    if flag.takes == "switch":
        if values:
            raise ValueError("takes no value; leave the value out")
        parsed: Any = True
    elif flag.takes == "values":
        parsed = values
    elif len(values) != 1:
        raise ValueError(f"takes one value, but {len(values)} are given; write one after it")
    else:
        # Parsed as a value of --set, so that `1e-4` is a number.
        parsed = scalar(values[0])

    return parsed if flag.convert is None else flag.convert(parsed)


def _unknown_remedy(name: str) -> str:
    matches = nearest(name[2:], FLAGS)
    if matches:
        names = ["--" + match.replace("_", "-") for match in matches]
        return f"did you mean {' or '.join(names)}?"
    return (
        "leave it out, or set the key of the file that it stands for (`plait config schema` lists"
        " them)"
    )
