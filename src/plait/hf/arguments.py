"""`TrainingArguments` for Plait: `deepspeed=`, `fsdp=`, and the configuration they complete.

Transformers' own handling of `deepspeed` requires DeepSpeed, and uses it to load and save models.
Its handling of `fsdp` creates a plugin of Accelerate. Plait replaces both.

Note [Changes to Transformers]
    Importing this module changes `TrainingArguments.__post_init__` and
    `Trainer.create_accelerator_and_postprocess` of Transformers in this process. With the first
    change, Transformers leaves the fields `deepspeed` and `fsdp` to Plait. With the second, a
    Trainer that is not Plait's refuses arguments that set one of these fields.

The arguments complete the configuration by the rule of Transformers' DeepSpeed integration: they
replace every "auto", and supply every size that the configuration leaves out. A value that
contradicts the arguments is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import transformers
from transformers import Seq2SeqTrainingArguments as TheirSeq2SeqTrainingArguments
from transformers import TrainingArguments as TheirTrainingArguments

from plait.cluster.topology import without_variable
from plait.config.convert.conversion import load_foreign
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.resolving.resolved_parts import ACCUMULATION_KEY, MICRO_KEY, TRAIN_KEY
from plait.config.schema.config import (
    Bf16Section,
    CompileSection,
    Config,
    Fp16Section,
    RecomputeSection,
)
from plait.config.schema.optimization import SchedulerSpec
from plait.config.schema.sections import RunSection
from plait.engine.resume import are_equal
from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.hf.accelerator import rejoin
from plait.hf.transformers_trainer import recompute_arguments, recompute_fields

_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable that `accelerate launch --use_deepspeed` sets."""
_MARK = "_plait_reroutes"
"""Attribute of Transformers' class after `patch_transformers`."""


def patch_transformers() -> None:
    """Patch Transformers, once per process. See Note [Changes to Transformers]."""
    if getattr(TheirTrainingArguments, _MARK, False):
        return
    TheirTrainingArguments.__post_init__ = _leave_to_plait(TheirTrainingArguments.__post_init__)
    transformers.Trainer.create_accelerator_and_postprocess = _refuse_other_trainer(
        transformers.Trainer.create_accelerator_and_postprocess
    )
    setattr(TheirTrainingArguments, _MARK, True)


def _leave_to_plait(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any) -> None:
        deepspeed = self.deepspeed
        fsdp = self.fsdp
        fsdp_config = _read_section(self.fsdp_config)
        self.deepspeed = self.fsdp = self.fsdp_config = None
        backend = "gloo" if self.use_cpu else self.ddp_backend
        rejoin(backend, timeout=timedelta(seconds=self.ddp_timeout))
        try:
            with without_variable(_USE_DEEPSPEED):
                original(self)
        finally:
            self.deepspeed = deepspeed
            self.fsdp = fsdp
            self.fsdp_config = fsdp_config

    return post_init


def _read_section(config: Any) -> Any:
    """Return `fsdp_config` as a mapping. If it is the path of a file, read the file.

    Raises:
        InputError: The file cannot be read, or is not a JSON object.
    """
    if not isinstance(config, str):
        return config or {}
    try:
        section = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r} cannot be read as a JSON file ({error});"
            " pass the path of a JSON file, or a dictionary"
        ) from error
    if not isinstance(section, dict):
        raise InputError(
            f"TrainingArguments.fsdp_config = {config!r}: the file holds a {type(section).__name__}"
            " and not an object; write the settings as a JSON object"
        )
    return section


def fsdp_config_of(args: Any) -> Config | None:
    """Return the configuration that `fsdp` and `fsdp_config` describe, or None if FSDP is off.

    Raises:
        ConfigError: A key has no equivalent in Plait.
    """
    if not args.fsdp:
        return None
    return load_foreign({"fsdp": args.fsdp, "fsdp_config": args.fsdp_config})


def _refuse_other_trainer(original: Any) -> Any:
    @wraps(original)
    def create(self: Any) -> None:
        argument = None
        if self.args.deepspeed:
            argument = "deepspeed"
        elif self.args.fsdp:
            argument = "fsdp"
        if argument is not None and not getattr(self, "trains_with_plait", False):
            raise InputError(
                f"{type(self).__name__} got TrainingArguments({argument}=...), which only Plait's"
                " Trainers support after `plait.hf` has been imported; use plait.hf.Trainer, or"
                f" plait.hf.wrap({type(self).__name__})"
            )
        original(self)

    return create


@dataclass
class TrainingArguments(TheirTrainingArguments):
    """`transformers.TrainingArguments` with a field for Plait's configuration."""

    plait_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Plait's configuration, as the path of a JSON or YAML file or as a dictionary. It"
                " replaces `deepspeed`."
            )
        },
    )


