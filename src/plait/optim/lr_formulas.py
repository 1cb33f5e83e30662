"""DeepSpeed's learning rate schedules as pure functions, equal to DeepSpeed 0.19.8
(`runtime/lr_schedules.py`) to the last bit.

`index` is DeepSpeed's `last_batch_iteration`: -1 when the schedule is made (used by the first
optimizer step), 0 after its first `step()`. So the first two optimizer steps of a warm-up both run
at its lowest rate. The order of operations is DeepSpeed's; do not simplify it.
"""

from __future__ import annotations

import math

from plait.config.schema.lr_schedules import (
    DeepSpeedSchedule,
    LRRangeTest,
    MegatronLR,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


def learning_rate(
    schedule: DeepSpeedSchedule, index: int, *, low: float, high: float, total_steps: int
) -> float:
    """The rate at an index. `low` and `high` are the bounds of one parameter group (see
    `plait.optim.lr_schedules`); `total_steps`, the length of the run, is only read by the two
    schedules that have `total_num_steps`.
    """
    match schedule:
        case WarmupCosineLR():
            return high * warmup_cosine_ratio(schedule, index, total_steps=total_steps)
        case WarmupDecayLR():
            return warmup_decay_lr(schedule, index, low=low, high=high, total_steps=total_steps)
        case WarmupLR():
            return warmup_lr(schedule, index, low=low, high=high)
        case OneCycle():
            return one_cycle_lr(schedule, index, low=low, high=high)
        case LRRangeTest():
            return lr_range_test(schedule, index, low=low)
        case MegatronLR():
            return megatron_lr(schedule, index + 1, high=high, total_steps=total_steps)


def megatron_lr(schedule: MegatronLR, done: int, *, high: float, total_steps: int) -> float:
    """Megatron-LM's rate (`core/optimizer_param_scheduler.py`) after `done` steps, which it counts
    in samples, to the same ratios.
    """
    warm = (
        schedule.warmup_num_steps
        if schedule.warmup_fraction is None
        else schedule.warmup_fraction * total_steps
    )
    if warm > 0 and done <= warm:
        return schedule.init_lr + (high - schedule.init_lr) * done / warm
    if schedule.decay_style == "constant":
        return high
    if done > total_steps:
        return schedule.min_lr
    if schedule.decay_style == "WSD":
        return schedule.min_lr + _wsd_share(schedule, done, total_steps) * (high - schedule.min_lr)
    if schedule.decay_style == "inverse-square-root":
        return max(schedule.min_lr, high * float(max(warm, 1)) ** 0.5 / float(max(done, 1)) ** 0.5)
    ratio = (done - warm) / (total_steps - warm)
    share = (
        1.0 - ratio if schedule.decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    )
    return schedule.min_lr + share * (high - schedule.min_lr)


def _wsd_share(schedule: MegatronLR, done: int, total_steps: int) -> float:
    """Megatron-LM's coefficient of warm-up, stable, decay."""
    decay = schedule.wsd_decay_steps or 0
    start = total_steps - decay
    if done <= start:
        return 1.0
    ratio = float(done - start) / float(decay)
    match schedule.wsd_decay_style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)


def warmup_steps(schedule: WarmupLR | WarmupCosineLR) -> int:
    """n, the steps of the warm-up: at least 2, because ln(1) is 0."""
    return max(2, schedule.warmup_num_steps)


def warmup_fraction(schedule: WarmupLR | WarmupCosineLR, index: int) -> float | None:
    """How far the warm-up has come: `log` ln(index + 1) / ln(n), `linear` index / n; 0 at index -1;
    None once it is over.
    """
    steps = warmup_steps(schedule)
    if index < 0:
        return 0.0
    if index >= steps:
        return None
    return (
        1.0 / math.log(steps) * math.log(index + 1)
        if schedule.warmup_type == "log"
        else index / steps
    )


def warmup_lr(schedule: WarmupLR, index: int, *, low: float, high: float) -> float:
    """low + (high - low) x warm-up fraction, then `high`."""
    fraction = warmup_fraction(schedule, index)
    return low + (high - low) * (1.0 if fraction is None else fraction)


