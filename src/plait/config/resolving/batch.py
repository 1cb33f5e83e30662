"""The three batch sizes of a file.

train_batch_size = micro-batch size x accumulation steps x data-parallel processes, so that any two
of the sizes determine the third.
"""

from __future__ import annotations

from typing import NoReturn

from plait.errors import ConfigError, Problem
from plait.policy import Policy

TRAIN_KEY = "train_batch_size"
MICRO_KEY = "train_micro_batch_size_per_gpu"
CALLER_SOURCE = "the caller's"
"""Source of a micro-batch size that the file does not contain."""
ACCUMULATION_KEY = "gradient_accumulation_steps"


class Batch(Policy):
    """Batch sizes of a run."""

    train_batch_size: int
    """Samples per optimizer step, over all processes."""
    micro_batch_size: int
    """Samples in one forward and backward pass of one data-parallel process."""
    accumulation: int
    """Forward and backward passes per optimizer step."""


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, dp: int) -> Batch:
    """Return the batch sizes that satisfy `train` = `micro` x `accumulation` x `dp`.

    If only one of `train` and `micro` is given, `accumulation` is 1, as in DeepSpeed.

    Args:
        train: Samples per optimizer step, or None.
        micro: Samples per micro-batch, or None.
        accumulation: Micro-batches per optimizer step, or None.
        dp: Number of data-parallel processes.

    Raises:
        ConfigError: No integers satisfy the equation. DeepSpeed would round down and fail in an
            assertion; the error names the numbers and the nearest values that are possible.
    """
    if train is None:
        if micro is None:
            rule = f"neither it nor {TRAIN_KEY} is given, and no batch size follows from the rest"
            raise ConfigError(Problem(MICRO_KEY, None, rule, f"give one of the two (dp is {dp})"))
        accumulation = accumulation or 1
        return Batch(
            train_batch_size=micro * accumulation * dp,
            micro_batch_size=micro,
            accumulation=accumulation,
        )

    if micro is not None and accumulation is not None:
        if train != micro * accumulation * dp:
            _raise_contradiction(train, micro, accumulation, dp)
    elif micro is not None:
        accumulation = _divide(train, micro * dp, f"micro {micro} x dp {dp}")
    else:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation * dp, f"accumulation {accumulation} x dp {dp}")
    return Batch(train_batch_size=train, micro_batch_size=micro, accumulation=accumulation)


def _divide(train: int, divisor: int, product: str) -> int:
    """Return `train` / `divisor`. `product` describes the divisor in the error."""
    if train % divisor == 0:
        return train // divisor
    # DeepSpeed rounds down, and then fails in an assertion.
    rule = f"{product} = {divisor} and {train} % {divisor} = {train % divisor}"
    below = train // divisor * divisor
    possible = f"{below} or {below + divisor}" if below else f"{divisor}"
    raise ConfigError(Problem(TRAIN_KEY, train, rule, f"use {possible}, or change a factor"))


def _raise_contradiction(train: int, micro: int, accumulation: int, dp: int) -> NoReturn:
    product = micro * accumulation * dp
    remedies = [f"{TRAIN_KEY} {product}"]
    if train % (micro * dp) == 0:
        remedies.append(f"{ACCUMULATION_KEY} {train // (micro * dp)}")
    if train % (accumulation * dp) == 0:
        remedies.append(f"{MICRO_KEY} {train // (accumulation * dp)}")
    rule = (
        f"{MICRO_KEY} {micro} x {ACCUMULATION_KEY} {accumulation} x dp {dp} = {product}, not"
        f" {train}"
    )
    remedy = f"set {', or '.join(remedies)}, or leave one of the three out"
    raise ConfigError(Problem(TRAIN_KEY, train, rule, remedy))
