"""Reduce-scatter between the ranks of one machine: each sums its part straight from the memory in which the others put theirs.

`fully_shard` asks for the input (`allocate`), copies the gradients into it, asks for the output and calls. The input is one of two slots of
this rank's own in shared memory; the call announces which, waits for the announcements of all ranks, and sums. A slot is reused when no
tensor of this rank points into it and every rank has marked it as read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.units import ReduceScatter
from plait.comm.board import described
from plait.comm.host import Host
from plait.comm.host_slots import HostSlots
from plait.comm.record import record
from plait.comm.reduce_scatter import reduce_scatter
from plait.comm.summing import add_in_order

SLOTS = 2
"""`fully_shard` may hold one input while it fills the next."""
_NO_SLOT = 255
_READ = 4
"""Index of the word that says how many calls this rank has finished reading."""


class SharedReduceScatter(HostSlots, ReduceScatter):
    """For one group; every unit of a model shares it. Sums in the order of the ranks, so every run gives the same bits."""

    def __init__(self, host: Host) -> None:
        super().__init__(host, words=5, slots=host.ranks * SLOTS)
        self._round = 0
        self._leased = [False] * SLOTS
        self._used = [0] * SLOTS
        """The call, counted from 1, that last used a slot."""
        self._input: tuple[int, int, int] | None = None
        """(address, bytes, slot) of the input that `allocate` handed out for the coming call."""
        self._asked = False
        """Whether the input of the coming call was asked for, so that the next request is for the output."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input [ranks x n] of the coming call, in shared memory where there is some; then its output [n], in memory of its own."""
        if self._asked:
            return torch.empty(*size, dtype=dtype, device=device)
        self._asked = True
        numel = prod(int(length) for length in size)
        count = numel * dtype.itemsize
        self._make_room(count)
        slot = self._free_slot() if self._fits(count) else None
        if slot is None:
            return torch.empty(*size, dtype=dtype, device=device)
        tensor = self._lease(slot, numel, dtype)
        self._input = (tensor.data_ptr(), count, slot)
        return tensor.view(*size)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """`output_tensor` [n] = this rank's part of the sum (or mean: `op` is SUM or AVG) of `input_tensor` [ranks x n]. Done when it
        returns."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduce-scatter by {op}")
        count = input_tensor.numel() * input_tensor.element_size()
        self._asked = False
        handed, self._input = self._input, None
        self._make_room(count)
        if self._fits(count):
            slot = handed[2] if handed is not None and handed[:2] == (input_tensor.data_ptr(), count) else None
            self._through_memory(output_tensor, input_tensor, group, slot)
        else:
            reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    def _through_memory(self, output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup, slot: int | None) -> None:
        memory, host = self._memory, self._host
        assert memory is not None
        count = stacked.numel() * stacked.element_size()
        staged = None
        if slot is None and (slot := self._free_slot()) is not None:
            staged = self._lease(slot, stacked.numel(), stacked.dtype)
            staged.copy_(stacked.reshape(-1))
        chosen = self._meet(count, described(stacked.shape, stacked.dtype), _NO_SLOT if slot is None else slot)
        if _NO_SLOT in chosen:
            reduce_scatter(output, stacked, group)
        else:
            mine = host.rank * count // host.ranks
            pieces = [
                memory.tensor((rank * SLOTS + theirs) * self._slot_bytes + mine, output.numel(), output.dtype)
                for rank, theirs in enumerate(chosen)
            ]
            add_in_order(pieces, [output.view(-1)])
            record("reduce_scatter", full_bytes=count, dtype=output.dtype, ranks=host.ranks)
        memory.write(_READ, self._round)

    def _meet(self, count: int, shape: str, slot: int) -> list[int]:
        """Wait until every rank has its input in place; the slots they chose."""
        memory, host, parity = self._memory, self._host, self._round % 2
        assert memory is not None
        self._round += 1
        if slot != _NO_SLOT:
            self._used[slot] = self._round
        # Two words in turn: a rank can be one call ahead, never two.
        memory.write(2 + parity, count)
        memory.write(parity, self._round << 8 | slot)
        host.wait(partial(self._late, parity), operation="reduce-scatter", sequence=self._round, shape=shape)
        self._same_everywhere(2 + parity, count, operation="reduce-scatter", does="reduces")
        return [memory.read(rank, parity) & 255 for rank in range(host.ranks)]

    def _late(self, parity: int) -> list[int]:
        memory = self._memory
        assert memory is not None
        return [rank for rank in range(self._host.ranks) if memory.read(rank, parity) >> 8 != self._round]

    def _free_slot(self) -> int | None:
        """A slot into which no tensor of this rank points, once all have read what was in it; None where there is none."""
        free = [slot for slot in range(SLOTS) if not self._leased[slot]]
        if not free:
            return None
        slot = min(free, key=lambda slot: self._used[slot])
        memory = self._memory
        assert memory is not None
        late = partial(memory.behind, _READ, self._used[slot])
        self._host.wait(late, operation="reduce-scatter", sequence=self._used[slot])
        return slot

    def _lease(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._leased[slot] = True

        def released() -> None:
            self._leased[slot] = False

        return self._slot(self._host.rank * SLOTS + slot, numel, dtype, released)

    def _renewed(self) -> None:
        self._round, self._leased, self._used = 0, [False] * SLOTS, [0] * SLOTS
