"""Patched behaviour of `fully_shard`: how a unit is gathered.

`unshard`, `wait_for_unshard` and `reshard` of its groups are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from plait._torch.units import parameter_groups

Moment = tuple[str, bool]
"""Phase in which a unit is gathered, and whether this is the last micro-batch of a step.

The phase is "forward", "evaluation" (a forward without gradients) or "backward".
"""


def on_shard_reads(
    module: FSDPModule, before: Callable[[Moment], None], after: Callable[[], None]
) -> None:
    """Call functions around every read of a unit's shards.

    A gather reads no shards if the unit is unsharded already, or if it gathers those of a
    secondary partition.

    Args:
        module: A fully sharded unit.
        before: Called when a gather is about to read the shards.
        after: Called when the gather has read them.
    """
    for group in parameter_groups(module):
        _watch_reads(group, before, after)


def _watch_reads(group: Any, before: Callable[[Moment], None], after: Callable[[], None]) -> None:
    unshard = group.unshard
    wait_for_unshard = group.wait_for_unshard
    # A single rank does not communicate. `wait_for_unshard` copies its shards.
    copies_in_wait = group._all_gather_process_group.size() == 1

    def watched_unshard(async_op: bool = False) -> None:
        if group._all_gather_result is not None or group._sharded_state is not ShardedState.SHARDED:
            unshard(async_op)
            return

        if group._training_state is TrainingState.PRE_BACKWARD:
            phase = "backward"
        elif torch.is_grad_enabled():
            phase = "forward"
        else:
            phase = "evaluation"
        before((phase, bool(group.all_reduce_grads)))
        unshard(async_op)
        if not copies_in_wait:
            after()

    def watched_wait() -> None:
        reads_shards = copies_in_wait and group._all_gather_result is not None
        wait_for_unshard()
        if reads_shards:
            after()

    group.unshard = watched_unshard
    group.wait_for_unshard = watched_wait


def _free_nothing() -> None:
    """Do nothing: replacement for `free_unsharded_param` of parameters in shared memory."""


def gather_in_place(
    module: FSDPModule,
    full_buffers: Sequence[torch.Tensor],
    begin: Callable[[], None],
    finish: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """Make a unit read its gathered parameters from buffers that all ranks share.

    The unit must compute in the dtype of its shards, because nothing is cast or copied.

    Args:
        module: A fully sharded unit.
        full_buffers: One buffer per parameter, with the padded shards of all ranks in the order of
            the ranks. This rank's shards are views of it (`replace_shard_buffers`).
        begin: Called when a gather starts.
        finish: Called when a gather is waited for.
        release: Called after a reshard outside of training.
    """
    group = parameter_groups(module)[0]
    for p, buffer in zip(group.fsdp_params, full_buffers, strict=True):
        p.all_gather_outputs = [buffer]
        # The buffers outlive the unit's gathers and are not allocated by torch.
        p.free_unsharded_param = _free_nothing
    reshard = group.reshard
    started_gather = SimpleNamespace(all_gather_event=None, all_gather_work=None)

    def unshard(async_op: bool = False) -> None:
        in_backward = group._training_state is TrainingState.PRE_BACKWARD
        if in_backward and not group.unshard_in_backward:
            # torch prefetches an embedding like any other unit, but its backward reads no weight.
            return
        if group._all_gather_result is None and not group.is_unsharded:
            begin()
            group._all_gather_result = started_gather

    def wait_for_unshard() -> None:
        if group._all_gather_result is None:
            return
        group._all_gather_result = None
        finish()
        for p in group.fsdp_params:
            p.init_unsharded_param()
        group._to_unsharded()

    def reshard_and_release() -> None:
        state = group._training_state
        was_gathered = group.is_unsharded
        in_training_forward = state is TrainingState.FORWARD and torch.is_grad_enabled()
        in_training = state is TrainingState.POST_BACKWARD or in_training_forward
        reshard()
        if was_gathered and group.is_sharded and not in_training:
            release()

    group.unshard = unshard
    group.wait_for_unshard = wait_for_unshard
    group.reshard = reshard_and_release
