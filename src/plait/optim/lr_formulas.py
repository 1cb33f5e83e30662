"""DeepSpeed's LR schedules as pure functions.

They are bitwise equal to DeepSpeed 0.19.8 (`runtime/lr_schedules.py`).

Note [Index and order of operations]
    `index` is DeepSpeed's `last_batch_iteration`: -1 when the schedule is created (for the first
    optimizer step), and 0 after its first `step()`. The first two optimizer steps of a warm-up
    therefore both run at its lowest rate. The order of operations is DeepSpeed's, because any other
    order would round differently.
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
    """Return the learning rate at an index.

    Args:
        schedule: Parameters of the schedule.
        index: See Note [Index and order of operations].
        low: Lowest rate of the parameter group.
        high: Highest rate of the parameter group.
        total_steps: Length of the run. Only schedules with `total_num_steps` use it.
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
    """Return the learning rate that Megatron-LM computes (`core/optimizer_param_scheduler.py`).

    Megatron-LM gives lengths in samples, Plait in steps. The ratios of lengths are the same.

    Args:
        schedule: Parameters of the schedule.
        done: Number of steps so far.
        high: Highest rate.
        total_steps: Length of the run.
    """
    warm: float = schedule.warmup_num_steps
    if schedule.warmup_fraction is not None:
        warm = schedule.warmup_fraction * total_steps
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
    if schedule.decay_style == "linear":
        share = 1.0 - ratio
    else:
        share = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return schedule.min_lr + share * (high - schedule.min_lr)


def _wsd_share(schedule: MegatronLR, done: int, total_steps: int) -> float:
    """Return Megatron-LM's coefficient of the warmup-stable-decay schedule."""
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
    """Return n, the number of warm-up steps: at least 2, because ln(1) is 0."""
    return max(2, schedule.warmup_num_steps)


def warmup_fraction(schedule: WarmupLR | WarmupCosineLR, index: int) -> float | None:
    """Return the progress of the warm-up, or None after its end.

    It is ln(index + 1) / ln(n) for `log`, index / n for `linear`, and 0 at index -1.
    """
    steps = warmup_steps(schedule)
    if index < 0:
        return 0.0
    if index >= steps:
        return None
    if schedule.warmup_type == "log":
        return 1.0 / math.log(steps) * math.log(index + 1)
    return index / steps


def warmup_lr(schedule: WarmupLR, index: int, *, low: float, high: float) -> float:
    """Return low + (high - low) x warm-up fraction, and `high` after the warm-up."""
    fraction = warmup_fraction(schedule, index)
    if fraction is None:
        fraction = 1.0
    return low + (high - low) * fraction


def warmup_decay_lr(
    schedule: WarmupDecayLR, index: int, *, low: float, high: float, total_steps: int
) -> float:
    """Return the rate of a warm-up followed by a linear decay.

    The warm-up is that of `warmup_lr` and has n steps. After it the rate is
    low + (high - low) x max(0, (total - index) / max(1, total - n)).
    """
    fraction = warmup_fraction(schedule, index)
    if fraction is None:
        decay_steps = max(1.0, total_steps - warmup_steps(schedule))
        fraction = max(0.0, float(total_steps - index) / float(decay_steps))
    return low + (high - low) * fraction


def warmup_cosine_ratio(schedule: WarmupCosineLR, index: int, *, total_steps: int) -> float:
    """Return the rate of a warm-up and cosine decay, as a fraction of the highest rate.

    It is 0 at index -1, and min + (1 - min) x warm-up fraction during the warm-up. After the
    warm-up of n steps it is cos_min + (1 - cos_min) x (1 + cos(pi p)) / 2 with
    p = min(1, (index - n + 1) / max(1, total - n)). Here min is `warmup_min_ratio`, and cos_min is
    `cos_min_ratio`.
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
    """Return low x (1 + step_rate x (index + 1) / step_size).

    For a staircase, (index + 1) / step_size is rounded down.
    """
    intervals = float(index + 1) / schedule.lr_range_test_step_size
    if schedule.lr_range_test_staircase:
        intervals = math.floor(intervals)
    return low * (1 + schedule.lr_range_test_step_rate * intervals)


def cycle_halves(schedule: OneCycle) -> tuple[float, float]:
    """Return the numbers of steps in the two halves of a cycle: (rising, falling)."""
    first = float(schedule.cycle_first_step_size)
    if schedule.cycle_second_step_size is None:
        return first, first
    return first, float(schedule.cycle_second_step_size)


def cycle_height(schedule: OneCycle, index: int) -> float:
    """Return the height in the cycle: 0 at both ends and 1 in the middle.

    With stair counts, the height is rounded down to a stair.

    Args:
        schedule: Parameters of the schedule.
        index: Index from 0 to first + second - 1, where `cycle_halves` returns (first, second).
    """
    first, second = cycle_halves(schedule)
    total = first + second
    step = index + 1
    peak = first / total
    x = 1.0 + step / total - math.floor(1 + step / total)
    stairs = schedule.cycle_first_stair_count
    if x > peak and schedule.cycle_second_stair_count is not None:
        stairs = schedule.cycle_second_stair_count

    if stairs > 0:
        offset = step % total
        if offset <= first:
            position = offset * stairs / first
        else:
            position = (total - offset) * stairs / second
        return math.floor(position) / stairs
    if x <= peak:
        return x / peak
    return (x - 1) / (peak - 1)


def one_cycle_lr(schedule: OneCycle, index: int, *, low: float, high: float) -> float:
    """Return low + (high - low) x height in the cycle.

    After the cycle the rate is low / (1 + decay_lr_rate x intervals). Here intervals is the number
    of steps since the cycle, divided by `decay_step_size`. If `decay_step_size` is 0, the rate
    after the cycle is `low`.
    """
    total = sum(cycle_halves(schedule))
    if index < 0:
        return low
    if index < total:
        return low + (high - low) * cycle_height(schedule, index)
    if schedule.decay_step_size == 0:
        return low
    return low / (1 + schedule.decay_lr_rate * ((index - total + 1) / schedule.decay_step_size))


def one_cycle_momentum(schedule: OneCycle, index: int, *, low: float, high: float) -> float:
    """Return high - (high - low) x height in the cycle.

    After the cycle it is high x (1 + decay_mom_rate x intervals), with the intervals of
    `one_cycle_lr`. At index -1 it is `low`, not `high`: DeepSpeed's first step has the momentum of
    the middle of the cycle.
    """
    total = sum(cycle_halves(schedule))
    if index < 0:
        return low
    if index < total:
        return high - (high - low) * cycle_height(schedule, index)
    if schedule.decay_step_size == 0:
        return high
    return high * (1 + schedule.decay_mom_rate * ((index - total + 1) / schedule.decay_step_size))
