"""Effect of every field of `TrainingArguments` under Plait: honoured, ignored or refused.

A table in docs/how-to/trainer.md is generated from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from plait.cluster.layout import Layout
from plait.errors import Problem
from plait.hf.transformers_trainer import RECOMPUTE_FIELDS, recompute_fields

Effect = Literal["honoured", "noted", "refused"]
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")


@dataclass(frozen=True)
class ArgumentField:
    """Effect of one field of `TrainingArguments` under Plait.

    Attributes:
        effect: Whether the field is honoured, ignored with a note, or refused.
        what: Description of what the field does, or the reason why it has no effect.
        remedy: Alternative for a value that is refused.
        when: Condition (value, arguments, layout) under which a value is refused, or ignored with a
            note. None: every value except the default.
        remedy_for: Function that returns the part of `remedy` that applies to a value. None: all of
            `remedy` applies.
    """

    effect: Effect
    what: str
    remedy: str = ""
    when: Callable[[Any, Any, Layout], bool] | None = None
    remedy_for: Callable[[Any], str] | None = None


def _honoured(what: str = "as in Transformers") -> ArgumentField:
    return ArgumentField("honoured", what)


def _shares_batches(value: Any, args: Any, layout: Layout) -> bool:
    return bool(value) and layout.dp != layout.world_size


def _saves_weights_only(value: Any, args: Any, layout: Layout) -> bool:
    return bool(value and args.save_only_model)


def _is_unsupported_optimizer(value: Any, args: Any, layout: Layout) -> bool:
    return _text(value) not in _ELEMENTWISE


def _changes_recomputation(value: Any, args: Any, layout: Layout) -> bool:
    return bool(set(value or {}) - {"every_n_layers", "use_reentrant"})


def _changes_recomputation_by_old_name(value: Any, args: Any, layout: Layout) -> bool:
    # If both names exist, the old one repeats the value of the new one, which is refused instead.
    has_new_name = RECOMPUTE_FIELDS[0] in recompute_fields(args)
    return _changes_recomputation(value, args, layout) and not has_new_name


SUPPORTED_BATCHING: Mapping[str, tuple[bool | None, ...]] = {
    "split_batches": (False,),
    # False says that processes read their own batches, as they do with Plait. TRL sets it for
    # streams.
    "dispatch_batches": (None, False),
    "even_batches": (True,),
}
"""Values of Accelerate's settings that agree with what Plait does. The first is the default."""


def unsupported_settings(
    settings: Any, supported: Mapping[str, tuple[bool | None, ...]]
) -> list[str]:
    """Return the names of settings whose values are not supported.

    Args:
        settings: An object with Accelerate's settings as attributes, or None.
        supported: Supported values by name, in the form of `SUPPORTED_BATCHING`.
    """
    return [
        name
        for name, values in supported.items()
        if getattr(settings, name, values[0]) not in values
    ]


def _changes_data(value: Any, args: Any, layout: Layout) -> bool:
    supported = {
        **SUPPORTED_BATCHING,
        "use_seedable_sampler": (True,),
        "use_configured_state": (False,),
    }
    return bool(unsupported_settings(value, supported))


def _rebalances_batches(value: Any, args: Any, layout: Layout) -> bool:
    return bool(value == "batch_rebalance")


_INT8 = (
    'write "optimizer": {"type": "AdamW", "params": {"lr": "auto"}, "states": "int8"} in the file'
)
_LION = 'write "optimizer": {"type": "Lion", "params": {"lr": "auto"}} in the file'
_ON_HOST = (
    'write "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}} in the file'
)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _optimizer_remedy(value: Any) -> str:
    name = _text(value)
    if "lion" in name:
        return f"leave it out, and {_LION}"
    if name == "paged_adamw_32bit":
        return (
            f'use "adamw_torch", which computes the same, and {_ON_HOST} to keep its states out of'
            " the device"
        )
    if "adafactor" in name or name.endswith(("8bit", "4bit")):
        return f'use "adamw_torch"; for small states leave it out, and {_INT8}'
    return 'use "adamw_torch"'


_DDP = "Plait does not wrap the model in DistributedDataParallel"
_EVAL_CAST = "it casts the model in place, and its parameters are parts that the optimizer updates"

