"""Parameters of each learning rate schedule.

DeepSpeed's and Megatron-LM's schedules are classes here. Transformers' schedules are a table. The
parameters of torch's schedules are read from their signatures. This module checks names and values;
`plait.optim.lr_schedules` builds the schedules.

The defaults of DeepSpeed's schedules are those of DeepSpeed 0.19.8 (`runtime/lr_schedules.py`). A
schedule counts only optimizer steps that were not skipped. A problem is a string of the form `rule;
remedy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

import torch.optim.lr_scheduler
from pydantic import TypeAdapter

from plait.config.values import (
    Finite,
    Flag,
    Fraction,
    Integer,
    NotNegative,
    NotNegativeInteger,
    Parameter,
    Steps,
    parameters,
    value_problems,
)
from plait.names import suggest_names
from plait.policy import Policy

AUTO = "auto"

PerGroup = NotNegative | tuple[NotNegative, ...]
"""A learning rate for all parameter groups, or a list with a rate per group."""


class WarmupLR(Policy):
    """Warm-up from a low to a high rate, then a constant rate."""

    warmup_min_lr: PerGroup = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: PerGroup | None = None
    """Rate after the warm-up. If omitted or `auto`, the `lr` of the optimizer."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up. 1 means 2, as in DeepSpeed."""
    warmup_type: Literal["log", "linear"] = "log"
    """Growth of the rate: with the logarithm of the step, or linearly."""


class WarmupDecayLR(WarmupLR):
    """Warm-up from a low to a high rate, then linear decay to zero at the last step."""

    warmup_max_lr: PerGroup | None = 0.001
    """Rate after the warm-up. `auto`: the `lr` of the optimizer."""
    total_num_steps: Steps | None = None
    """Steps of the full run. If omitted or `auto`, the length of the run."""


class WarmupCosineLR(Policy):
    """Warm-up to the `lr` of the optimizer, then cosine decay.

    The parameters are ratios of the optimizer's `lr`. The first step has rate 0.
    """

    total_num_steps: Steps | None = None
    """Steps of the full run. If omitted or `auto`, the length of the run."""
    warmup_min_ratio: NotNegative = 0.0
    """Ratio at the start of the warm-up, which is the second step."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up. 1 means 2, as in DeepSpeed."""
    cos_min_ratio: NotNegative = 0.0001
    """Ratio at the end of the decay, and after it."""
    warmup_type: Literal["log", "linear"] = "log"
    """Growth of the ratio: with the logarithm of the step, or linearly."""


class OneCycle(Policy):
    """Cycle of the rate between two values, then an optional decay below the lower rate.

    The momentum changes in the opposite direction.
    """

    cycle_min_lr: PerGroup
    """Rate at the start and at the end of the cycle."""
    cycle_max_lr: PerGroup
    """Rate in the middle of the cycle."""
    decay_lr_rate: NotNegative = 0.0
    """Decay of the rate after the cycle: cycle_min_lr / (1 + decay_lr_rate x intervals). 0 keeps
    cycle_min_lr.
    """
    cycle_first_step_size: Steps = 2000
    """Steps of the rising half."""
    cycle_second_step_size: NotNegativeInteger | None = None
    """Steps of the falling half. If omitted, as many as the rising half."""
    cycle_first_stair_count: Integer = 0
    """Number of stairs in the rising half; 0 or less changes the rate at every step."""
    cycle_second_stair_count: Integer | None = None
    """Number of stairs in the falling half. If omitted, as in the rising half."""
    decay_step_size: NotNegativeInteger = 0
    """Steps per interval of the decay; 0 means no decay."""
    cycle_momentum: Flag | None = None
    """Cycle also the first of `betas` (and set the second to 0.99, as DeepSpeed does). If omitted,
    true for optimizers that have betas.
    """
    cycle_min_mom: Fraction | tuple[Fraction, ...] = 0.8
    """Momentum in the middle of the cycle, and at the first step."""
    cycle_max_mom: Fraction | tuple[Fraction, ...] = 0.9
    """Momentum at both ends of the cycle."""
    decay_mom_rate: Finite = 0.0
    """Growth of the momentum after the cycle: cycle_max_mom x (1 + decay_mom_rate x intervals)."""


