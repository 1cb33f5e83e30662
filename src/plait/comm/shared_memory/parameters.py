"""Zero-copy all-gather: shards of a model in memory that all ranks of a group can read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.gathering import gather_in_place
from plait._torch.units import replace_shard_buffers, shard_buffers, sharded_modules
from plait.cluster.host_memory import trim_heap
from plait.comm.record import record
from plait.comm.shared_memory.host import SharedMemory, SharedMemoryGroup, SharedMemoryUnavailable

_TRIMMED_BYTES = 32 << 20
"""Bytes of copied shards after which the C library is told to return freed memory."""
_WRITTEN_WORD = 0
"""Index of the word with the number of gathers for which a rank has written its shards."""
_READ_WORD = 1
"""Index of the word with the number of gathers that a rank has finished reading."""


def share_parameters(model: nn.Module, host: SharedMemoryGroup) -> str:
    """Move the shards of every unit into memory that all ranks of `host` read. Collective.

    The all-gather still copies units with several dtypes, and units for which there is not enough
    memory. Call this before anything references the local tensor of a parameter.

    Args:
        model: The sharded model.
        host: Ranks of the shard group.

    Returns:
        A sentence about the units that are not shared, or an empty string if all are.
    """
    units = sharded_modules(model)
    results = [_share_unit(unit, host) for unit in units]
    reasons = [reason for reason in results if reason]
    if not reasons:
        return ""
    return (
        f"{len(reasons)} of {len(units)} units are still copied when they are gathered:"
        f" {reasons[0]}"
    )


def _share_unit(unit: FSDPModule, host: SharedMemoryGroup) -> str:
    """Share a unit. Return an empty string, or the reason why it cannot be shared."""
    numels = [shard.numel() for shard in shard_buffers(unit)]
    dtypes = {shard.dtype for shard in shard_buffers(unit)}
    if not numels:
        return ""
    if len(dtypes) > 1:
        return "a unit has several dtypes"
    try:
        memory = SharedParameters(host, numels, dtypes.pop())
    except SharedMemoryUnavailable as unavailable:
        return str(unavailable)
    _move_shards(unit, memory)
    gather_in_place(
        unit,
        memory.full_buffers,
        begin=partial(_begin_gather, unit, memory),
        finish=memory.finish,
        release=memory.release,
    )
    return ""


def _begin_gather(unit: FSDPModule, memory: SharedParameters) -> None:
    in_place = all(
        current.data_ptr() == shard.data_ptr()
        for current, shard in zip(shard_buffers(unit), memory.shards, strict=True)
    )
    if not in_place:
        # The user has replaced local tensors of parameters.
        _move_shards(unit, memory)
    memory.begin()


def _move_shards(unit: FSDPModule, memory: SharedParameters) -> None:
    """Copy the shards of a unit into shared memory, and make its parameters use the copies."""
    destinations = iter(memory.shards)
    freed_bytes = 0

    def move(shard: torch.Tensor) -> torch.Tensor:
        nonlocal freed_bytes
        # Freed memory is returned early, so that the model does not exist twice.
        if freed_bytes >= _TRIMMED_BYTES:
            trim_heap()
            freed_bytes = 0
        freed_bytes += shard.nbytes
        return next(destinations).copy_(shard)

    replace_shard_buffers(unit, move)
    trim_heap()


class SharedParameters:
    """Parameters of one unit of `fully_shard` in shared memory.

    An all-gather moves no data. Each rank marks its shards as written and waits until all ranks
    have done so. All ranks gather units in the same order, as with any collective. No rank changes
    shards that others still read: every rank contributes to the reduction of a step's gradients
    only after its last read, and an update follows this reduction. Without gradients there is no
    reduction, so all ranks wait for each other when they release the parameters.

    The constructor is collective over the host's group.

    Args:
        host: Ranks of the shard group.
        numels: Elements of each parameter's shard with padding, the same on all ranks.
        dtype: Dtype of the parameters.

    Attributes:
        full_buffers: Full tensor [ranks x numel] of each parameter.
        shards: This rank's shard [numel] of each parameter, a view of its full tensor.

    Raises:
        SharedMemoryUnavailable: There is not enough memory. All ranks raise this error.
    """

    def __init__(self, host: SharedMemoryGroup, numels: Sequence[int], dtype: torch.dtype) -> None:
        size = dtype.itemsize
        # Full tensors begin at cache lines.
        spaces = [-(-host.ranks * numel * size // 64) * 64 for numel in numels]
        *starts, total = accumulate(spaces, initial=0)
        self._host = host
        self._dtype = dtype
        self._memory = SharedMemory(host, word_count=2, data_bytes=total)
        self.full_buffers: list[torch.Tensor] = []
        self.shards: list[torch.Tensor] = []
        for start, numel in zip(starts, numels, strict=True):
            shard_start = start + host.rank * numel * size
            self.full_buffers.append(self._memory.tensor(start, host.ranks * numel, dtype))
            self.shards.append(self._memory.tensor(shard_start, numel, dtype))
        self._bytes = host.ranks * sum(numels) * size
        self._round = 0
        """Number of gathers that have begun."""

    def begin(self) -> None:
        """Announce to other ranks that this rank's shards are written."""
        self._round += 1
        self._memory.write(_WRITTEN_WORD, self._round)
        record("all_gather", full_bytes=self._bytes, dtype=self._dtype, ranks=self._host.ranks)

    def finish(self) -> None:
        """Wait until the shards of all ranks are written."""
        self._wait(_WRITTEN_WORD, "all-gather")

    def release(self) -> None:
        """Announce that this rank has finished reading, and wait until all ranks have finished."""
        self._memory.write(_READ_WORD, self._round)
        self._wait(_READ_WORD, "end of an evaluation")

    def _wait(self, word: int, operation: str) -> None:
        self._host.wait(
            partial(self._memory.behind, word, self._round),
            operation=operation,
            sequence=self._round,
        )
