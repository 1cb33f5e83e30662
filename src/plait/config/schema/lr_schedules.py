"""The parameters of each learning rate schedule: DeepSpeed's and Megatron-LM's as classes,
Transformers' as a table, torch's by signatures.

Pure: this checks names and values, `plait.optim.lr_schedules` holds the formulas and builds.
Defaults of DeepSpeed's schedules are those of DeepSpeed 0.19.8 (`runtime/lr_schedules.py`). A
schedule counts optimizer steps that were not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

import torch.optim.lr_scheduler
from pydantic import TypeAdapter

from plait.config.values.names import instead
from plait.config.values.numbers import Count, Finite, Flag, Fraction, NotNegative, Steps, Whole
from plait.config.values.signatures import Parameter, parameters, value_problems
from plait.policy import Policy

AUTO = "auto"


PerGroup = NotNegative | tuple[NotNegative, ...]
"""One rate for all parameter groups, or one each."""


class WarmupLR(Policy):
    """From a low to a high rate, then constant."""

    warmup_min_lr: PerGroup = 0.0
    """The rate at the first step."""
    warmup_max_lr: PerGroup | None = None
    """The rate after the warm-up. Left out or `auto`: the optimizer's own `lr`."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up; DeepSpeed takes 1 as 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the rate rises: with the logarithm of the step, or with the step."""


class WarmupDecayLR(WarmupLR):
    """From a low to a high rate, then linearly to zero at the last step."""

    warmup_max_lr: PerGroup | None = 0.001
    """The rate after the warm-up. `auto`: the optimizer's own `lr`."""
    total_num_steps: Steps | None = None
    """Steps of the full run. Left out or `auto`: the length of the run."""


class WarmupCosineLR(Policy):
    """The optimizer's own `lr` times a ratio that rises to 1, then falls along a cosine. The very
    first step has rate 0.
    """

    total_num_steps: Steps | None = None
    """Steps of the full run. Left out or `auto`: the length of the run."""
    warmup_min_ratio: NotNegative = 0.0
    """The ratio at which the warm-up starts (from the second step on)."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up; DeepSpeed takes 1 as 2."""
    cos_min_ratio: NotNegative = 0.0001
    """The ratio at the end, and after it."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the ratio rises: with the logarithm of the step, or with the step."""


class OneCycle(Policy):
    """Up and down once between two rates, momentum the other way round, then an optional decay
    below the lower rate.
    """

    cycle_min_lr: PerGroup
    """The rate at the start and at the end of the cycle."""
    cycle_max_lr: PerGroup
    """The rate in the middle."""
    decay_lr_rate: NotNegative = 0.0
    """After the cycle the rate is cycle_min_lr / (1 + decay_lr_rate x intervals); 0 keeps
    cycle_min_lr.
    """
    cycle_first_step_size: Steps = 2000
    """Steps of the rising half."""
    cycle_second_step_size: Count | None = None
    """Steps of the falling half. Left out: as many as the rising half."""
    cycle_first_stair_count: Whole = 0
    """Change in this many stairs during the rising half; 0 or less changes at every step."""
    cycle_second_stair_count: Whole | None = None
    """The same for the falling half. Left out: as in the rising half."""
    decay_step_size: Count = 0
    """Steps in one interval of the decay; 0 means no decay."""
    cycle_momentum: Flag | None = None
    """Cycle the first of `betas` too (DeepSpeed then sets the second to 0.99). Left out: yes, where
    the optimizer has betas.
    """
    cycle_min_mom: Fraction | tuple[Fraction, ...] = 0.8
    """The momentum in the middle of the cycle, and at the very first step."""
    cycle_max_mom: Fraction | tuple[Fraction, ...] = 0.9
    """The momentum at both ends."""
    decay_mom_rate: Finite = 0.0
    """After the cycle the momentum is cycle_max_mom x (1 + decay_mom_rate x intervals)."""


