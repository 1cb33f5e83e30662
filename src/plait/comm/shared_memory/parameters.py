"""Zero-copy all-gather: the shards of a model lie in memory that all ranks of the machine read."""

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
from plait.comm.shared_memory.host import Host, Memory, Unavailable

_TRIMMED_BYTES = 32 << 20
"""Bytes of copied shards after which the C library is told to return freed memory to the system."""
_WRITTEN = 0
_READ = 1
"""Words of a rank: the number of gatherings for which it has written its rows, and the number that
it has finished reading."""


def share_parameters(model: nn.Module, host: Host) -> str:
    """Put the shards of every unit into memory that all ranks of `host` read. Collective.

    A unit for which memory is short, or with several dtypes, is copied when it is gathered, as
    without this call. Call it before anything keeps a reference to the local tensor of a parameter.

    Returns:
        A description of the units that are not shared. It is empty if there are none.
    """
    units = sharded_modules(model)
    reasons = [_share_unit(unit, host) for unit in units]
    gathered = [reason for reason in reasons if reason]
    return (
        f"{len(gathered)} of {len(units)} units are gathered all the same: {gathered[0]}"
        if gathered
        else ""
    )


def _share_unit(unit: FSDPModule, host: Host) -> str:
    """Share a unit. Return the reason if it cannot be shared, else an empty string."""
    numels = [shard.numel() for shard in shard_buffers(unit)]
    dtypes = {shard.dtype for shard in shard_buffers(unit)}
    if not numels:
        return ""
    if len(dtypes) > 1:
        return "a unit has several dtypes"
    try:
        memory = SharedParameters(host, numels, dtypes.pop())
    except Unavailable as unavailable:
        return str(unavailable)
    _place(unit, memory)
    gather_in_place(
        unit,
        memory.wholes,
        begin=partial(_begin, unit, memory),
        finish=memory.finish,
        release=memory.release,
    )
    return ""


def _begin(unit: FSDPModule, memory: SharedParameters) -> None:
    if any(
        shard.data_ptr() != row.data_ptr()
        for shard, row in zip(shard_buffers(unit), memory.rows, strict=True)
    ):
        _place(unit, memory)  # the user has replaced local tensors of parameters
    memory.begin()


def _place(unit: FSDPModule, memory: SharedParameters) -> None:
    rows = iter(memory.rows)
    freed = 0

    def place(shard: torch.Tensor) -> torch.Tensor:
        nonlocal freed
        if freed >= _TRIMMED_BYTES:
            trim_heap()
            freed = 0
        freed += shard.nbytes
        return next(rows).copy_(shard)

    replace_shard_buffers(unit, place)
    trim_heap()


class SharedParameters:
    """Parameters of one unit of `fully_shard` in shared memory. A rank's shard is a range of rows.

    An all-gather moves nothing. A rank marks its rows as written and waits for the others. Every
    rank gathers units in the same order, as with any collective. No rank changes rows that others
    still read: an update follows the reduction of a step's gradients, to which every rank
    contributes after its last read. Parameters that were gathered for a pass without gradients are
    released by all ranks together.
    """

    def __init__(self, host: Host, numels: Sequence[int], dtype: torch.dtype) -> None:
        """Allocate the memory. Collective over the host's group.

        Args:
            host: The ranks.
            numels: Elements of each parameter's shard with padding, the same on all ranks.
            dtype: Dtype of the parameters.

        Raises:
            Unavailable: Memory is short. Raised on all ranks.
        """
        size = dtype.itemsize
        spaces = [-(-host.ranks * numel * size // 64) * 64 for numel in numels]
        *starts, total = accumulate(spaces, initial=0)
        self._host = host
        self._dtype = dtype
        self._memory = Memory(host, words=2, data_bytes=total)
        self.wholes = [
            self._memory.tensor(start, host.ranks * numel, dtype)
            for start, numel in zip(starts, numels, strict=True)
        ]
        """Each parameter in full, [ranks x numel]."""
        self.rows = [
            self._memory.tensor(start + host.rank * n * size, n, dtype)
            for start, n in zip(starts, numels, strict=True)
        ]
        """This rank's shard of each parameter, [numel]."""
        self._bytes = host.ranks * sum(numels) * size
        self._round = 0

    def begin(self) -> None:
        """Announce that this rank's rows are written."""
        self._round += 1
        self._memory.write(_WRITTEN, self._round)
        record("all_gather", full_bytes=self._bytes, dtype=self._dtype, ranks=self._host.ranks)

    def finish(self) -> None:
        """Wait until all ranks' rows are written."""
        self._wait(_WRITTEN, "all-gather")

    def release(self) -> None:
        """Announce that this rank has finished reading, and wait until all ranks have."""
        self._memory.write(_READ, self._round)
        self._wait(_READ, "end of an evaluation")

    def _wait(self, word: int, operation: str) -> None:
        self._host.wait(
            partial(self._memory.behind, word, self._round),
            operation=operation,
            sequence=self._round,
        )