def warmup_decay_lr(
    schedule: WarmupDecayLR, index: int, *, low: float, high: float, total_steps: int
) -> float:
    """As `warmup_lr`, then low + (high - low) x max(0, (total - index) / max(1, total - n))."""
    fraction = warmup_fraction(schedule, index)
    if fraction is None:
        fraction = max(
            0.0, float(total_steps - index) / float(max(1.0, total_steps - warmup_steps(schedule)))
        )
    return low + (high - low) * fraction


def warmup_cosine_ratio(schedule: WarmupCosineLR, index: int, *, total_steps: int) -> float:
    """0 at index -1; min + (1 - min) x warm-up fraction; then cos_min + (1 - cos_min) x (1 + cos(pi
    p)) / 2 with p = min(1, (index - n + 1) / max(1, total - n)).
    """
    if index < 0:
        return 0.0
    fraction = warmup_fraction(schedule, index)
    if fraction is not None:
        return schedule.warmup_min_ratio + fraction * (1.0 - schedule.warmup_min_ratio)
    steps = warmup_steps(schedule)
    progress = min(1.0, (index - steps + 1) / max(1, total_steps - steps))
    ratio = (1 + math.cos(math.pi * progress)) / 2
    return max(0.0, schedule.cos_min_ratio + (1.0 - schedule.cos_min_ratio) * ratio)


def lr_range_test(schedule: LRRangeTest, index: int, *, low: float) -> float:
    """low x (1 + step_rate x (index + 1) / step_size), the fraction rounded down for a
    staircase.
    """
    intervals = float(index + 1) / schedule.lr_range_test_step_size
    if schedule.lr_range_test_staircase:
        intervals = math.floor(intervals)
    return low * (1 + schedule.lr_range_test_step_rate * intervals)


def cycle_halves(schedule: OneCycle) -> tuple[float, float]:
    """Steps of the rising and of the falling half."""
    first = float(schedule.cycle_first_step_size)
    return first, (
        first if schedule.cycle_second_step_size is None else float(schedule.cycle_second_step_size)
    )


def cycle_height(schedule: OneCycle, index: int) -> float:
    """Height in the cycle, 0 at both ends and 1 in the middle, in stairs where they are asked for.
    For 0 <= index < first + second.
    """
    first, second = cycle_halves(schedule)
    total = first + second
    at = index + 1
    peak = first / total
    x = 1.0 + at / total - math.floor(1 + at / total)
    stairs = schedule.cycle_first_stair_count
    if x > peak and schedule.cycle_second_stair_count is not None:
        stairs = schedule.cycle_second_stair_count
    if stairs > 0:
        offset = at % total
        position = (
            offset * stairs / first if offset <= first else (total - offset) * stairs / second
        )
        return math.floor(position) / stairs
    return x / peak if x <= peak else (x - 1) / (peak - 1)


def one_cycle_lr(schedule: OneCycle, index: int, *, low: float, high: float) -> float:
    """low + (high - low) x height in the cycle; after it low / (1 + decay_lr_rate x intervals)."""
    total = sum(cycle_halves(schedule))
    if index < 0:
        return low
    if index < total:
        return low + (high - low) * cycle_height(schedule, index)
    if schedule.decay_step_size == 0:
        return low
    return low / (1 + schedule.decay_lr_rate * ((index - total + 1) / schedule.decay_step_size))


def one_cycle_momentum(schedule: OneCycle, index: int, *, low: float, high: float) -> float:
    """high - (high - low) x height in the cycle; after it high x (1 + decay_mom_rate x intervals).
    At index -1 it is `low`, not `high`: DeepSpeed's first step has the momentum of the middle of
    the cycle.
    """
    total = sum(cycle_halves(schedule))
    if index < 0:
        return low
    if index < total:
        return high - (high - low) * cycle_height(schedule, index)
    if schedule.decay_step_size == 0:
        return high
    return high * (1 + schedule.decay_mom_rate * ((index - total + 1) / schedule.decay_step_size))