FIELDS: dict[str, ArgumentField] = {
    "output_dir": _honoured(),
    "per_device_train_batch_size": _honoured(
        'samples of a micro-batch on a data-parallel rank; fills an "auto" of the file'
    ),
    "num_train_epochs": _honoured("an epoch has each sample once, over the data-parallel ranks"),
    "max_steps": _honoured(),
    "learning_rate": _honoured(
        'fills an "auto" of the file; if the file has an optimizer, the two must agree'
    ),
    "lr_scheduler_type": _honoured("unless the file has a `scheduler`"),
    "lr_scheduler_kwargs": _honoured("unless the file has a `scheduler`"),
    "warmup_steps": _honoured('fills an "auto" of the file'),
    "optim": ArgumentField(
        "refused",
        f"only {', '.join(_ELEMENTWISE)} are supported, because other optimizers read a parameter"
        " as a matrix, or keep states that another layout cannot load",
        f'use "adamw_torch"; for small states {_INT8}; for Lion {_LION};'
        f" for paged states {_ON_HOST}",
        _is_unsupported_optimizer,
        _optimizer_remedy,
    ),
    "optim_args": _honoured(),
    "weight_decay": _honoured('fills an "auto" of the file'),
    "adam_beta1": _honoured('fills an "auto" of the file'),
    "adam_beta2": _honoured('fills an "auto" of the file'),
    "adam_epsilon": _honoured('fills an "auto" of the file'),
    "optim_target_modules": ArgumentField(
        "refused", "it belongs to optimizers that read a parameter as a matrix", "leave it out"
    ),
    "gradient_accumulation_steps": _honoured(
        'in a pipeline the micro-batches that are in flight; fills an "auto" of the file'
    ),
    "average_tokens_across_devices": _honoured("over the data-parallel ranks"),
    "max_grad_norm": _honoured('the largest norm over all ranks; fills an "auto" of the file'),
    "label_smoothing_factor": _honoured(),
    "bf16": _honoured(
        "the optimizer keeps the parameters' own dtype, blocks compute in bfloat16; no autocast"
    ),
    "fp16": _honoured("with Plait's own loss scale, which a checkpoint keeps"),
    "bf16_full_eval": ArgumentField(
        "refused", _EVAL_CAST, "use bf16=True, which evaluates in bfloat16 too"
    ),
    "fp16_full_eval": ArgumentField(
        "refused", _EVAL_CAST, "use fp16=True, which evaluates in float16 too"
    ),
    "tf32": _honoured(),
    "activation_checkpointing": _honoured(
        "as parallel.recompute of Plait: every block keeps only its input"
    ),
    "activation_checkpointing_kwargs": ArgumentField(
        "refused",
        "only `every_n_layers` and `use_reentrant` are supported, because the others belong to"
        " torch's checkpoint function, which Plait does not call",
        "leave it out, or describe it in parallel.recompute and parallel.activation_offload of the"
        " file",
        _changes_recomputation,
    ),
    "gradient_checkpointing": _honoured(
        "the name of activation_checkpointing before Transformers 5.23"
    ),
    "gradient_checkpointing_kwargs": ArgumentField(
        "refused",
        "the name of activation_checkpointing_kwargs before Transformers 5.23, with the same rule",
        "leave it out, or describe it in parallel.recompute and parallel.activation_offload of the"
        " file",
        _changes_recomputation_by_old_name,
    ),
    "torch_compile": _honoured("as `compile` of the file: every block by itself"),
    "torch_compile_backend": _honoured("as `compile.backend` of the file"),
    "torch_compile_mode": _honoured("as `compile.mode` of the file"),
    "use_liger_kernel": ArgumentField(
        "refused",
        "its kernels replace layers that Plait splits and casts, and are not tested with Plait",
        "leave it out",
    ),
    "liger_kernel_config": ArgumentField(
        "refused", "it belongs to use_liger_kernel", "leave it out"
    ),
    "use_cache": _honoured(),
    "neftune_noise_alpha": ArgumentField(
        "refused",
        "it is supported only if every process has its own batch, because processes that share a"
        " batch would draw different noise",
        "leave it out, or use parallel.tp = 1 and parallel.pp = 1",
        _shares_batches,
    ),
    "torch_empty_cache_steps": _honoured("except in a pipeline"),
    "auto_find_batch_size": ArgumentField(
        "refused",
        "it restarts training with a smaller batch when memory runs out, and a sharded model cannot"
        " be restarted",
        "leave it out; `plait plan` says what fits",
    ),
    "logging_strategy": _honoured(),
    "logging_steps": _honoured(),
    "logging_first_step": _honoured(),
    "log_on_each_node": _honoured(),
    "logging_nan_inf_filter": ArgumentField(
        "noted",
        "a step that is not finite ends the run, or is skipped, as faults.non_finite of the file"
        " says",
    ),
    "include_num_input_tokens_seen": _honoured("each token once"),
    "log_level": _honoured(),
    "log_level_replica": _honoured(),
    "disable_tqdm": _honoured(),
    "report_to": _honoured(),
    "run_name": _honoured(),
    "project": _honoured(),
    "trackio_space_id": _honoured(),
    "trackio_bucket_id": _honoured(),
    "trackio_static_space_id": _honoured(),
    "eval_strategy": _honoured(),
    "eval_steps": _honoured(),
    "eval_delay": _honoured(),
    "per_device_eval_batch_size": _honoured(),
    "prediction_loss_only": _honoured(),
    "eval_on_start": _honoured(),
    "eval_do_concat_batches": _honoured(),
    "eval_use_gather_object": ArgumentField(
        "refused",
        "objects have no rows, so samples that were repeated could not be recognised",
        "leave it out",
    ),
    "eval_accumulation_steps": _honoured(),
    "include_for_metrics": _honoured(),
    "batch_eval_metrics": _honoured(),
    "save_only_model": _honoured(),
    "save_strategy": _honoured(),
    "save_steps": _honoured(),
    "save_on_each_node": ArgumentField(
        "refused",
        "a checkpoint is one folder that all machines share",
        "leave it out, and name a shared folder",
    ),
    "save_total_limit": _honoured(),
    "enable_jit_checkpoint": ArgumentField(
        "refused",
        "it saves inside a step, whose gradients no checkpoint keeps",
        "leave it out, and use save_steps",
    ),
    "push_to_hub": _honoured("the first process pushes the whole model, as save_model writes it"),
    "hub_token": _honoured("with push_to_hub"),
    "hub_private_repo": _honoured("with push_to_hub"),
    "hub_model_id": _honoured("with push_to_hub"),
    "hub_strategy": _honoured("with push_to_hub"),
    "hub_always_push": _honoured("with push_to_hub"),
    "hub_revision": _honoured("with push_to_hub"),
    "load_best_model_at_end": ArgumentField(
        "refused",
        "it is not supported with save_only_model, because a sharded model does not load a folder"
        " that has weights only",
        "leave it out, or train with save_only_model=False",
        _saves_weights_only,
    ),
    "metric_for_best_model": _honoured(),
    "greater_is_better": _honoured(),
    "ignore_data_skip": _honoured(),
    "restore_callback_states_from_checkpoint": _honoured(),
    "full_determinism": _honoured(),
    "seed": _honoured(
        "the order of the data is that of one process; dropout draws other numbers on every layout"
    ),
    "data_seed": _honoured(),
    "use_cpu": _honoured(),
    "accelerator_config": ArgumentField(
        "refused",
        "only non_blocking, gradient_accumulation_kwargs and dispatch_batches=False are supported,"
        " because Plait divides the batches between ranks itself, each sample once",
        "leave split_batches, dispatch_batches, even_batches, use_seedable_sampler and"
        " use_configured_state at their defaults",
        _changes_data,
    ),
    "parallelism_config": ArgumentField(
        "refused",
        "the configuration describes the layout",
        'leave it out, and write {"parallel": {"tp": 2, "pp": 2}} in deepspeed= or plait_config=',
    ),
    "dataloader_drop_last": _honoured("drops what does not fill a batch on every rank"),
    "dataloader_num_workers": _honoured(
        "an iterable data set is evaluated without workers, and its last round of training repeats"
        " samples"
    ),
    "dataloader_pin_memory": _honoured(),
    "dataloader_persistent_workers": _honoured(),
    "dataloader_prefetch_factor": _honoured(),
    "dataloader_multiprocessing_context": _honoured(),
    "dataloader_in_order": _honoured(),
    "remove_unused_columns": _honoured(),
    "label_names": _honoured(),
    "train_sampling_strategy": ArgumentField(
        "refused",
        "`batch_rebalance` is not supported, because its sampler divides the samples between"
        " processes itself, as Plait does",
        'use "group_by_length"',
        _rebalances_batches,
    ),
    "length_column_name": _honoured(),
    "ddp_find_unused_parameters": ArgumentField(
        "noted",
        f"{_DDP}; parallel.unused_parameters of the file says whether a step may leave some out",
    ),
    "ddp_bucket_cap_mb": ArgumentField(
        "noted", f"{_DDP}; parallel.bucket_mib of the file sets its buckets"
    ),
    "ddp_broadcast_buffers": ArgumentField(
        "noted", f"{_DDP}; buffers that a forward changes are the first rank's"
    ),
    "ddp_static_graph": ArgumentField("noted", _DDP),
    "ddp_backend": _honoured(),
    "ddp_timeout": _honoured(),
    "fsdp": _honoured(
        "as the file that `plait config convert` makes of it: ZeRO 3 or 2, offload, activation"
        " checkpointing"
    ),
    "fsdp_config": _honoured(
        "with `fsdp`; keys without an equivalent in Plait, and hybrid strategies, are refused with"
        " the reason"
    ),
    "deepspeed": _honoured("the file or mapping that Plait takes; DeepSpeed need not be installed"),
    "debug": ArgumentField(
        "refused",
        "its checks read unsharded activations and have not been tested with Plait",
        "leave it out, and use `faults` of the file",
    ),
    "skip_memory_metrics": _honoured(),
    "resume_from_checkpoint": _honoured(
        "train(resume_from_checkpoint=...) decides, as in Transformers"
    ),
    "local_rank": _honoured("read from the launcher, as in Transformers"),
    "do_train": _honoured(),
    "do_eval": _honoured(),
    "do_predict": _honoured(),
}
"""Fields of TrainingArguments."""

