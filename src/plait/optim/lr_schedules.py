"""LR schedulers that are built from a SchedulerSpec: DeepSpeed's, torch's and Transformers'.

All of them are torch `LRScheduler`s. The caller calls `step()` once after every optimizer step that
was not skipped. The call sets the rate of the next optimizer step. The rate of the first step is
set when the schedule is created.
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
from plait.errors import CheckpointError, ConfigError, Problem, raise_problems
from plait.names import number_of
from plait.optim.lr_formulas import learning_rate, one_cycle_momentum

log = logging.getLogger(__name__)

BETA2 = 0.99
"""Second element of `betas` while DeepSpeed's OneCycle cycles the first."""


def build_scheduler(
    spec: SchedulerSpec, optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    """Build the schedule of a configuration, and set the rates of the first step.

    Args:
        spec: Specification of the schedule.
        optimizer: The optimizer, whose groups are changed.
        total_steps: Length of the run in optimizer steps, for schedules that do not specify it.

    Raises:
        ConfigError: `total_steps` is None although it is required, or a value does not fit the
            schedule or the optimizer.
    """
    if spec.type in lr_schedules.DEEPSPEED:
        return _build_deepspeed(spec, optimizer, total_steps=total_steps)
    params = {name: _parameter_value(spec, name, total_steps) for name in spec.params}
    try:
        if spec.type in lr_schedules.TRANSFORMERS:
            return _build_transformers(spec, params, optimizer, total_steps=total_steps)
        return _build_torch(spec, params, optimizer, total_steps=total_steps)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(
            Problem(
                "scheduler.params", spec.params, f"{spec.type} says: {error}", "correct the value"
            )
        ) from error


def _parameter_value(spec: SchedulerSpec, name: str, total_steps: int | None) -> Any:
    """Return the value of a specification's parameter, or the value that replaces `auto`."""
    if spec.params[name] != lr_schedules.AUTO:
        return spec.params[name]
    if name in lr_schedules.RUN_LENGTH:
        return _run_length(spec, name, total_steps)
    return lr_schedules.auto_value(name)


def _run_length(spec: SchedulerSpec, name: str, total_steps: int | None) -> int:
    if total_steps is None:
        raise ConfigError(
            Problem(
                f"scheduler.params.{name}",
                spec.params.get(name),
                f"{spec.type} needs the length of the run, but it is not known",
                f"set {name} to the number of optimizer steps, or pass total_steps= to"
                " plait.initialize",
            )
        )
    return total_steps


def _build_torch(
    spec: SchedulerSpec, params: dict[str, Any], optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    if spec.type == "CosineAnnealingLR" and "T_max" not in params:
        params["T_max"] = _run_length(spec, "T_max", total_steps)
    if spec.type == "OneCycleLR" and not {"total_steps", "epochs"} & set(params):
        params["total_steps"] = _run_length(spec, "total_steps", total_steps)
    # The constructors have different arguments, so a value that does not fit is a TypeError.
    build: Callable[..., LRScheduler] = lr_schedules.TORCH[spec.type]
    return build(optimizer, **params)


def _build_transformers(
    spec: SchedulerSpec, params: dict[str, Any], optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    """Build a schedule with `transformers.get_scheduler`.

    The default number of warm-up steps is 0, as in `TrainingArguments`.
    """
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise ConfigError(
            Problem(
                "scheduler.type",
                spec.type,
                "it is a schedule of Transformers, which is not installed",
                "pip install transformers, or use WarmupCosineLR",
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


def _build_deepspeed(
    spec: SchedulerSpec, optimizer: Optimizer, *, total_steps: int | None
) -> LRScheduler:
    schedule = lr_schedules.deepspeed_schedule(spec.type, spec.params)
    total = 0  # For schedules without a length.
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
    momenta = None
    if isinstance(schedule, OneCycle):
        momenta = _momenta(schedule, optimizer, total_steps=total_steps)

    def rates(index: int) -> list[float]:
        return [
            learning_rate(schedule, index, low=low, high=high, total_steps=total)
            for low, high in bounds
        ]

    return DeepSpeedScheduler(optimizer, rates=rates, momenta=momenta)


def _bounds(schedule: DeepSpeedSchedule, optimizer: Optimizer) -> list[tuple[float, float]]:
    """Return the lowest and highest rate of every parameter group."""
    optimizer_rates = [float(group["lr"]) for group in optimizer.param_groups]
    groups = len(optimizer_rates)
    match schedule:
        case WarmupCosineLR() | MegatronLR():
            return [(0.0, lr) for lr in optimizer_rates]
        case LRRangeTest():
            lows = _per_group("lr_range_test_min_lr", schedule.lr_range_test_min_lr, groups)
            highs = lows
        case OneCycle():
            lows = _per_group("cycle_min_lr", schedule.cycle_min_lr, groups)
            highs = _per_group("cycle_max_lr", schedule.cycle_max_lr, groups)
        case _:
            lows = _per_group("warmup_min_lr", schedule.warmup_min_lr, groups)
            highs = optimizer_rates
            if schedule.warmup_max_lr is not None:
                highs = _per_group("warmup_max_lr", schedule.warmup_max_lr, groups)
    return list(zip(lows, highs, strict=True))


def _refuse_megatron(schedule: MegatronLR, optimizer: Optimizer, total: int) -> None:
    """Raise ConfigError for settings that Megatron-LM's assertions refuse."""
    highest = min(float(group["lr"]) for group in optimizer.param_groups)
    problems = []

    def add(name: str, value: Any, rule: str, remedy: str) -> None:
        problems.append(Problem(f"scheduler.params.{name}", value, rule, remedy))

    for name, value in (("min_lr", schedule.min_lr), ("init_lr", schedule.init_lr)):
        if value > highest:
            rule = f"the optimizer's lr is {highest}, which is the highest rate"
            add(name, value, rule, f"use at most {highest}")

    warmup = schedule.warmup_num_steps
    if schedule.warmup_fraction is not None and warmup:
        rule = f"scheduler.params.warmup_num_steps = {warmup:g} sets the same length"
        add("warmup_fraction", schedule.warmup_fraction, rule, "keep one of them")

    decay = schedule.wsd_decay_steps
    if schedule.decay_style == "WSD" and (decay is None or decay + warmup > total):
        rule = (
            f"WSD needs the steps in which the rate falls: at most {total}, less those of the"
            f" warm-up ({warmup:g})"
        )
        add("wsd_decay_steps", decay, rule, "set it, for example to a tenth of the steps")

    if warmup >= total and schedule.decay_style != "constant":
        rule = f"the decay ends at step {total}, before a warm-up of {warmup:g} steps does"
        add("warmup_num_steps", warmup, rule, f"use less than {total}")
    raise_problems(problems)


def _per_group(name: str, value: float | tuple[float, ...], groups: int) -> list[float]:
    if not isinstance(value, tuple):
        return [value] * groups
    if len(value) != groups:
        rule = (
            f"it has {len(value)} values and the optimizer has"
            f" {number_of(groups, 'parameter group')}"
        )
        remedy = "use one number for all groups, or one for each"
        raise ConfigError(Problem(f"scheduler.params.{name}", value, rule, remedy))
    return list(value)


def _momenta(
    schedule: OneCycle, optimizer: Optimizer, *, total_steps: int | None
) -> Callable[[int], list[float]] | None:
    """Return a function from DeepSpeed's step index to the first beta of every parameter group.

    With a positive `decay_mom_rate`, the momentum grows after the cycle. Once it reaches 1, Adam
    divides by zero. DeepSpeed permits this. Plait raises ConfigError, either when the schedule is
    created (if the length of the run is known) or at the step at which the momentum reaches 1.

    Returns:
        The function, or None if momentum is not cycled or the optimizer has no betas.
    """
    has_betas = all("betas" in group for group in optimizer.param_groups)
    if schedule.cycle_momentum and not has_betas:
        raise ConfigError(
            Problem(
                "scheduler.params.cycle_momentum",
                True,
                f"{type(optimizer).__name__} has no betas, so there is no momentum to cycle",
                "set it to false, or leave it out",
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
            raise ConfigError(
                Problem(
                    "scheduler.params.decay_mom_rate",
                    schedule.decay_mom_rate,
                    f"the momentum is {max(values, key=abs):.4g} at step {index + 1}, outside 0"
                    " to 1",
                    "use a smaller rate, or 0",
                )
            )
        return values

    if total_steps is not None:
        momenta(total_steps - 1)
    return momenta


class Scheduler(Protocol):
    """Interface of LR schedulers, which torch's and Plait's implement."""

    def step(self) -> Any: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class ScheduleSource:
    """Specification in a configuration from which a schedule was built.

    Attributes:
        spec: The specification.
        total_steps: Length of the run in optimizer steps, if it is known.
    """

    spec: SchedulerSpec
    total_steps: int | None

    @property
    def facts(self) -> Any:
        """Description that a checkpoint stores. It is equal for schedules with the same rates."""
        return exact.encode(
            {"spec": self.spec.model_dump(), "total_steps": self.total_steps}, "scheduler"
        )


class DeepSpeedScheduler(LRScheduler):
    """LR schedule of DeepSpeed on an optimizer.

    Its state is only the position, so a changed schedule takes effect on resume.

    Args:
        optimizer: The optimizer.
        rates: Maps DeepSpeed's index, which is torch's `last_epoch` less 1, to the learning rate of
            every parameter group.
        momenta: Maps the index to the momentum of every parameter group, if momentum is cycled.
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
        # The base class calls step() once, which sets the values of index -1.
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the current learning rate of every group."""
        return list(self._rates(self.last_epoch - 1))

    def step(self, epoch: int | None = None) -> None:
        """Set the values for the next optimizer step."""
        super().step(epoch)
        self._set_momenta()

    def _set_momenta(self) -> None:
        if self._momenta is None:
            return
        momenta = self._momenta(self.last_epoch - 1)
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, BETA2)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as one plain number."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position, and set the optimizer's values for that position.

        Raises:
            CheckpointError: The state has no position.
        """
        position = state_dict.get("last_epoch")
        if not isinstance(position, int):
            raise CheckpointError(
                "the saved schedule has no `last_epoch` (it has"
                f" {', '.join(map(str, state_dict)) or 'nothing'}); load another checkpoint"
            )
        # torch's own method would restore all attributes, also those of a changed schedule.
        self.last_epoch = position
        self._step_count = position + 1
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            # A compiled or capturable optimizer reads the rate from its tensor.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
        self._set_momenta()
