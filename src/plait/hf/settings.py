"""The configuration of a Trainer's run: the file, with every "auto" and every size that it leaves
out from `TrainingArguments`.

The rule is that of Transformers' DeepSpeed integration: "auto" is filled, and a value that
contradicts the arguments is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config.resolving.batch import ACCUMULATION, MICRO, TRAIN
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.config import (
    Bf16Section,
    CompileSection,
    Config,
    Fp16Section,
    RecomputeSection,
)
from plait.config.schema.optimization import SchedulerSpec
from plait.config.schema.sections import RunSection
from plait.errors import ConfigError, Problem, refuse
from plait.hf.transformers_versions import recompute_arguments, recompute_fields

ConfigSource = str | Path | Mapping[str, Any] | Config


def settings_of(
    source: ConfigSource | None, args: Any, *, world_size: int, hidden_size: int | None
) -> tuple[Config, Resolved]:
    """(the file with the arguments' values, the same resolved). The second has no schedule; see
    `schedule_of`. Raises ConfigError.
    """
    config = load(source if source is not None else {})
    config = _with_arguments(config, args)
    plain = config.model_copy(update={"scheduler": None})
    resolved = resolve(plain, world_size=world_size, hidden_size=hidden_size, auto=_auto(args))
    refuse([*_contradictions(config, resolved, args), *_unfit(resolved)])
    return config, resolved


def schedule_of(
    config: Config, args: Any, *, world_size: int, max_steps: int
) -> SchedulerSpec | None:
    """The schedule that the file describes, for a run of `max_steps`; None where it describes none.
    Raises ConfigError.
    """
    if config.scheduler is None:
        return None
    warmup = args.get_warmup_steps(max_steps)
    wanted = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, warmup),
        "total_num_steps": max_steps,
    }
    auto = {f"scheduler.params.{name}": value for name, value in wanted.items()}
    spec = resolve(
        config, world_size=world_size, total_steps=max_steps, auto=_auto(args) | auto
    ).scheduler
    assert spec is not None
    arguments = {
        "warmup_max_lr": "learning_rate",
        "warmup_num_steps": "warmup_steps",
        "total_num_steps": "max_steps",
    }
    refuse(
        _contradiction(f"scheduler.params.{name}", spec.params[name], wanted[name], arguments[name])
        for name in arguments
        if name in spec.params and not _equal(spec.params[name], wanted[name])
    )
    return spec


def _auto(args: Any) -> dict[str, Any]:
    return {
        MICRO: args.per_device_train_batch_size,
        ACCUMULATION: args.gradient_accumulation_steps,
        TRAIN: None,
        "gradient_clipping": args.max_grad_norm,
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
    }


def _with_arguments(config: Config, args: Any) -> Config:
    """Where the file says nothing, the arguments do."""
    update: dict[str, Any] = {}
    if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
        update[MICRO] = args.per_device_train_batch_size
    if config.gradient_accumulation_steps is None:
        update[ACCUMULATION] = args.gradient_accumulation_steps
    if config.origin("gradient_clipping") == "default":
        update["gradient_clipping"] = args.max_grad_norm
    if config.origin("fp16.enabled") == "default" and config.origin("bf16.enabled") == "default":
        update |= {"fp16": Fp16Section(enabled=args.fp16), "bf16": Bf16Section(enabled=args.bf16)}
    if args.torch_compile:
        _refuse_both(config, "compile.enabled", "torch_compile")
        update["compile"] = CompileSection(
            enabled=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode
        )
    recomputing = recompute_arguments(args)
    if recomputing is not None:
        _refuse_both(config, "parallel.recompute.mode", recompute_fields(args)[0])
        recompute = RecomputeSection(mode="full", every=recomputing.get("every_n_layers", 1))
        update["parallel"] = config.parallel.model_copy(update={"recompute": recompute})
    if config.run is None or config.origin("run.seed") == "default":
        update["run"] = (config.run or RunSection()).model_copy(update={"seed": args.seed})
    return config.model_copy(update=update).with_provenance(config.provenance)


def _refuse_both(config: Config, path: str, argument: str) -> None:
    if config.origin(path) != "default":
        rule = f"the file says `{path}` too, and the two may differ"
        raise ConfigError(
            Problem(
                f"TrainingArguments.{argument}", True, rule, f"leave `{argument}` out, or `{path}`"
            )
        )


def _contradictions(config: Config, resolved: Resolved, args: Any) -> list[Problem]:
    both: list[tuple[str, Any, Any, str]] = [
        (
            MICRO,
            resolved.batch.micro_batch_size,
            args.per_device_train_batch_size,
            "per_device_train_batch_size",
        ),
        (
            ACCUMULATION,
            resolved.batch.accumulation,
            args.gradient_accumulation_steps,
            "gradient_accumulation_steps",
        ),
        ("gradient_clipping", resolved.gradient_clipping, args.max_grad_norm, "max_grad_norm"),
        ("bf16.enabled", config.bf16.enabled, args.bf16, "bf16"),
        ("fp16.enabled", config.fp16.enabled, args.fp16, "fp16"),
    ]
    if config.optimizer is not None:
        params = resolved.optimizer.params
        names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
        both += [
            (f"optimizer.params.{key}", params[key], getattr(args, name), name)
            for key, name in names.items()
            if key in params
        ]
        if "betas" in params:
            both.append(
                (
                    "optimizer.params.betas",
                    list(params["betas"]),
                    [args.adam_beta1, args.adam_beta2],
                    "adam_beta1, adam_beta2",
                )
            )
    return [
        _contradiction(path, here, there, name)
        for path, here, there, name in both
        if here != "auto" and not _equal(here, there)
    ]


def _contradiction(path: str, here: Any, there: Any, argument: str) -> Problem:
    return Problem(
        path,
        here,
        f"TrainingArguments.{argument} is {there}, and both decide it",
        f'write "auto" in the file, or {here} in both',
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def tracker_problems(resolved: Resolved, rule: str, argument: str, *, csv: str) -> list[Problem]:
    """Return a problem for each tracker of a file whose caller has trackers of its own.

    Args:
        resolved: Configuration.
        rule: Reason of the refusal.
        argument: What to do instead, with `{name}` for Accelerate's name of the tracker.
        csv: What to do instead of `csv_monitor`.
    """
    problems = []
    for spec in resolved.trackers:
        name = "comet_ml" if spec.name == "comet" else spec.name
        instead = csv if spec.name == "csv_monitor" else argument.format(name=name)
        setting = resolved.tracker_setting(spec)
        problems.append(Problem(setting, spec.name, rule, f"leave it out, and {instead}"))
    return problems


def _unfit(resolved: Resolved) -> list[Problem]:
    """What no Trainer can run."""
    found = []
    if resolved.layout.cp > 1:
        rule = (
            "the model computes its loss inside its forward, from labels that it shifts itself, and"
            " no process has all of a sequence"
        )
        found.append(
            Problem(
                "parallel.cp",
                resolved.layout.cp,
                rule,
                "use 1, or train_batch with plait.causal_lm_loss",
            )
        )
    if resolved.layout.ep > 1 and resolved.layout.tp > 1:
        rule = f"with parallel.tp = {resolved.layout.tp} the Trainer has not been run"
        found.append(
            Problem(
                "parallel.ep",
                resolved.layout.ep,
                rule,
                "use 1, or train_batch with plait.causal_lm_loss",
            )
        )
    for setting, value, off in resolved.routing.added:
        rule = (
            "the Trainer takes the loss from the model, not plait.causal_lm_loss, which adds those"
            " of routers"
        )
        found.append(Problem(setting, value, rule, f"use {json.dumps(off)}, or train_batch"))
    if resolved.loss_chunk_tokens:
        rule = "the Trainer takes the loss from the model, not plait.causal_lm_loss"
        found.append(
            Problem(
                "parallel.loss_chunk_tokens",
                resolved.loss_chunk_tokens,
                rule,
                "use 0, or train_batch",
            )
        )
    argument = 'set TrainingArguments(report_to="{name}")'
    csv = "read log_history in trainer_state.json"
    found += tracker_problems(resolved, "the Trainer has trackers of its own", argument, csv=csv)
    if resolved.data_parallel.update_in_backward:
        rule = "the Trainer clips and calls callbacks between the backward and the update"
        found.append(Problem("parallel.optimizer_in_backward", True, rule, "use false"))
    given = [name for name in ("model", "data") if getattr(resolved, name) is not None]
    found += [
        Problem(name, None, "the Trainer is given it", "leave the section out, or use plait train")
        for name in given
    ]
    return found