SEQ2SEQ: dict[str, ArgumentField] = {
    "sortish_sampler": ArgumentField("noted", "Transformers does not use it"),
    "predict_with_generate": _honoured(
        "by Plait's generate on every layout; with an encoder by Transformers' own, without tp"
        " and pp"
    ),
    "generation_max_length": _honoured(),
    "generation_num_beams": _honoured("1; more only with an encoder, else refused"),
    "generation_config": _honoured(
        "settings that Plait's generate does not have, such as beams, are refused"
    ),
}
"""Additional fields of Seq2SeqTrainingArguments."""

_AS_IN_TRL = (
    "model_init_kwargs",
    "trust_remote_code",
    "router_aux_loss_coef",
    "chat_template_path",
    "dataset_text_field",
    "dataset_kwargs",
    "dataset_num_proc",
    "eos_token",
    "pad_token",
    "max_length",
    "truncation_mode",
    "shuffle_dataset",
    "pad_to_multiple_of",
    "packing",
    "packing_strategy",
    "padding_free",
    "eval_packing",
    "completion_only_loss",
    "assistant_only_loss",
    "loss_type",
    "disable_dropout",
    "loss_weights",
    "ld_alpha",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "label_smoothing",
    "beta",
    "use_weighting",
    "discopop_tau",
)
TRL: dict[str, ArgumentField] = {
    **dict.fromkeys(_AS_IN_TRL, ArgumentField("honoured", "as in TRL")),
    "precompute_ref_log_probs": ArgumentField(
        "refused",
        "it runs the whole reference in every process, before anything is sharded",
        "leave it out: the reference is sharded as the model is",
    ),
    "sync_ref_model": ArgumentField(
        "refused",
        "it mixes the trained weights into the reference's, which is not tested with Plait",
        "leave it out",
    ),
    "precompute_ref_batch_size": ArgumentField("noted", "it belongs to precompute_ref_log_probs"),
    "ref_model_mixup_alpha": ArgumentField("noted", "it belongs to sync_ref_model"),
    "ref_model_sync_steps": ArgumentField("noted", "it belongs to sync_ref_model"),
    "activation_offloading": ArgumentField(
        "refused",
        "its hooks are not tested with Plait",
        "leave it out, and write parallel.activation_offload in the file",
    ),
}
"""Additional fields of SFTConfig and DPOConfig."""