class LRRangeTest(Policy):
    """Rate that grows without limit, to find the largest stable rate."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """Learning rate at the first step."""
    lr_range_test_step_size: Steps = 2000
    """Steps per interval."""
    lr_range_test_step_rate: NotNegative = 1.0
    """Growth of the rate: lr_range_test_min_lr x (1 + lr_range_test_step_rate x intervals)."""
    lr_range_test_staircase: Flag = False
    """Count only full intervals."""


class MegatronLR(Policy):
    """Schedule of Megatron-LM: linear warm-up to the `lr` of the optimizer, then decay to `min_lr`.

    The rate is constant after the last step.
    """

    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay. WSD: constant until the last `wsd_decay_steps`."""
    wsd_decay_steps: Steps | None = None
    """WSD: number of steps at the end in which the rate decays."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: shape of the decay at the end."""
    warmup_num_steps: NotNegative = 0
    """Steps of the warm-up."""
    warmup_fraction: Fraction | None = None
    """Length of the warm-up as a share of `total_num_steps`; replaces `warmup_num_steps`."""
    init_lr: NotNegative = 0.0
    """Learning rate at the first step of the warm-up."""
    min_lr: NotNegative = 0.0
    """Minimum of the decay."""
    total_num_steps: Steps | None = None
    """Step at which the decay ends. If omitted or `auto`, the length of the run."""


DeepSpeedSchedule = WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest | MegatronLR
DEEPSPEED: Mapping[str, type[DeepSpeedSchedule]] = MappingProxyType(
    {
        schedule.__name__: schedule
        for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, MegatronLR)
    }
)
"""Schedules of DeepSpeed and of Megatron-LM, by name."""

_WARMUP = "num_warmup_steps"
_TOTAL = "num_training_steps"
_TRANSFORMERS_VALUES: Mapping[str, TypeAdapter[Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            (_WARMUP, "num_decay_steps", "num_stable_steps"), TypeAdapter(NotNegativeInteger)
        ),
        **dict.fromkeys((_TOTAL, "timescale"), TypeAdapter(Steps)),
        **dict.fromkeys(
            ("num_cycles", "lr_end", "power", "min_lr", "min_lr_rate", "warmup_lr_rate"),
            TypeAdapter(NotNegative),
        ),
        "min_lr_ratio": TypeAdapter(NotNegative),
        **dict.fromkeys(
            ("warmup_type", "decay_type"), TypeAdapter(Literal["linear", "cosine", "1-sqrt"])
        ),
    }
)
"""Valid values of the parameters of Transformers' schedules."""
_COSINE_PARAMS = (_WARMUP, _TOTAL, "num_cycles")
TRANSFORMERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": (),
        "constant_with_warmup": (_WARMUP,),
        "inverse_sqrt": (_WARMUP, "timescale"),
        "linear": (_WARMUP, _TOTAL),
        "cosine": _COSINE_PARAMS,
        "cosine_with_restarts": _COSINE_PARAMS,
        "polynomial": (_WARMUP, _TOTAL, "lr_end", "power"),
        "cosine_with_min_lr": (*_COSINE_PARAMS, "min_lr", "min_lr_rate"),
        "cosine_warmup_with_min_lr": (*_COSINE_PARAMS, "min_lr", "min_lr_rate", "warmup_lr_rate"),
        "warmup_stable_decay": (
            *_COSINE_PARAMS,
            "num_decay_steps",
            "num_stable_steps",
            "warmup_type",
            "decay_type",
            "min_lr_ratio",
        ),
    }
)
"""Parameters that Transformers' `get_scheduler` passes on, by `transformers.SchedulerType`.

They are listed because a configuration is checked without importing Transformers.
"""

_NEEDS_METRIC = (
    "it follows a validation metric, and a schedule here sees only the step; use `cosine` or"
    " `WarmupDecayLR`"
)
_NEEDS_OBJECTS = (
    "it is made of functions or other schedules, which a file cannot contain; pass lr_scheduler= to"
    " plait.initialize"
)
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("ReduceLROnPlateau", "reduce_lr_on_plateau", "greedy"), _NEEDS_METRIC),
        **dict.fromkeys(
            ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"), _NEEDS_OBJECTS
        ),
    }
)
"""Types that cannot be used: rule and remedy by type."""
_POSITION = ("last_batch_iteration", "last_epoch")
"""Parameters that set the position of a schedule."""
TORCH: Mapping[str, type[torch.optim.lr_scheduler.LRScheduler]] = MappingProxyType(
    {
        name: member
        for name, member in vars(torch.optim.lr_scheduler).items()
        if isinstance(member, type)
        and issubclass(member, torch.optim.lr_scheduler.LRScheduler)
        # The base classes are not schedules.
        and name not in (*REFUSED, "LRScheduler", "_LRScheduler")
    }
)
"""Schedules of the installed torch that a file can describe."""