@dataclass
class Seq2SeqTrainingArguments(TheirSeq2SeqTrainingArguments, TrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with a field for Plait's configuration."""


ConfigSource = str | Path | Mapping[str, Any] | Config


def settings_of(
    source: ConfigSource | None, args: Any, *, world_size: int, hidden_size: int | None
) -> tuple[Config, Resolved]:
    """Return the configuration of a run.

    Args:
        source: Configuration as a path, a mapping or a Config, or None.
        args: Arguments of the Trainer.
        world_size: Number of processes.
        hidden_size: Hidden size of the model, if it is known.

    Returns:
        The configuration, completed by the arguments, and its resolved form. The resolved form
        contains no LR schedule; `schedule_of` returns the schedule.

    Raises:
        ConfigError: The configuration contradicts the arguments, or has a setting that no Trainer
            supports.
    """
    config = load(source if source is not None else {})
    config = _with_arguments(config, args)
    # The schedule may need the number of steps, which the Trainer knows later.
    unscheduled = config.model_copy(update={"scheduler": None})
    resolved = resolve(
        unscheduled, world_size=world_size, hidden_size=hidden_size, auto=_auto(args)
    )
    raise_problems([*_contradictions(config, resolved, args), *_unsupported(resolved)])
    return config, resolved


def schedule_of(
    config: Config, args: Any, *, world_size: int, max_steps: int
) -> SchedulerSpec | None:
    """Return the LR schedule of the configuration, or None if it has none.

    Args:
        config: Configuration that `settings_of` returned.
        args: Arguments of the Trainer.
        world_size: Number of processes.
        max_steps: Length of the run in optimizer steps.

    Raises:
        ConfigError: The schedule contradicts the arguments.
    """
    if config.scheduler is None:
        return None
    values = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, args.get_warmup_steps(max_steps)),
        "total_num_steps": max_steps,
    }
    auto = {f"scheduler.params.{name}": value for name, value in values.items()}
    resolved = resolve(
        config, world_size=world_size, total_steps=max_steps, auto=_auto(args) | auto
    )
    spec = resolved.scheduler
    assert spec is not None

    argument_names = {
        "warmup_max_lr": "learning_rate",
        "warmup_num_steps": "warmup_steps",
        "total_num_steps": "max_steps",
    }
    problems = []
    for name, argument in argument_names.items():
        if name in spec.params and not are_equal(spec.params[name], values[name]):
            path = f"scheduler.params.{name}"
            problems.append(_contradiction(path, spec.params[name], values[name], argument))
    raise_problems(problems)
    return spec


def _auto(args: Any) -> dict[str, Any]:
    """Return the values that replace "auto", keyed by setting."""
    return {
        MICRO_KEY: args.per_device_train_batch_size,
        ACCUMULATION_KEY: args.gradient_accumulation_steps,
        TRAIN_KEY: None,
        "gradient_clipping": args.max_grad_norm,
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
    }


def _with_arguments(config: Config, args: Any) -> Config:
    """Return the configuration, with omitted settings filled in from the arguments."""
    update: dict[str, Any] = {}
    # The batch of a step is as unknown with "auto" as without a value.
    if config.train_batch_size in (None, "auto") and config.train_micro_batch_size_per_gpu is None:
        update[MICRO_KEY] = args.per_device_train_batch_size
    if config.gradient_accumulation_steps is None:
        update[ACCUMULATION_KEY] = args.gradient_accumulation_steps
    if config.origin("gradient_clipping") == "default":
        update["gradient_clipping"] = args.max_grad_norm
    if config.origin("fp16.enabled") == "default" and config.origin("bf16.enabled") == "default":
        update |= {"fp16": Fp16Section(enabled=args.fp16), "bf16": Bf16Section(enabled=args.bf16)}
    if args.torch_compile:
        _refuse_both(config, "compile.enabled", "torch_compile")
        update["compile"] = CompileSection(
            enabled=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode
        )
    recompute_kwargs = recompute_arguments(args)
    if recompute_kwargs is not None:
        _refuse_both(config, "parallel.recompute.mode", recompute_fields(args)[0])
        recompute = RecomputeSection(mode="full", every=recompute_kwargs.get("every_n_layers", 1))
        update["parallel"] = config.parallel.model_copy(update={"recompute": recompute})
    if config.run is None or config.origin("run.seed") == "default":
        update["run"] = (config.run or RunSection()).model_copy(update={"seed": args.seed})
    return config.model_copy(update=update).with_provenance(config.provenance)


