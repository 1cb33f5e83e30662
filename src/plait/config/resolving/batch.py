"""The three batch sizes: samples of a step = micro batch x accumulation x data-parallel processes.
Any two give the third.
"""

from __future__ import annotations

from typing import NoReturn

from plait.errors import ConfigError, Problem
from plait.policy import Policy

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
CALLERS = "the caller's"
"""Source of a micro-batch size that the file does not give."""
ACCUMULATION = "gradient_accumulation_steps"


class Batch(Policy):
    """How many samples, where."""

    train_batch_size: int
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: int
    """Samples in one forward and backward pass of one data-parallel process."""
    accumulation: int
    """Forward and backward passes in an optimizer step."""


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, dp: int) -> Batch:
    """What is missing of `train` = `micro` x `accumulation` x `dp`. None is not given; all are at
    least 1.

    With one of train and micro given, the accumulation is 1, as in DeepSpeed. Where DeepSpeed
    rounds down and then asserts, this raises ConfigError with the numbers and the nearest that
    work.
    """
    if train is None:
        if micro is None:
            rule = f"neither it nor {TRAIN} is given, and no batch size follows from the rest"
            raise ConfigError(Problem(MICRO, None, rule, f"give one of the two (dp is {dp})"))
        accumulation = accumulation or 1
        return Batch(
            train_batch_size=micro * accumulation * dp,
            micro_batch_size=micro,
            accumulation=accumulation,
        )
    if micro is not None and accumulation is not None:
        if train != micro * accumulation * dp:
            _contradiction(train, micro, accumulation, dp)
    elif micro is not None:
        accumulation = _quotient(train, f"micro {micro} x dp {dp}", micro * dp)
    else:
        accumulation = accumulation or 1
        micro = _quotient(train, f"accumulation {accumulation} x dp {dp}", accumulation * dp)
    return Batch(train_batch_size=train, micro_batch_size=micro, accumulation=accumulation)


def _quotient(train: int, named: str, unit: int) -> int:
    if train % unit:
        below = train // unit * unit
        working = f"{below} or {below + unit}" if below else f"{unit}"
        rule = f"{named} = {unit} and {train} % {unit} = {train % unit}"
        raise ConfigError(Problem(TRAIN, train, rule, f"use {working}, or change a factor"))
    return train // unit


def _contradiction(train: int, micro: int, accumulation: int, dp: int) -> NoReturn:
    product = micro * accumulation * dp
    ways = [f"{TRAIN} {product}"]
    if train % (micro * dp) == 0:
        ways.append(f"{ACCUMULATION} {train // (micro * dp)}")
    if train % (accumulation * dp) == 0:
        ways.append(f"{MICRO} {train // (accumulation * dp)}")
    rule = f"{MICRO} {micro} x {ACCUMULATION} {accumulation} x dp {dp} = {product}, not {train}"
    raise ConfigError(
        Problem(TRAIN, train, rule, f"set {', or '.join(ways)}, or leave one of the three out")
    )
