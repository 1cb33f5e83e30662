"""From a SchedulerSpec to a learning rate schedule on an optimizer: DeepSpeed's, torch's, or
Transformers'.

The caller calls `step()` once after every optimizer step that was not skipped; the rate it sets is
used by the next one. The rate of the first step is set here, when the schedule is made. All of them
are torch `LRScheduler`s; what is skipped or resumed is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plait import exact
from plait.config.schema import lr_schedules
from plait.config.schema.lr_schedules import (
    DeepSpeedSchedule,
    LRRangeTest,
    MegatronLR,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
)
from plait.config.schema.optimization import SchedulerSpec
from plait.errors import CheckpointError, ConfigError, Problem
from plait.optim.lr_formulas import learning_rate, one_cycle_momentum

log = logging.getLogger(__name__)

BETA2 = 0.99
"""DeepSpeed's OneCycle replaces the second of `betas` by this wherever it cycles the first."""


class Scheduler(Protocol):
    """What a learning rate schedule must do; torch's and Plait's all do."""

    def step(self) -> Any: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class ScheduleSource:
    """What a schedule was built from, where a configuration says it."""

    spec: SchedulerSpec
    total_steps: int | None

    @property
    def facts(self) -> Any:
        """In a checkpoint: equal for schedules that give the same rates."""
        return exact.encode(
            {"spec": self.spec.model_dump(), "total_steps": self.total_steps}, "scheduler"
        )