class LRRangeTest(Policy):
    """A rate that grows without end, to find the largest one that still trains."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """The rate at the first step."""
    lr_range_test_step_size: Steps = 2000
    """Steps in one interval."""
    lr_range_test_step_rate: NotNegative = 1.0
    """The rate is lr_range_test_min_lr x (1 + lr_range_test_step_rate x intervals)."""
    lr_range_test_staircase: Flag = False
    """Count only full intervals."""


class MegatronLR(Policy):
    """Megatron-LM's: up to the optimizer's own `lr` with the step, then down to `min_lr`, which
    holds from the last step on.
    """

    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """How the rate falls. WSD: not at all, up to the last `wsd_decay_steps`."""
    wsd_decay_steps: Steps | None = None
    """WSD: the steps at the end in which the rate falls."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: how it falls there."""
    warmup_num_steps: NotNegative = 0
    """Steps of the warm-up."""
    warmup_fraction: Fraction | None = None
    """The warm-up as a share of `total_num_steps`, in place of its steps."""
    init_lr: NotNegative = 0.0
    """The rate at the first step of a warm-up."""
    min_lr: NotNegative = 0.0
    """The least rate of the decay."""
    total_num_steps: Steps | None = None
    """The step at which the decay ends. Left out or `auto`: the length of the run."""


DeepSpeedSchedule = WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest | MegatronLR
DEEPSPEED: Mapping[str, type[DeepSpeedSchedule]] = MappingProxyType(
    {
        schedule.__name__: schedule
        for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, MegatronLR)
    }
)
"""DeepSpeed's by their names there, and Megatron-LM's, which has none."""

_WARM = "num_warmup_steps"
_TOTAL = "num_training_steps"
_TRANSFORMERS_VALUES: Mapping[str, TypeAdapter[Any]] = MappingProxyType(
    {
        **{name: TypeAdapter(Count) for name in (_WARM, "num_decay_steps", "num_stable_steps")},
        **{name: TypeAdapter(Steps) for name in (_TOTAL, "timescale")},
        **{
            name: TypeAdapter(NotNegative)
            for name in ("num_cycles", "lr_end", "power", "min_lr", "min_lr_rate", "warmup_lr_rate")
        },
        "min_lr_ratio": TypeAdapter(NotNegative),
        **{
            name: TypeAdapter(Literal["linear", "cosine", "1-sqrt"])
            for name in ("warmup_type", "decay_type")
        },
    }
)
_CYCLED = (_WARM, _TOTAL, "num_cycles")
TRANSFORMERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": (),
        "constant_with_warmup": (_WARM,),
        "inverse_sqrt": (_WARM, "timescale"),
        "linear": (_WARM, _TOTAL),
        "cosine": _CYCLED,
        "cosine_with_restarts": _CYCLED,
        "polynomial": (_WARM, _TOTAL, "lr_end", "power"),
        "cosine_with_min_lr": (*_CYCLED, "min_lr", "min_lr_rate"),
        "cosine_warmup_with_min_lr": (*_CYCLED, "min_lr", "min_lr_rate", "warmup_lr_rate"),
        "warmup_stable_decay": (
            *_CYCLED,
            "num_decay_steps",
            "num_stable_steps",
            "warmup_type",
            "decay_type",
            "min_lr_ratio",
        ),
    }
)
"""`transformers.SchedulerType` to what `get_scheduler` passes on. Here because the configuration is
checked without Transformers.
"""

