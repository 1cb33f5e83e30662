"""All-gather between the ranks of one machine: each writes its shard into memory that all of them read.

`fully_shard` asks for the output first (`allocate`), copies this rank's shard into it and then calls. The output is one of a few slots of
shared memory, so the shard is written once, where the others read it, and the call only waits for the others.

Which slot is free is agreed without a further exchange: with each call a rank publishes which slots no tensor of its own points into, and
the next call takes the first slot that all published as free. No rank uses a slot between these two calls, so reading an older output is
safe. Where no slot is free, or memory is short, torch's collective is used, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single
from plait._torch.units import AllGather
from plait.comm.board import described
from plait.comm.host import Host
from plait.comm.host_slots import HostSlots
from plait.comm.record import record

SLOTS = 3
"""`fully_shard` holds up to two outputs while it asks for the next."""
_ALL_FREE = (1 << SLOTS) - 1


class SharedAllGather(HostSlots, AllGather):
    """For one group; every unit of a model shares it. Calls of one group come in one order on all ranks, as with any collective."""

    def __init__(self, host: Host) -> None:
        super().__init__(host, words=4, slots=SLOTS)
        self._round = 0
        self._next: int | None = 0
        """The slot of the coming call, as all agreed; None where none is free."""
        self._free = _ALL_FREE
        """Slots into which no tensor of this rank points, one bit each."""
        self._output: tuple[int, int] | None = None
        """(address, bytes) of the output that `allocate` handed out for the coming call."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output of the coming call: [ranks x n], in shared memory where there is some."""
        numel = prod(int(length) for length in size)
        count = numel * dtype.itemsize
        self._make_room(count)
        if self._next is None or not self._fits(count) or not self._free >> self._next & 1:
            return torch.empty(*size, dtype=dtype, device=device)
        output = self._lease(self._next, numel, dtype)
        self._output = (output.data_ptr(), count)
        return output.view(*size)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        """`output_tensor` [ranks x n] from every rank's `input_tensor` [n]. Done when it returns."""
        count = output_tensor.numel() * output_tensor.element_size()
        in_place = self._output == (output_tensor.data_ptr(), count)
        self._output = None
        self._make_room(count)
        if self._memory is None or not self._fits(count):
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        slot = self._next
        staged = None
        if slot is not None and not in_place:
            staged = self._lease(slot, output_tensor.numel(), output_tensor.dtype)
            staged.view(self._host.ranks, -1)[self._host.rank].copy_(input_tensor.reshape(-1))
        if slot is None:
            all_gather_single(output_tensor, input_tensor, group=group)
        self._meet(count, described(output_tensor.shape, output_tensor.dtype))
        if staged is not None:
            output_tensor.view(-1).copy_(staged)
        if slot is not None:
            record("all_gather", full_bytes=count, dtype=output_tensor.dtype, ranks=self._host.ranks)

    def _meet(self, count: int, shape: str) -> None:
        """Wait for every rank's shard, and agree on the next slot."""
        memory, host, parity = self._memory, self._host, self._round % 2
        assert memory is not None
        # Two words in turn: a rank can be one call ahead, never two. The slot of this call is in use until its output is freed.
        memory.write(2 + parity, count)
        memory.write(parity, (self._round + 1) << SLOTS | self._free)
        host.wait(partial(self._late, parity), operation="all-gather", sequence=self._round + 1, shape=shape)
        self._same_everywhere(2 + parity, count, operation="all-gather", does="gathers")
        free = _ALL_FREE
        for rank in range(host.ranks):
            free &= memory.read(rank, parity)
        self._next = (free & -free).bit_length() - 1 if free else None
        self._round += 1

    def _late(self, parity: int) -> list[int]:
        memory, expected = self._memory, self._round + 1
        assert memory is not None
        return [rank for rank in range(self._host.ranks) if memory.read(rank, parity) >> SLOTS != expected]

    def _lease(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._free &= ~(1 << slot)

        def released() -> None:
            self._free |= 1 << slot

        return self._slot(slot, numel, dtype, released)

    def _renewed(self) -> None:
        self._round, self._next, self._free = 0, 0, _ALL_FREE