def _refuse_both(config: Config, path: str, argument: str) -> None:
    if config.origin(path) != "default":
        rule = f"the file sets `{path}` too, and the two may differ"
        remedy = f"leave `{argument}` out, or `{path}`"
        raise ConfigError(Problem(f"TrainingArguments.{argument}", True, rule, remedy))


def _contradictions(config: Config, resolved: Resolved, args: Any) -> list[Problem]:
    batch = resolved.batch
    samples = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
    # (setting, its value, value of the argument, name of the argument)
    pairs: list[tuple[str, Any, Any, str]] = [
        (MICRO_KEY, batch.micro_batch_size, samples, "per_device_train_batch_size"),
        (ACCUMULATION_KEY, batch.accumulation, accumulation, "gradient_accumulation_steps"),
        ("gradient_clipping", resolved.gradient_clipping, args.max_grad_norm, "max_grad_norm"),
        ("bf16.enabled", config.bf16.enabled, args.bf16, "bf16"),
        ("fp16.enabled", config.fp16.enabled, args.fp16, "fp16"),
    ]
    if config.optimizer is not None:
        params = resolved.optimizer.params
        names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
        for key, name in names.items():
            if key in params:
                path = f"optimizer.params.{key}"
                pairs.append((path, params[key], getattr(args, name), name))
        if "betas" in params:
            betas = [args.adam_beta1, args.adam_beta2]
            path = "optimizer.params.betas"
            pairs.append((path, list(params["betas"]), betas, "adam_beta1, adam_beta2"))
    return [
        _contradiction(path, value, argument_value, name)
        for path, value, argument_value, name in pairs
        if value != "auto" and not are_equal(value, argument_value)
    ]


def _contradiction(path: str, value: Any, argument_value: Any, argument: str) -> Problem:
    rule = f"TrainingArguments.{argument} is {argument_value}, and both decide it"
    return Problem(path, value, rule, f'write "auto" in the file, or {value} in both')


def tracker_problems(resolved: Resolved, rule: str, argument: str, *, csv: str) -> list[Problem]:
    """Return a problem for each tracker in a configuration that may not enable trackers.

    Args:
        resolved: Configuration.
        rule: Reason for the refusal.
        argument: Remedy for all trackers except `csv_monitor`. Its `{name}` is replaced with
            Accelerate's name of the tracker.
        csv: Remedy for `csv_monitor`.
    """
    problems = []
    for spec in resolved.trackers:
        name = "comet_ml" if spec.name == "comet" else spec.name
        instead = csv if spec.name == "csv_monitor" else argument.format(name=name)
        problems.append(Problem(f"{spec.name}.enabled", True, rule, f"leave it out, and {instead}"))
    return problems


def _unsupported(resolved: Resolved) -> list[Problem]:
    """Return a problem for each setting that no Trainer supports."""
    layout = resolved.layout
    problems = []
    causal_lm = "use 1, or train_batch with plait.causal_lm_loss"
    if layout.cp > 1:
        rule = (
            "the model computes its loss inside its forward, from labels that it shifts itself, and"
            " no process has all of a sequence"
        )
        problems.append(Problem("parallel.cp", layout.cp, rule, causal_lm))
    if layout.ep > 1 and layout.tp > 1:
        rule = f"the Trainer is not tested with experts and parallel.tp = {layout.tp} together"
        problems.append(Problem("parallel.ep", layout.ep, rule, causal_lm))

    for setting, value, off in resolved.routing.loss_settings:
        rule = (
            "the Trainer takes the loss from the model and not from plait.causal_lm_loss, which"
            " adds the losses of routers"
        )
        problems.append(Problem(setting, value, rule, f"use {json.dumps(off)}, or train_batch"))
    chunk_tokens = resolved.loss_chunk_tokens
    if chunk_tokens:
        rule = "the Trainer takes the loss from the model and not from plait.causal_lm_loss"
        remedy = "use 0, or train_batch"
        problems.append(Problem("parallel.loss_chunk_tokens", chunk_tokens, rule, remedy))

    problems += tracker_problems(
        resolved,
        "the Trainer has trackers of its own",
        'set TrainingArguments(report_to="{name}")',
        csv="read log_history in trainer_state.json",
    )
    if resolved.data_parallel.update_in_backward:
        rule = "the Trainer clips and calls callbacks between the backward and the update"
        problems.append(Problem("parallel.optimizer_in_backward", True, rule, "use false"))
    for name in ("model", "data"):
        if getattr(resolved, name) is not None:
            remedy = "leave the section out, or use plait train"
            rule = f"the script passes its {name} to the Trainer"
            problems.append(Problem(name, None, rule, remedy))
    return problems