_NEEDS_METRIC = (
    "it follows a validation metric, and a schedule here sees only the step; use `cosine` or"
    " `WarmupDecayLR`"
)
_NEEDS_OBJECTS = (
    "it is made of functions or other schedules, which a file cannot hold; pass lr_scheduler= to"
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
_POSITION = ("last_batch_iteration", "last_epoch")
TORCH: Mapping[str, type[torch.optim.lr_scheduler.LRScheduler]] = MappingProxyType(
    {
        name: found
        for name, found in vars(torch.optim.lr_scheduler).items()
        if isinstance(found, type)
        and issubclass(found, torch.optim.lr_scheduler.LRScheduler)
        and name not in (*REFUSED, "LRScheduler", "_LRScheduler")
    }
)
"""Every schedule of the installed torch that a file can describe."""

RUN_LENGTH = frozenset({"total_num_steps", _TOTAL, "total_steps", "T_max", "total_iters"})
"""Parameters for which `auto` means the number of steps of the run."""


def _torch_parameters(kind: str) -> Mapping[str, Parameter]:
    build: Callable[..., object] = TORCH[kind]
    return parameters(build)


def accepted(kind: str) -> dict[str, bool]:
    """Parameter name to whether it must be given, for a known schedule."""
    if kind in DEEPSPEED:
        return {name: field.is_required() for name, field in DEEPSPEED[kind].model_fields.items()}
    if kind in TRANSFORMERS:
        return {name: name == "num_decay_steps" for name in TRANSFORMERS[kind]}
    hidden = {"optimizer", "scale_fn", *_POSITION}
    # A length of the run that is left out is filled in like "auto", so it is not required.
    return {
        name: p.required and name not in RUN_LENGTH
        for name, p in _torch_parameters(kind).items()
        if name not in hidden
    }


def auto_value(name: str) -> object:
    """What `auto` means for a parameter, by Hugging Face's rules for an unset `TrainingArguments`;
    None where the optimizer or the length of the run decides. Raises KeyError for a parameter that
    has no such rule.
    """
    rules = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1,
        _WARM: 0,
        **dict.fromkeys(RUN_LENGTH),
    }
    return rules[name]


def kind_problems(kind: str) -> list[str]:
    """Why a schedule cannot be used; empty for one that can. Each `rule; remedy`."""
    known = (*DEEPSPEED, *TRANSFORMERS, *TORCH)
    if kind in REFUSED:
        return [f"it cannot be used: {REFUSED[kind]}"]
    if kind not in known:
        return [
            f"`{kind}` is not a schedule of DeepSpeed, Transformers or torch;"
            f" {instead(kind, known)}"
        ]
    return []


def param_problems(kind: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of a known schedule, whatever the model and the length of
    the run. Each `rule; remedy`.
    """
    names = accepted(kind)
    found = [_unknown(kind, name, names) for name in params if name not in names]
    found += [
        f"{kind} needs `{name}`; add it"
        for name, required in names.items()
        if required and name not in params
    ]
    for name, value in params.items():
        if value == AUTO and name in names:
            try:
                auto_value(name)
            except KeyError:
                found.append(f"`{name}` is `auto`, and nothing determines its value; write one")
        elif name in names:
            found += value_problems(convert, kind, {name: value})
    return found


def _unknown(kind: str, name: str, names: Mapping[str, bool]) -> str:
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
    return f"`{name}` is not a parameter of {kind}; {instead(name, names)}"


def convert(kind: str, name: str, value: object) -> object:
    """A value from JSON or YAML as the schedule wants it (`1e-4`, which YAML reads as text, becomes
    a number). Raises pydantic's ValidationError for a value that it cannot take.
    """
    if value == AUTO:
        return value
    return _adapter(kind, name).validate_python(value)


@cache
def _adapter(kind: str, name: str) -> TypeAdapter[Any]:
    if kind in DEEPSPEED:
        return TypeAdapter(get_type_hints(DEEPSPEED[kind], include_extras=True)[name])
    return (
        _TRANSFORMERS_VALUES[name] if kind in TRANSFORMERS else _torch_parameters(kind)[name].values
    )


def deepspeed_schedule(kind: str, params: Mapping[str, Any]) -> DeepSpeedSchedule:
    """The parameters of one of DeepSpeed's schedules with its defaults, `auto` as `auto_value`
    says. Raises pydantic's ValidationError.
    """
    given = {name: auto_value(name) if value == AUTO else value for name, value in params.items()}
    return DEEPSPEED[kind].model_validate(given)
