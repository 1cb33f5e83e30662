"""Rule for what a ZeRO stage reduces and frees after a backward.

The run, the account of bytes and the prediction of the peak memory share it.

Without a pipeline a rank has one stage, whose micro-batches are the accumulation steps, and each
unit ends its step with the last of them. In a pipeline the stages of a rank end their steps at
different times, and the root unit (all outside of the blocks) belongs to several of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class AfterBackward(NamedTuple):
    """Actions after a backward on one unit of `fully_shard`, which gathers and reduces as one."""

    reduce: bool
    """True if its gradients are reduced over dp_shard."""
    last: bool
    """True if its gradients are complete, so that they are also summed over dp_replicate."""
    free: bool
    """True if its gathered parameters are freed."""


def after_block_backward(
    zero: int, left: Mapping[int, int], *, ran: int, own: int
) -> AfterBackward:
    """Return the actions on a block after a backward.

    Args:
        zero: The ZeRO stage.
        left: Backwards that each pipeline stage of the rank has to run in this step, this one
            included.
        ran: The pipeline stage that ran.
        own: The pipeline stage of the block.
    """
    # Backwards of other stages of the rank do not touch the block.
    if own != ran:
        return AfterBackward(False, False, False)
    last = left[own] == 1
    return AfterBackward(zero >= 2 or last, last, zero == 3 or last)


def after_root_backward(
    zero: int, left: Mapping[int, int], *, ran: int, users: Collection[int]
) -> AfterBackward:
    """Return the actions on the root unit after a backward.

    Args:
        zero: The ZeRO stage.
        left: Backwards that each pipeline stage of the rank has to run in this step, this one
            included.
        ran: The pipeline stage that ran. Every stage gathers the root unit.
        users: The pipeline stages of the rank that compute gradients of it.
    """
    # Its gradients are complete after the last backward of the stages that use it. It is freed
    # after the last backward of any stage, because all of them gather it.
    last = ran in users and sum(left[stage] for stage in users) == 1
    return AfterBackward(
        ran in users and (zero >= 2 or last), last, zero == 3 or sum(left.values()) == 1
    )