RUN_LENGTH = frozenset({"total_num_steps", _TOTAL, "total_steps", "T_max", "total_iters"})
"""Parameters that `auto` sets to the number of optimizer steps of the run."""


def _torch_parameters(kind: str) -> Mapping[str, Parameter]:
    constructor: Callable[..., object] = TORCH[kind]
    return parameters(constructor)


def accepted(kind: str) -> dict[str, bool]:
    """Return whether each parameter of a known schedule is required, keyed by its name."""
    if kind in DEEPSPEED:
        return {name: field.is_required() for name, field in DEEPSPEED[kind].model_fields.items()}
    if kind in TRANSFORMERS:
        # The only parameter of these schedules that has no default and no length of the run.
        return {name: name == "num_decay_steps" for name in TRANSFORMERS[kind]}

    # The engine passes the optimizer, and a file cannot contain the function `scale_fn`.
    excluded = {"optimizer", "scale_fn", *_POSITION}
    # If the length of the run is omitted, it is filled in as for "auto". It is not required.
    is_required: dict[str, bool] = {}
    for name, parameter in _torch_parameters(kind).items():
        if name not in excluded:
            is_required[name] = parameter.required and name not in RUN_LENGTH
    return is_required


def auto_value(name: str) -> object:
    """Return the value that replaces `auto`, by Hugging Face's rules for unset `TrainingArguments`.

    Returns:
        None if the optimizer or the length of the run determines the value.

    Raises:
        KeyError: No rule determines the parameter.
    """
    rules = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1,
        _WARMUP: 0,
        **dict.fromkeys(RUN_LENGTH),
    }
    return rules[name]


def kind_problems(kind: str) -> list[str]:
    """Return the problems of a type, or an empty list if it is supported."""
    known = (*DEEPSPEED, *TRANSFORMERS, *TORCH)
    if kind in REFUSED:
        return [f"it cannot be used: {REFUSED[kind]}"]
    if kind not in known:
        return [
            f"`{kind}` is not a schedule of DeepSpeed, Transformers or torch;"
            f" {suggest_names(kind, known)}"
        ]
    return []


def param_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """Return the problems of the parameters of a known schedule."""
    names = accepted(kind)
    problems = [_unknown_param(kind, name, names) for name in params if name not in names]
    problems += [
        f"{kind} needs `{name}`; add it"
        for name, required in names.items()
        if required and name not in params
    ]

    for name, value in params.items():
        if name not in names:
            continue
        if value != AUTO:
            problems += value_problems(convert, kind, {name: value})
            continue
        try:
            auto_value(name)
        except KeyError:
            problems.append(f"`{name}` is `auto`, and nothing determines its value; write one")
    return problems


def _unknown_param(kind: str, name: str, names: Mapping[str, bool]) -> str:
    if name in _POSITION:
        return (
            f"`{name}` is not a setting: the position of a schedule comes from the checkpoint;"
            " leave it out"
        )
    if kind == "WarmupCosineLR" and name in WarmupLR.model_fields:
        return (
            f"`{name}` is not a parameter of {kind}, which scales the optimizer's own lr; set"
            " optimizer.params.lr and the ratios"
        )
    return f"`{name}` is not a parameter of {kind}; {suggest_names(name, names)}"


def convert(kind: str, name: str, value: object) -> object:
    """Convert a value from JSON or YAML to the type that the schedule expects.

    For example `1e-4`, which YAML reads as text, becomes a number. `auto` is returned unchanged.

    Raises:
        pydantic.ValidationError: The value is invalid for the schedule.
    """
    if value == AUTO:
        return value
    return _adapter(kind, name).validate_python(value)


@cache
def _adapter(kind: str, name: str) -> TypeAdapter[Any]:
    if kind in DEEPSPEED:
        # The annotations are evaluated because this module postpones their evaluation.
        return TypeAdapter(get_type_hints(DEEPSPEED[kind], include_extras=True)[name])
    if kind in TRANSFORMERS:
        return _TRANSFORMERS_VALUES[name]
    return _torch_parameters(kind)[name].values


def deepspeed_schedule(kind: str, params: Mapping[str, Any]) -> DeepSpeedSchedule:
    """Return a schedule of DeepSpeed or Megatron-LM, with its defaults and without `auto`.

    Raises:
        pydantic.ValidationError: A parameter is invalid.
    """
    values = {name: auto_value(name) if value == AUTO else value for name, value in params.items()}
    return DEEPSPEED[kind].model_validate(values)