class DeepSpeedScheduler(LRScheduler):
    """One of DeepSpeed's schedules on an optimizer. `rates` (and `momenta`, where momentum is
    cycled) give the value of every parameter group at DeepSpeed's index, which is torch's
    `last_epoch` less 1.

    Its state is the position alone, so a changed schedule takes effect on resume.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        rates: Callable[[int], Sequence[float]],
        momenta: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self._rates = rates
        self._momenta = momenta
        super().__init__(optimizer)  # calls step() once, which sets the values of index -1

    def get_lr(self) -> list[Any]:
        """The rate of every group now."""
        return list(self._rates(self.last_epoch - 1))

    def step(self, epoch: int | None = None) -> None:
        """Set the values for the next optimizer step."""
        super().step(epoch)
        self._set_momenta()

    def _set_momenta(self) -> None:
        if self._momenta is not None:
            for group, momentum in zip(
                self.optimizer.param_groups, self._momenta(self.last_epoch - 1), strict=True
            ):
                group["betas"] = (momentum, BETA2)

    def state_dict(self) -> dict[str, Any]:
        """The position: one plain number."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position, and give the optimizer this schedule's values there. Raises
        CheckpointError for what is no such state.
        """
        position = state_dict.get("last_epoch")
        if not isinstance(position, int):
            raise CheckpointError(
                "the saved schedule has no `last_epoch` (it has"
                f" {', '.join(map(str, state_dict)) or 'nothing'})"
            )
        self.last_epoch = position
        self._step_count = position + 1
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
        self._set_momenta()


def build_scheduler(
    spec: SchedulerSpec, optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    """The schedule that a file asks for, with the rates of the first step set in `optimizer`.

    `total_steps`, the length of the run in optimizer steps, is used where the file leaves it to the
    run. Raises ConfigError where it is needed and None, and for values that do not fit the schedule
    or the optimizer.
    """
    if spec.type in lr_schedules.DEEPSPEED:
        return _deepspeed(spec, optimizer, total_steps=total_steps)
    params = {name: _filled(spec, name, total_steps) for name in spec.params}
    try:
        if spec.type in lr_schedules.TRANSFORMERS:
            return _transformers(spec, params, optimizer, total_steps=total_steps)
        return _torch(spec, params, optimizer, total_steps=total_steps)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(
            Problem(
                "scheduler.params", spec.params, f"{spec.type} says: {error}", "correct the value"
            )
        ) from error


def _filled(spec: SchedulerSpec, name: str, total_steps: int | None) -> Any:
    """A parameter as it was written, or what `auto` stands for."""
    if spec.params[name] != lr_schedules.AUTO:
        return spec.params[name]
    return (
        _run_length(spec, name, total_steps)
        if name in lr_schedules.RUN_LENGTH
        else lr_schedules.auto_value(name)
    )


def _run_length(spec: SchedulerSpec, name: str, total_steps: int | None) -> int:
    if total_steps is None:
        rule = f"{spec.type} needs the length of the run, and it is not known"
        remedy = (
            f"set {name} to the number of optimizer steps, or pass total_steps= to plait.initialize"
        )
        raise ConfigError(Problem(f"scheduler.params.{name}", spec.params.get(name), rule, remedy))
    return total_steps


def _torch(
    spec: SchedulerSpec, params: dict[str, Any], optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    if spec.type == "CosineAnnealingLR" and "T_max" not in params:
        params["T_max"] = _run_length(spec, "T_max", total_steps)
    if spec.type == "OneCycleLR" and not {"total_steps", "epochs"} & set(params):
        params["total_steps"] = _run_length(spec, "total_steps", total_steps)
    found = lr_schedules.TORCH[spec.type]
    build: Callable[..., LRScheduler] = found
    return build(optimizer, **params)


def _transformers(
    spec: SchedulerSpec, params: dict[str, Any], optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    """By `transformers.get_scheduler`. Steps of warm-up that are left out are 0, as in
    `TrainingArguments`.
    """
    try:
        from transformers import get_scheduler
    except ImportError as error:
        rule = "it is a schedule of Transformers, which is not installed"
        raise ConfigError(
            Problem(
                "scheduler.type", spec.type, rule, "pip install transformers, or use WarmupCosineLR"
            )
        ) from error
    accepted = lr_schedules.TRANSFORMERS[spec.type]
    length = params.pop("num_training_steps", None)
    if length is None and "num_training_steps" in accepted and "num_stable_steps" not in params:
        length = _run_length(spec, "num_training_steps", total_steps)
    warmup = params.pop("num_warmup_steps", 0)
    scheduler: LRScheduler = get_scheduler(
        spec.type,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=length,
        scheduler_specific_kwargs=params,
    )
    return scheduler


def _deepspeed(
    spec: SchedulerSpec, optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    schedule = lr_schedules.deepspeed_schedule(spec.type, spec.params)
    total = 0
    if isinstance(schedule, WarmupCosineLR | WarmupDecayLR):
        total = schedule.total_num_steps or _run_length(spec, "total_num_steps", total_steps)
        if total < schedule.warmup_num_steps:
            log.warning(
                "%s: the run has %d steps, fewer than the %d of the warm-up",
                spec.type,
                total,
                schedule.warmup_num_steps,
            )
    if isinstance(schedule, MegatronLR):
        total = schedule.total_num_steps or _run_length(spec, "total_num_steps", total_steps)
        _refuse_megatron(schedule, optimizer, total)
    bounds = _bounds(schedule, optimizer)
    momenta = (
        _momenta(schedule, optimizer, total_steps=total_steps)
        if isinstance(schedule, OneCycle)
        else None
    )

    def rates(index: int) -> list[float]:
        return [
            learning_rate(schedule, index, low=low, high=high, total_steps=total)
            for low, high in bounds
        ]

    return DeepSpeedScheduler(optimizer, rates=rates, momenta=momenta)


def _bounds(schedule: DeepSpeedSchedule, optimizer: Optimizer) -> list[tuple[float, float]]:
    """The lowest and highest rate of every parameter group."""
    own = [float(group["lr"]) for group in optimizer.param_groups]
    match schedule:
        case WarmupCosineLR() | MegatronLR():
            return [(0.0, lr) for lr in own]
        case LRRangeTest():
            lows = highs = _per_group(
                "lr_range_test_min_lr", schedule.lr_range_test_min_lr, len(own)
            )
        case OneCycle():
            lows = _per_group("cycle_min_lr", schedule.cycle_min_lr, len(own))
            highs = _per_group("cycle_max_lr", schedule.cycle_max_lr, len(own))
        case _:
            lows = _per_group("warmup_min_lr", schedule.warmup_min_lr, len(own))
            highs = (
                own
                if schedule.warmup_max_lr is None
                else _per_group("warmup_max_lr", schedule.warmup_max_lr, len(own))
            )
    return list(zip(lows, highs, strict=True))


def _refuse_megatron(schedule: MegatronLR, optimizer: Optimizer, total: int) -> None:
    """What Megatron-LM asserts. Raises ConfigError."""
    highest = min(float(group["lr"]) for group in optimizer.param_groups)
    problems = [
        Problem(
            f"scheduler.params.{name}",
            value,
            f"the optimizer's lr is {highest:g}, which is the highest rate",
            f"use at most {highest:g}",
        )
        for name, value in (("min_lr", schedule.min_lr), ("init_lr", schedule.init_lr))
        if value > highest
    ]
    if schedule.warmup_fraction is not None and schedule.warmup_num_steps:
        rule = (
            f"scheduler.params.warmup_num_steps = {schedule.warmup_num_steps:g} says the same"
            " otherwise"
        )
        problems.append(
            Problem(
                "scheduler.params.warmup_fraction",
                schedule.warmup_fraction,
                rule,
                "keep one of them",
            )
        )
    falls = schedule.wsd_decay_steps
    if schedule.decay_style == "WSD" and (
        falls is None or falls + schedule.warmup_num_steps > total
    ):
        rule = (
            f"WSD needs the steps in which the rate falls: at most {total}, less those of the"
            f" warm-up ({schedule.warmup_num_steps:g})"
        )
        problems.append(
            Problem(
                "scheduler.params.wsd_decay_steps",
                falls,
                rule,
                "set it, for example to a tenth of the steps",
            )
        )
    if schedule.warmup_num_steps >= total and schedule.decay_style != "constant":
        rule = (
            f"the decay ends at step {total}, before a warm-up of {schedule.warmup_num_steps:g}"
            " steps does"
        )
        problems.append(
            Problem(
                "scheduler.params.warmup_num_steps",
                schedule.warmup_num_steps,
                rule,
                f"use less than {total}",
            )
        )
    if problems:
        raise ConfigError(*problems)


def _per_group(name: str, value: float | tuple[float, ...], groups: int) -> list[float]:
    if not isinstance(value, tuple):
        return [value] * groups
    if len(value) != groups:
        rule = (
            f"it has {len(value)} values and the optimizer has {groups} parameter"
            f" group{'s' if groups > 1 else ''}"
        )
        raise ConfigError(
            Problem(
                f"scheduler.params.{name}",
                value,
                rule,
                "give one number for all groups, or one for each",
            )
        )
    return list(value)


def _momenta(
    schedule: OneCycle, optimizer: Optimizer, *, total_steps: int | None
) -> Callable[[int], list[float]] | None:
    """The cycle of the first of `betas`; None where it is switched off or the optimizer has none.

    A momentum that decays upwards reaches 1 some day, where Adam divides by zero. DeepSpeed lets
    it; here it is refused, when the schedule is made if the length of the run is known, else at the
    step.
    """
    has_betas = all("betas" in group for group in optimizer.param_groups)
    if schedule.cycle_momentum and not has_betas:
        rule = f"{type(optimizer).__name__} has no betas, so there is no momentum to cycle"
        raise ConfigError(
            Problem(
                "scheduler.params.cycle_momentum", True, rule, "set it to false, or leave it out"
            )
        )
    if schedule.cycle_momentum is False or not has_betas:
        return None
    groups = len(optimizer.param_groups)
    lows = _per_group("cycle_min_mom", schedule.cycle_min_mom, groups)
    highs = _per_group("cycle_max_mom", schedule.cycle_max_mom, groups)

    def momenta(index: int) -> list[float]:
        values = [
            one_cycle_momentum(schedule, index, low=low, high=high)
            for low, high in zip(lows, highs, strict=True)
        ]
        if not all(0 <= value < 1 for value in values):
            rule = f"the momentum is {max(values, key=abs):.4g} at step {index + 1}, outside 0 to 1"
            raise ConfigError(
                Problem(
                    "scheduler.params.decay_mom_rate",
                    schedule.decay_mom_rate,
                    rule,
                    "use a smaller rate, or 0",
                )
            )
        return values

    if total_steps is not None:
        momenta(total_steps - 1)
    return momenta