def examined(args: Any, layout: Layout) -> tuple[list[Problem], list[str]]:
    """Find the fields of a Trainer's arguments that Plait refuses or ignores.

    Args:
        args: An object of TrainingArguments or a subclass.
        layout: Layout of the run.

    Returns:
        Problems of the refused fields, and notes about the ignored fields.
    """
    problems = []
    notes = []
    for field in fields(args):
        entry = FIELDS.get(field.name) or SEQ2SEQ.get(field.name) or TRL.get(field.name)
        if entry is None or entry.effect == "honoured":
            continue
        value = getattr(args, field.name)
        if not _applies(entry, field, value, args, layout):
            continue
        if entry.effect == "noted":
            notes.append(f"TrainingArguments.{field.name} changes nothing: {entry.what}")
            continue
        remedy = entry.remedy if entry.remedy_for is None else entry.remedy_for(value)
        name = f"TrainingArguments.{field.name}"
        problems.append(Problem(name, getattr(value, "value", value), entry.what, remedy))

    if getattr(args, "n_gpu", 1) > 1:
        rule = "one process would drive them all, and Plait drives one GPU in every process"
        remedy = "start the script with plait launch or torchrun"
        problems.append(Problem("GPUs of this process", args.n_gpu, rule, remedy))
    return problems, notes


def _applies(entry: ArgumentField, field: Any, value: Any, args: Any, layout: Layout) -> bool:
    """Return True if a field's value is refused, or ignored with a note."""
    if entry.when is not None:
        return entry.when(value, args, layout)
    # Scripts write these values for a field that is off.
    return bool(value != _default(field) and value not in (None, False, "", [], {}))


def _default(field: Any) -> Any:
    if field.default is MISSING and field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
