"""Patched behaviour of `fully_shard`: how a unit is gathered. `unshard`, `wait_for_unshard` and
`reshard` of its groups are replaced.
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
"""When a unit is gathered: "forward", "evaluation" (without gradients) or "backward"; and whether
in the last micro-batch of a step.
"""


def on_shard_reads(
    module: FSDPModule, before: Callable[[Moment], None], after: Callable[[], None]
) -> None:
    """Call `before` when a gather of this unit is about to read its shards, and `after` when it has
    read them. A gather of a unit that is already unsharded, or from other shards (those of a
    secondary partition), reads none.
    """
    for group in parameter_groups(module):
        _watch_reads(group, before, after)


def _watch_reads(group: Any, before: Callable[[Moment], None], after: Callable[[], None]) -> None:
    unshard = group.unshard
    wait_for_unshard = group.wait_for_unshard
    alone = group._all_gather_process_group.size() == 1  # then the copy is made by the wait

    def watched_unshard(async_op: bool = False) -> None:
        if group._all_gather_result is not None or group._sharded_state is not ShardedState.SHARDED:
            unshard(async_op)
            return
        forward = "forward" if torch.is_grad_enabled() else "evaluation"
        when = "backward" if group._training_state is TrainingState.PRE_BACKWARD else forward
        before((when, bool(group.all_reduce_grads)))
        unshard(async_op)
        if not alone:
            after()

    def watched_wait() -> None:
        reads = alone and group._all_gather_result is not None
        wait_for_unshard()
        if reads:
            after()

    group.unshard = watched_unshard
    group.wait_for_unshard = watched_wait


def gather_in_place(
    module: FSDPModule,
    wholes: Sequence[torch.Tensor],
    begin: Callable[[], None],
    finish: Callable[[], None],
    release: Callable[[], None],
) -> None:
    """Make gathering a unit mean to read its parameters where they are: `wholes`, one [ranks x
    padded shard] a parameter, of which this rank's shards are a part already
    (`replace_shard_buffers`). For units that are computed in the dtype of their shards.

    `begin` is called when a gather starts, `finish` when it is waited for, `release` after a
    reshard outside of training.
    """
    group = parameter_groups(module)[0]
    for p, whole in zip(group.fsdp_params, wholes, strict=True):
        p.all_gather_outputs = [whole]
        p.free_unsharded_param = lambda: None  # nothing was allocated for it
    reshard = group.reshard
    began = SimpleNamespace(all_gather_event=None, all_gather_work=None)

    def unshard(async_op: bool = False) -> None:
        in_backward = group._training_state is TrainingState.PRE_BACKWARD
        if in_backward and not group.unshard_in_backward:
            return  # an embedding, which torch prefetches like any other unit
        if group._all_gather_result is None and not group.is_unsharded:
            begin()
            group._all_gather_result = began

    def wait_for_unshard() -> None:
        if group._all_gather_result is not None:
            group._all_gather_result = None
            finish()
            for p in group.fsdp_params:
                p.init_unsharded_param()
            group._to_unsharded()

    def reshard_and_release() -> None:
        state = group._training_state
        gathered = group.is_unsharded
        trains = state is TrainingState.POST_BACKWARD or (
            state is TrainingState.FORWARD and torch.is_grad_enabled()
        )
        reshard()
        if gathered and group.is_sharded and not trains:
            release()

    group.unshard = unshard
    group.wait_for_unshard = wait_for_unshard
    group.reshard = reshard_and_release
