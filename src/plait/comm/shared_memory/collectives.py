"""All-gather, reduce-scatter and all-reduce between ranks of one machine, in shared memory.

`fully_shard` requests buffers from the all-gather and the reduce-scatter, fills the buffers, and
then calls the collective. The all-reduce owns the buffers that the gradient reducer fills.

Note [Words in turn]
    Each rank announces a call in a word (an int64 in shared memory) and waits for the words of all
    other ranks. A rank may write the word of the next call before another rank has read the words
    of this call, but not the word of the call after that. Calls therefore use two words in turn, so
    that no word is overwritten before all ranks have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from plait._torch.groups import all_gather_single
from plait._torch.units import AllGather
from plait.comm.all_reduce import Flat
from plait.comm.collectives import SynchronousReduceScatter, add_in_order, reduce_scatter
from plait.comm.hang import describe_tensor
from plait.comm.record import record
from plait.comm.shared_memory.host import SharedMemory, SharedMemoryGroup, SharedMemoryUnavailable
from plait.errors import CommunicationError

_FLAG_BITS = 8
"""Number of bits of an announcement that hold flags. The others hold the number of the call."""
_GATHER_SLOTS = 3
"""Number of outputs of all-gathers. `fully_shard` uses up to two while it requests the next."""
_ALL_FREE = (1 << _GATHER_SLOTS) - 1
_SCATTER_SLOTS = 2
"""Number of inputs of reduce-scatters. `fully_shard` may use one while it fills the next."""
_NO_SLOT = 255
"""Announcement of a rank whose input is not in shared memory."""
_READ_WORD = 4
"""Index of the word with the number of reduce-scatters that this rank has finished reading."""


class _Slots:
    """Slots of shared memory that grow on request.

    Ranks write words (int64 counters in shared memory) to agree on the slot to use.

    All ranks request the same sizes in the same order, so their slots grow together. The first
    request allocates memory. Subclasses decide which slots are free.

    Args:
        host: Ranks of the group.
        word_count: Number of words per rank, see `_announce` for the first four.
        slots: Number of slots. All slots have the same size.
    """

    def __init__(self, host: SharedMemoryGroup, *, word_count: int, slots: int) -> None:
        self._host = host
        self._word_count = word_count
        self._slots = slots
        self._memory: SharedMemory | None = None
        self._round = 0
        """Number of calls with the current memory."""
        self._slot_bytes = 0
        self._refused_bytes: int | None = None
        """Size that could not be allocated. Requests of this size or more are not tried again."""

    def _reset(self) -> None:
        """Reset the state of the slots after new memory has replaced the old memory."""
        raise NotImplementedError

    @property
    def _shared(self) -> SharedMemory:
        """Current shared memory. Requires an earlier request for which there was enough memory."""
        assert self._memory is not None
        return self._memory

    def _fits(self, count: int) -> bool:
        return self._memory is not None and count <= self._slot_bytes

    def _make_room(self, count: int) -> None:
        """Grow the slots to `count` bytes if possible. Collective unless the slots suffice."""
        if self._fits(count):
            return
        if self._refused_bytes is not None and count >= self._refused_bytes:
            return
        # Slots begin at cache lines.
        slot_bytes = -(-count // 64) * 64
        data_bytes = self._slots * slot_bytes
        try:
            self._memory = SharedMemory(
                self._host, word_count=self._word_count, data_bytes=data_bytes
            )
        except SharedMemoryUnavailable:
            self._refused_bytes = count
            return
        self._slot_bytes = slot_bytes
        self._round = 0
        self._reset()

    def _slot_tensor(
        self, index: int, numel: int, dtype: torch.dtype, on_release: Callable[[], None]
    ) -> torch.Tensor:
        """Return a tensor [numel] at the start of a slot.

        `on_release` is called when no tensor of this rank uses the slot any longer, unless new
        memory has replaced the slot.
        """
        memory = self._shared

        def release() -> None:
            if self._memory is memory:
                on_release()

        return memory.tensor(index * self._slot_bytes, numel, dtype, release)

    def _announce(
        self, count: int, shape: str, flags: int, *, operation: str, verb: str
    ) -> list[int]:
        """Announce the next call, and wait until all ranks have announced theirs.

        Words 0 and 1 hold announcements. Words 2 and 3 hold sizes. See Note [Words in turn].

        Args:
            count: Size of the full tensor in bytes, which must be the same on all ranks.
            shape: Shape and dtype of the tensor, for messages.
            flags: Content of the announcement, with at most _FLAG_BITS bits.
            operation: Name of the collective, for messages.
            verb: Activity of a rank in the collective, for messages.

        Returns:
            The flags of all ranks.

        Raises:
            CommunicationError: The ranks announce different sizes.
        """
        memory = self._shared
        host = self._host
        word = self._round % 2
        self._round += 1
        # The size is written before the word that others wait for.
        memory.write(2 + word, count)
        memory.write(word, self._round << _FLAG_BITS | flags)
        host.wait(
            partial(self._late_ranks, word), operation=operation, sequence=self._round, shape=shape
        )
        for rank in range(host.ranks):
            other_count = memory.read(rank, 2 + word)
            if other_count != count:
                raise CommunicationError(
                    f"{operation} over {host.label}: {host.name(rank)} {verb} {other_count} bytes"
                    f" and {host.name(host.rank)} {count}, so the ranks issue different"
                    " collectives; set faults.check_collectives = true to find the lines"
                )
        return [memory.read(rank, word) & ((1 << _FLAG_BITS) - 1) for rank in range(host.ranks)]

    def _late_ranks(self, word: int) -> list[int]:
        """Return the ranks that have not announced the current call."""
        memory = self._shared
        late: list[int] = []
        for rank in range(self._host.ranks):
            if memory.read(rank, word) >> _FLAG_BITS != self._round:
                late.append(rank)
        return late


class SharedAllGather(_Slots, AllGather):
    """All-gather of one group into memory that all ranks read, for every unit of a model.

    `fully_shard` requests the output first (`allocate`), copies this rank's shard into it, and then
    calls this object. The output is one of a few slots of shared memory. Each rank writes its shard
    once, to the place from which other ranks read it. The call only waits for the other ranks.

    The ranks agree on a free slot without another exchange. A slot is free for a rank if no tensor
    of the rank points into the slot. With each call a rank publishes its free slots, and the next
    call uses the first slot that all ranks have published. A slot that is free stays free until the
    next call, so no call overwrites an output that a rank still reads. If no slot is free, or there
    is not enough memory, all ranks use torch's collective.
    """

    def __init__(self, host: SharedMemoryGroup) -> None:
        super().__init__(host, word_count=4, slots=_GATHER_SLOTS)
        self._next: int | None = 0
        """Slot of the next call, on which all ranks agree. None if no slot is free."""
        self._free = _ALL_FREE
        """Slots into which no tensor of this rank points, one bit each."""
        self._output: tuple[int, int] | None = None
        """(address, bytes) of the output that `allocate` returned for the next call."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the output [ranks x n] of the next call, in shared memory if a slot is free."""
        numel = prod(int(length) for length in size)
        count = numel * dtype.itemsize
        self._make_room(count)
        if self._next is None or not self._fits(count):
            return torch.empty(*size, dtype=dtype, device=device)
        is_free = self._free >> self._next & 1
        if not is_free:
            # `allocate` has returned this slot before, and the output was not used.
            return torch.empty(*size, dtype=dtype, device=device)
        output = self._lease(self._next, numel, dtype)
        self._output = (output.data_ptr(), count)
        return output.view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [ranks x n] with every rank's `input_tensor` [n]. Synchronous."""
        count = output_tensor.numel() * output_tensor.element_size()
        in_place = self._output == (output_tensor.data_ptr(), count)
        self._output = None
        self._make_room(count)
        if not self._fits(count):
            all_gather_single(output_tensor, input_tensor, group=group)
            return

        slot = self._next
        staged = None
        if slot is None:
            all_gather_single(output_tensor, input_tensor, group=group)
        elif not in_place:
            staged = self._lease(slot, output_tensor.numel(), output_tensor.dtype)
            staged.view(self._host.ranks, -1)[self._host.rank].copy_(input_tensor.reshape(-1))
        # The ranks agree on the next slot here, so this is also necessary without a slot.
        self._synchronize(count, describe_tensor(output_tensor.shape, output_tensor.dtype))
        if staged is not None:
            output_tensor.view(-1).copy_(staged)
        if slot is not None:
            record(
                "all_gather", full_bytes=count, dtype=output_tensor.dtype, ranks=self._host.ranks
            )

    def _synchronize(self, count: int, shape: str) -> None:
        """Wait for every rank's shard, and agree with all ranks on the next slot."""
        # The slot of this call is in use until its output is freed.
        free = _ALL_FREE
        for rank_free in self._announce(
            count, shape, self._free, operation="all-gather", verb="gathers"
        ):
            free &= rank_free
        # The lowest bit that is set.
        self._next = (free & -free).bit_length() - 1 if free else None

    def _lease(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._free &= ~(1 << slot)

        def mark_free() -> None:
            self._free |= 1 << slot

        return self._slot_tensor(slot, numel, dtype, mark_free)

    def _reset(self) -> None:
        self._next = 0
        self._free = _ALL_FREE


class SharedReduceScatter(_Slots, SynchronousReduceScatter):
    """Reduce-scatter of one group from memory that all ranks write, for every unit of a model.

    `fully_shard` requests the input (`allocate`), copies the gradients into it, requests the
    output, and calls this object. The input is one of the two slots that this rank owns in shared
    memory. The call announces the slot, waits for the announcements of all ranks, and adds in the
    order of the ranks, so that every run gives the same bits. A slot is reused when no tensor of
    this rank points into it and every rank has marked it as read.
    """

    def __init__(self, host: SharedMemoryGroup) -> None:
        super().__init__(host, word_count=5, slots=host.ranks * _SCATTER_SLOTS)
        self._leased = [False] * _SCATTER_SLOTS
        """True while a tensor of this rank points into a slot."""
        self._last_use = [0] * _SCATTER_SLOTS
        """Number of the call, from 1, that last used a slot."""
        self._input: tuple[int, int, int] | None = None
        """(address, bytes, slot) of the input that `allocate` returned for the next call."""
        self._has_input = False
        """True after the input of the next call was requested. The next request is for its output.
        """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the input [ranks x n] of the next call, in shared memory if a slot is free.

        If this method is called twice before the collective, the second call returns the output
        [n], which is not in shared memory.
        """
        if self._has_input:
            return torch.empty(*size, dtype=dtype, device=device)
        self._has_input = True
        numel = prod(int(length) for length in size)
        count = numel * dtype.itemsize
        self._make_room(count)
        slot = self._free_slot() if self._fits(count) else None
        if slot is None:
            return torch.empty(*size, dtype=dtype, device=device)
        tensor = self._lease(slot, numel, dtype)
        self._input = (tensor.data_ptr(), count, slot)
        return tensor.view(*size)

    def reduce(self, output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write this rank's shard of the sum of `stacked` [ranks x n] to `output` [n]."""
        count = stacked.numel() * stacked.element_size()
        self._has_input = False
        requested = self._input
        self._input = None
        self._make_room(count)
        if self._fits(count):
            slot = None
            # Another tensor than the one that `allocate` returned is copied into a slot first.
            if requested is not None and requested[:2] == (stacked.data_ptr(), count):
                slot = requested[2]
            self._reduce_in_memory(output, stacked, group, slot)
        else:
            reduce_scatter(output, stacked, group)

    def _reduce_in_memory(
        self,
        output: torch.Tensor,
        stacked: torch.Tensor,
        group: dist.ProcessGroup,
        slot: int | None,
    ) -> None:
        """Reduce the inputs of all ranks in place.

        Args:
            output: This rank's shard of the result.
            stacked: Addend of this rank [ranks x n].
            group: The process group, whose collective is used if the input of a rank has no slot.
            slot: Slot that has the input, or None to copy it into one.
        """
        memory = self._shared
        host = self._host
        count = stacked.numel() * stacked.element_size()
        if slot is None and (slot := self._free_slot()) is not None:
            # The lease ends when this call returns.
            staged = self._lease(slot, stacked.numel(), stacked.dtype)
            staged.copy_(stacked.reshape(-1))
        slots = self._synchronize(
            count, describe_tensor(stacked.shape, stacked.dtype), _NO_SLOT if slot is None else slot
        )

        if _NO_SLOT in slots:
            reduce_scatter(output, stacked, group)
        else:
            start = host.rank * count // host.ranks
            addends = []
            for rank, rank_slot in enumerate(slots):
                offset = (rank * _SCATTER_SLOTS + rank_slot) * self._slot_bytes + start
                addends.append(memory.tensor(offset, output.numel(), output.dtype))
            add_in_order(addends, [output.view(-1)])
            record("reduce_scatter", full_bytes=count, dtype=output.dtype, ranks=host.ranks)
        memory.write(_READ_WORD, self._round)

    def _synchronize(self, count: int, shape: str, slot: int) -> list[int]:
        """Wait until every rank has filled its input, and return the slot of each rank."""
        if slot != _NO_SLOT:
            self._last_use[slot] = self._round + 1
        return self._announce(count, shape, slot, operation="reduce-scatter", verb="reduces")

    def _free_slot(self) -> int | None:
        """Return a slot that no tensor of this rank uses, or None.

        This waits until all ranks have read the slot's previous content.
        """
        free = [slot for slot in range(_SCATTER_SLOTS) if not self._leased[slot]]
        if not free:
            return None
        slot = min(free, key=self._last_use.__getitem__)
        last_use = self._last_use[slot]
        late_ranks = partial(self._shared.behind, _READ_WORD, last_use)
        self._host.wait(late_ranks, operation="reduce-scatter", sequence=last_use)
        return slot

    def _lease(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._leased[slot] = True

        def mark_free() -> None:
            self._leased[slot] = False

        return self._slot_tensor(self._host.rank * _SCATTER_SLOTS + slot, numel, dtype, mark_free)

    def _reset(self) -> None:
        self._leased = [False] * _SCATTER_SLOTS
        self._last_use = [0] * _SCATTER_SLOTS


class SharedBuckets:
    """All-reduce of gradient buckets in shared memory (implements `comm.all_reduce.Buckets`).

    Every rank sums one slice of a buffer over all ranks, in rank order, and writes the sum into the
    buffers of all ranks. Nothing is copied, and the sum has the same bits on every rank.

    There is no background thread. A rank sums its slice in a later `start` if the other ranks are
    ready by then, and otherwise in `finish`. Ranks therefore wait for each other only in `finish`.

    The constructor is collective.

    Args:
        host: Ranks of the group.
        flats: Content of the buckets.

    Raises:
        SharedMemoryUnavailable: There is not enough memory. All ranks raise this error.
    """

    def __init__(self, host: SharedMemoryGroup, flats: Sequence[Flat]) -> None:
        starts = []
        total = 0
        for flat in flats:
            starts.append(total)
            total += -(-flat.numel * flat.dtype.itemsize // 128) * 128
        self.state: dict[str, torch.Tensor] = {}
        self._host = host
        # Two words per buffer: the number of its starts, and the number of its sums.
        memory = SharedMemory(host, word_count=2 * len(flats), data_bytes=host.ranks * total)
        self._memory = memory
        self._rank_buffers: list[list[torch.Tensor]] = []
        """Buffers of all ranks, [buffers][ranks]."""
        for start, flat in zip(starts, flats, strict=True):
            self._rank_buffers.append(
                [
                    memory.tensor(rank * total + start, flat.numel, flat.dtype)
                    for rank in range(host.ranks)
                ]
            )
        self.buffers = [buffers[host.rank] for buffers in self._rank_buffers]
        for buffer in self.buffers:
            # The first write also allocates the pages near this rank.
            buffer.zero_()
        self._shapes = [describe_tensor([flat.numel], flat.dtype) for flat in flats]
        self._calls = [0] * len(flats)
        """Number of calls of `start` for each buffer."""
        self._unsummed: list[int] = []
        """Started buffers whose slice this rank has not summed yet, in the order of starts."""

    def start(self, index: int) -> None:
        """Announce that this rank's buffer is filled."""
        self._calls[index] += 1
        self._memory.write(2 * index, self._calls[index])
        self._unsummed.append(index)
        self._sum_ready()

    def finish(self, index: int) -> None:
        """Wait until the buffer has the sum over all ranks."""
        while index in self._unsummed:
            self._wait(self._unsummed[0], 0)
            self._sum_ready()
        self._wait(index, 1)
        buffer = self.buffers[index]
        record("all_reduce", full_bytes=buffer.nbytes, dtype=buffer.dtype, ranks=self._host.ranks)

    def _wait(self, index: int, word: int) -> None:
        self._host.wait(
            partial(self._late_ranks, index, word),
            operation="all-reduce",
            sequence=self._calls[index],
            shape=self._shapes[index],
        )

    def _sum_ready(self) -> None:
        """Sum this rank's slices of buffers, up to the first buffer that a rank has not started."""
        while self._unsummed and not self._late_ranks(self._unsummed[0], 0):
            self._sum(self._unsummed.pop(0))

    def _sum(self, index: int) -> None:
        """Sum one slice over the buffers of all ranks, and write the result to all of them.

        Each rank sums its own slice.
        """
        host = self._host
        buffers = self._rank_buffers[index]
        numel = buffers[0].numel()
        # Full cache lines, so that no two ranks write to the same one.
        slice_numel = -(-numel // (host.ranks * 32)) * 32
        start = min(numel, host.rank * slice_numel)
        stop = min(numel, start + slice_numel)
        slices = [buffer[start:stop] for buffer in buffers]
        add_in_order(slices, slices)
        self._memory.write(2 * index + 1, self._calls[index])

    def _late_ranks(self, index: int, word: int) -> list[int]:
        """Return the ranks that have not started (word 0) or finished (word 1) a buffer's sum."""
        return self._memory.behind(2 * index + word, self._calls[index])
