"""Compressed collectives of the data-parallel ranks.

They send fewer bytes than the uncompressed collectives, with a bounded error.

    collective          ZeRO stage  sent                                state between steps
    bucket, int8, int4  0           quantised slices to their owners,   two residuals, if there
                                    quantised sums back                 is error feedback
    bucket, PowerSGD    0           two thin factors of each matrix     residual and factors
    all-gather          1 to 3      quantised shards, used by every     none
                                    rank including the sender
    reduce-scatter      1 to 3      quantised slices to their owners,   residual, if there is
                                    across machines a second time       error feedback

Error feedback adds the residual of the last step to this step's gradients before they are
quantised. Vectors (norms, biases) are sent uncompressed. The result has the same bits on every
rank. The schemes are those of ZeRO++ (arXiv:2306.10209) and PowerSGD (arXiv:1905.13727).

Note [Two messages per bucket]
    A compressed bucket is sent in two messages, and the second message depends on the result of the
    first. Both should overlap with the backward. The second message of a bucket therefore starts
    when the bucket after the next one starts. While a rank sums the first message, the link
    transfers messages of other buckets. The order of messages depends only on the order in which
    buckets start, which is the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.groups import all_gather_single
from plait._torch.units import AllGather, DefaultAllocMixin
from plait.cluster.layout import shard_size
from plait.cluster.mesh import Levels
from plait.comm.all_reduce import Flat, launched
from plait.comm.collectives import SynchronousReduceScatter
from plait.comm.quantise import BLOCK, Bits, Packing, Segment, blocks_of
from plait.sizes import wide_dtype

_FIRST_MESSAGES = 2
"""Number of buckets whose first message may be in flight. With more, the oldest is waited for."""
POWERSGD_START = 10
"""Number of uncompressed steps before PowerSGD starts, because early gradients change too much."""


@dataclass
class PersistentTensors:
    """Tensors of a compressed collective that persist between steps (residuals, factors), by name.

    A skipped step must not change these tensors, but ranks decide to skip a step only after its
    gradients were sent. If steps may be skipped, the new value of a tensor is written to a second
    tensor, which replaces the first one when the step is applied.

    If steps cannot be skipped, new values overwrite the old ones. Gradients may still be dropped,
    after a failure or because the user skips large gradients. The residuals of dropped gradients
    must not reach later steps, so they are set to zero, which loses the error of one step.

    Attributes:
        revocable: Whether steps may be skipped.
        state: Values after the last step that was not skipped. A checkpoint stores them.
    """

    revocable: bool
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    _changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """New values of the running step. They are the tensors of `state` if not `revocable`."""
    _spare: dict[str, torch.Tensor] = field(default_factory=dict)
    """Memory for the new values of the next step."""

    def current(self, name: str) -> torch.Tensor:
        """Return the value of a tensor, including changes in the current step."""
        return self._changed.get(name, self.state[name])

    def change(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tensor with the current value, tensor for the new value).

        The caller must write the full new value. If the current value is no longer needed, both are
        the same tensor.
        """
        value = self.current(name)
        if name not in self._changed:
            new_value = value
            if self.revocable:
                new_value = self._spare.pop(name, value)
                if new_value is value or new_value.shape != value.shape:
                    new_value = torch.empty_like(value)
            self._changed[name] = new_value
        return value, self._changed[name]

    def replace(self, state: dict[str, torch.Tensor]) -> None:
        """Replace all values, and discard the changes of the current step."""
        self.state = state
        self._changed = {}

    @property
    def spare_tensors(self) -> list[torch.Tensor]:
        """Tensors that use memory in addition to `state`: new values and spare buffers."""
        new_values = self._changed.values() if self.revocable else ()
        return [*new_values, *self._spare.values()]

    def end_step(self, *, skipped: bool) -> None:
        """Adopt the new values of the step that has ended, or drop them if it was skipped."""
        for name, value in self._changed.items():
            if not self.revocable:
                if skipped and is_residual(name):
                    value.zero_()
            elif skipped:
                self._spare[name] = value
            else:
                self._spare[name] = self.state[name]
                self.state[name] = value
        self._changed = {}


def is_residual(name: str) -> bool:
    """Return True for a residual, and False for a factor or the step count of PowerSGD."""
    return not name.endswith((".right", "steps"))


class _TwoMessageBuckets(ABC):
    """Base class of buckets that are sent in two messages. See Note [Two messages per bucket]."""

    def __init__(self) -> None:
        self._first_messages: list[int] = []
        """Buckets whose first message is in flight, in the order of their starts."""

    def _after_first_message(self, index: int) -> None:
        """Start the second message of an earlier bucket after the first message of this one."""
        self._first_messages.append(index)
        if len(self._first_messages) > _FIRST_MESSAGES:
            self._start_second_message(self._first_messages.pop(0))

    def _start_second_messages(self) -> None:
        """Start the remaining second messages. Call this after the last bucket was started."""
        while self._first_messages:
            self._start_second_message(self._first_messages.pop(0))

    @abstractmethod
    def _start_second_message(self, index: int) -> None:
        """Wait for the first message of a bucket, and start its second one."""


class QuantisedBuckets(_TwoMessageBuckets):
    """Buckets whose matrices are summed in quantised form (implements `comm.all_reduce.Buckets`).

    Every rank owns a slice of a bucket. It receives this slice from all ranks, sums what it has
    received, and sends the sum to all ranks. Buckets of vectors are summed uncompressed.

    Args:
        group: The process group.
        flats: Content of the buckets.
        device: Device of the buckets.
        bits: Bits per element.
        feedback: Whether residuals are added to the next step's gradients.
        revocable: Whether steps may be skipped.

    Attributes:
        buffers: Buffer [n] of each bucket.
        carried: Residuals in float32. Empty without feedback.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        flats: Sequence[Flat],
        device: torch.device,
        *,
        bits: Bits,
        feedback: bool,
        revocable: bool = False,
    ) -> None:
        super().__init__()
        self._group = group
        self._bits = bits
        self._rows: list[torch.Tensor | None] = []
        """Each bucket as one slice per rank [ranks, slice], padded with zeros at the end.

        None for a bucket that is summed uncompressed.
        """
        self.buffers: list[torch.Tensor] = []
        self._works: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        """Running collective of each bucket, and the tensor that receives its result."""
        self.carried = PersistentTensors(revocable)
        for index, flat in enumerate(flats):
            self._add_bucket(index, flat, device, feedback=feedback)

    def _add_bucket(self, index: int, flat: Flat, device: torch.device, *, feedback: bool) -> None:
        if not flat.matrices:
            self._rows.append(None)
            self.buffers.append(torch.zeros(flat.numel, dtype=flat.dtype, device=device))
            return
        ranks = self._group.size()
        slice_numel = owned_numel(flat.numel, ranks)
        rows = torch.zeros(ranks, slice_numel, dtype=flat.dtype, device=device)
        self._rows.append(rows)
        self.buffers.append(rows.view(-1)[: flat.numel])
        if feedback:
            for name, count in (("sent", ranks), ("owned", 1)):
                self.carried.state[f"{index}.{name}"] = torch.zeros(
                    count, slice_numel, dtype=torch.float32, device=device
                )

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Residuals by name, for checkpoints."""
        return self.carried.state

    def start(self, index: int) -> None:
        """Send the slices of a bucket to their owners."""
        rows = self._rows[index]
        if rows is None:
            buffer = self.buffers[index]
            work = launched(dist.all_reduce(buffer, group=self._group, async_op=True))
            self._works[index] = (work, buffer)
            return
        packed = _pack(self._packing(rows), rows, self.carried, f"{index}.sent")
        received = torch.empty_like(packed)
        work = launched(dist.all_to_all_single(received, packed, group=self._group, async_op=True))
        self._works[index] = (work, received)
        self._after_first_message(index)

    def finish(self, index: int) -> None:
        """Wait for the sums of a bucket and unpack them."""
        self._start_second_messages()
        work, gathered = self._works.pop(index)
        work.wait()
        rows = self._rows[index]
        if rows is not None:
            packed = gathered.view(rows.shape[0], -1)
            rows.copy_(self._packing(rows).unpack(packed, torch.float32))
            # The padding of a bucket may be in a block that is not finite.
            rows.view(-1)[self.buffers[index].numel() :].zero_()

    def _start_second_message(self, index: int) -> None:
        """Sum the received slices of a bucket, and send the sum to all ranks."""
        work, received = self._works[index]
        work.wait()
        rows = self._rows[index]
        assert rows is not None
        packing = self._packing(rows)
        total = packing.unpack_sum(received, torch.float32).unsqueeze(0)
        packed = _pack(packing, total, self.carried, f"{index}.owned")
        gathered = packed.new_empty(rows.shape[0] * packed.shape[1])
        work = launched(all_gather_single(gathered, packed[0], group=self._group, async_op=True))
        self._works[index] = (work, gathered)

    def _packing(self, rows: torch.Tensor) -> Packing:
        return Packing((Segment(rows.shape[1], matrix=True),), self._bits)


def owned_numel(numel: Any, ranks: Any) -> Any:
    """Return the elements of a bucket that each rank owns, rounded up to full blocks.

    Args:
        numel: Elements of the bucket, an int or an array.
        ranks: Number of ranks, an int or an array.
    """
    return blocks_of(shard_size(numel, ranks)) * BLOCK


@dataclass(frozen=True)
class _FactoredMatrix:
    """Matrix of a bucket that is sent as two factors, `left.T @ right`.

    The factors have the shapes [rank, rows] and [rank, columns]. If they were stored transposed,
    their products with the matrix would take several times as long on a CPU.

    Attributes:
        offset: First element of the matrix in the bucket.
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        right: Name of the last step's right factor in `PowerSGDBuckets.carried`.
    """

    offset: int
    rows: int
    columns: int
    right: str

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the matrix [rows, columns] as a view of a bucket."""
        return buffer[self.offset : self.offset + self.rows * self.columns].view(self.rows, -1)


class PowerSGDBuckets(_TwoMessageBuckets):
    """Buckets whose matrices are sent as two factors, with error feedback and warm start.

    The results are those of torch's PowerSGD hook for DDP. Unlike with the hook, the caller's
    thread issues all collectives in a fixed order, and the left factors overlap with the backward.
    `factor_rank` decides which matrices are sent uncompressed.

    Args:
        group: The process group.
        flats: Content of the buckets.
        device: Device of the buckets.
        rank: Rank of the factors.
        uncompressed_steps: Number of initial steps in which gradients are summed uncompressed.
        revocable: Whether steps may be skipped.

    Attributes:
        buffers: Buffer [n] of each bucket.
        carried: Residuals, right factors and the number of steps.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        flats: Sequence[Flat],
        device: torch.device,
        *,
        rank: int,
        uncompressed_steps: int = POWERSGD_START,
        revocable: bool = False,
    ) -> None:
        super().__init__()
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self._group = group
        self._uncompressed_steps = uncompressed_steps
        self._works: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}
        """Running collective of each bucket, and the tensors that it sums.

        The first message sums left factors and uncompressed tensors, and the second one right
        factors. The list is empty if the bucket itself is summed.
        """
        self._left_sums: dict[int, list[torch.Tensor]] = {}
        """Orthonormal left factors and uncompressed sums of buckets in their second message."""
        self.carried = PersistentTensors(revocable, {"steps": torch.zeros((), dtype=torch.int64)})
        self._factored: dict[int, list[_FactoredMatrix]] = {}
        self._uncompressed: dict[int, list[tuple[int, int]]] = {}
        """(offset, length) of the tensors of each bucket that are sent uncompressed."""
        self._seeds: dict[int, int] = {}
        """Seed of the initial factors of each bucket."""

        bucket_counts = {True: 0, False: 0}
        for index, flat in enumerate(flats):
            # Buckets of tensor-parallel shards are counted separately, so that tp ranks with
            # different numbers of them draw the same factors for replicated tensors.
            seed = 2 * bucket_counts[flat.tp_local] + flat.tp_local
            self._add_bucket(index, flat, rank)
            self._seeds[index] = seed
            bucket_counts[flat.tp_local] += 1
        for index in self._factored:
            self.carried.state[f"{index}.error"] = torch.zeros_like(
                self.buffers[index], dtype=wide_dtype(flats[index].dtype)
            )
        self.reset()

    def _add_bucket(self, index: int, flat: Flat, rank: int) -> None:
        """Decide whether each tensor of a bucket is factored, and allocate the factors."""
        device = self.buffers[index].device
        offset = 0
        for shape in flat.shapes:
            numel = prod(shape)
            factor_columns = factor_rank(shape, rank)
            if factor_columns:
                rows = shape[0]
                columns = numel // rows
                matrices = self._factored.setdefault(index, [])
                name = f"{index}.{len(matrices)}.right"
                matrices.append(_FactoredMatrix(offset, rows, columns, name))
                self.carried.state[name] = torch.empty(
                    factor_columns, columns, dtype=wide_dtype(flat.dtype), device=device
                )
            else:
                self._uncompressed.setdefault(index, []).append((offset, numel))
            offset += numel

    def reset(self) -> None:
        """Set residuals and the step count to zero, and draw the initial factors."""
        for name, tensor in self.carried.state.items():
            if not name.endswith(".right"):
                tensor.zero_()
        for index, matrices in self._factored.items():
            # All ranks draw the same factors.
            generator = torch.Generator().manual_seed(self._seeds[index])
            for matrix in matrices:
                right = self.carried.state[matrix.right]
                right.copy_(torch.randn(right.shape, generator=generator))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Residuals, factors and the number of steps by name, for checkpoints."""
        return self.carried.state

    def start(self, index: int) -> None:
        """Send the left factors and the uncompressed tensors of a bucket."""
        if index == 0:
            steps, new_steps = self.carried.change("steps")
            torch.add(steps, 1, out=new_steps)
        buffer = self.buffers[index]
        is_early = int(self.carried.current("steps")) <= self._uncompressed_steps
        if is_early or index not in self._factored:
            work = launched(dist.all_reduce(buffer, group=self._group, async_op=True))
            self._works[index] = (work, [])
            return

        last_error, error = self.carried.change(f"{index}.error")
        # Until `finish`, `error` is the gradient plus the last residual, which factors approximate.
        torch.add(last_error, buffer, out=error)
        lefts = [
            _orthonormal(self.carried.current(matrix.right)) @ matrix.view_in(error).T
            for matrix in self._factored[index]
        ]
        uncompressed = [
            buffer[offset : offset + numel].to(error.dtype)
            for offset, numel in self._uncompressed.get(index, [])
        ]
        self._works[index] = self._start_sum([*lefts, *uncompressed])
        self._after_first_message(index)

    def finish(self, index: int) -> None:
        """Wait for the right factors of a bucket, and compute the sum and the new residual."""
        self._start_second_messages()
        work, rights = self._works.pop(index)
        work.wait()
        if not rights:
            return
        buffer = self.buffers[index]
        error = self.carried.current(f"{index}.error")
        matrices = self._factored[index]
        sums = self._left_sums.pop(index)
        # `sums` continues with the uncompressed tensors.
        for matrix, left, right in zip(matrices, sums, rights, strict=False):
            matrix.view_in(buffer).copy_(left.T @ right)
            before, into = self.carried.change(matrix.right)
            into.copy_(torch.where(right.isfinite().all(), right, before))
            matrix.view_in(error).sub_(matrix.view_in(buffer), alpha=1 / self._group.size())

        ranges = self._uncompressed.get(index, [])
        for (offset, numel), total in zip(ranges, sums[len(matrices) :], strict=True):
            buffer[offset : offset + numel].copy_(total)
            error[offset : offset + numel].zero_()
        # An overflow must not reach later steps.
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _start_second_message(self, index: int) -> None:
        """Send the right factors of a bucket."""
        work, sums = self._works[index]
        work.wait()
        matrices = self._factored[index]
        error = self.carried.current(f"{index}.error")
        lefts = [_orthonormal(left) for left in sums[: len(matrices)]]
        self._left_sums[index] = [*lefts, *sums[len(matrices) :]]
        rights = [
            left @ matrix.view_in(error) for matrix, left in zip(matrices, lefts, strict=True)
        ]
        self._works[index] = self._start_sum(rights)

    def _start_sum(self, tensors: list[torch.Tensor]) -> tuple[dist.Work, list[torch.Tensor]]:
        """Start the sum of tensors in one message. Return (work, sum of each tensor)."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = launched(dist.all_reduce(flat, group=self._group, async_op=True))
        sizes = [tensor.numel() for tensor in tensors]
        sums = [
            total.view(tensor.shape)
            for total, tensor in zip(flat.split(sizes), tensors, strict=True)
        ]
        return work, sums


def _pack(
    packing: Packing, rows: torch.Tensor, carried: PersistentTensors, name: str
) -> torch.Tensor:
    """Pack rows. Use error feedback if `carried` has a residual of this name."""
    if name not in carried.state:
        return packing.pack(rows)
    error, into = carried.change(name)
    return packing.pack(rows, error, into=into)


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows [rank, n] that span the same space as `rows`."""
    return torch.linalg.qr(rows.T).Q.T


def factor_rank(shape: Sequence[int], rank: int) -> int:
    """Return the rank of a tensor's factors, or 0 if it is sent uncompressed.

    The tensor is treated as a matrix: its first dimension gives the rows, and all other dimensions
    together give the columns. The tensor is sent uncompressed if the factors would have at least
    half as many elements as the tensor.

    Args:
        shape: Shape of the tensor.
        rank: Configured rank.
    """
    if len(shape) < 2 or not prod(shape):
        return 0
    rows = shape[0]
    columns = prod(shape[1:])
    rank = min(rows, columns, rank)
    return rank if 2 * (rows + columns) * rank < rows * columns else 0


def factor_numel(shape: Sequence[int], rank: int) -> int:
    """Return the number of elements that are summed over the ranks for a tensor.

    Args:
        shape: Shape of the tensor.
        rank: Configured rank of the factors.
    """
    factor_columns = factor_rank(shape, rank)
    if factor_columns == 0:
        return prod(shape)
    return (shape[0] + prod(shape[1:])) * factor_columns


class QuantisedAllGather(DefaultAllocMixin, AllGather):
    """Quantised all-gather of one unit of `fully_shard`.

    Args:
        segments: Shards of the unit's parameters, in the order of the all-gather.
        bits: Bits per element.
    """

    def __init__(self, segments: Sequence[Segment], *, bits: Bits) -> None:
        self._segments = tuple(segments)
        self._bits = bits

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [ranks x n] with every rank's quantised `input_tensor` [n].

        Synchronous.
        """
        dtype = input_tensor.dtype
        if not dtype.is_floating_point:
            # torch passes the parameters of a unit with several dtypes as bytes.
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        ranks = group.size()
        packing = Packing.for_rows(self._segments, self._bits, numel=input_tensor.numel())
        # [1, row_bytes]
        packed = packing.pack(input_tensor.view(1, -1))
        gathered = packed.new_empty(ranks * packed.shape[1])
        all_gather_single(gathered, packed[0], group=group)
        output_tensor.view(ranks, -1).copy_(packing.unpack(gathered.view(ranks, -1), dtype))


class QuantisedReduceScatter(DefaultAllocMixin, SynchronousReduceScatter):
    """Quantised reduce-scatter of one unit of `fully_shard`.

    Args:
        segments: Shards of the unit's trainable parameters, in the order of the reduce-scatter.
        bits: Bits per element.
        feedback: Whether the residual is added to the next step's gradients.
        levels: Groups inside and across machines, or None. With these groups, gradients are first
            summed inside a machine. The sums are quantised again and sent across machines.
        revocable: Whether steps may be skipped.

    Attributes:
        carried: The residual, float32 [ranks, padded], after the first call with feedback.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        bits: Bits,
        feedback: bool,
        levels: Levels | None = None,
        revocable: bool = False,
    ) -> None:
        self._segments = tuple(segments)
        self._bits = bits
        self._levels = levels
        self._feedback = feedback
        self.carried = PersistentTensors(revocable)

    def reduce(self, output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write this rank's shard of the sum of `stacked` [ranks x n] to `output` [n]."""
        rows = stacked.view(group.size(), -1)
        packing = Packing.for_rows(self._segments, self._bits, numel=rows.shape[1])
        if self._feedback:
            self._ensure_error(packing, rows)
        packed = _pack(packing, rows, self.carried, "error")
        if self._levels is None:
            total = packing.unpack_sum(_all_to_all(packed, group), stacked.dtype)
        else:
            total = self._reduce_by_levels(packing, packed, stacked.dtype, self._levels)
        output.view(-1).copy_(total)

    def _ensure_error(self, packing: Packing, rows: torch.Tensor) -> None:
        """Create the residual, or reset it to zeros if the size of the rows has changed."""
        shape = (rows.shape[0], packing.padded)
        error = self.carried.state.get("error")
        if error is None or error.shape != shape:
            zeros = torch.zeros(shape, dtype=torch.float32, device=rows.device)
            self.carried.replace({**self.carried.state, "error": zeros})

    def _reduce_by_levels(
        self, packing: Packing, packed: torch.Tensor, dtype: torch.dtype, levels: Levels
    ) -> torch.Tensor:
        """Sum inside the machine first, then across machines.

        Ranks are numbered machine by machine. The l-th rank of a machine first receives, from the
        ranks of its machine, the rows for the l-th ranks of all machines.
        """
        inside = levels.inside
        across = levels.across
        # [machines, positions, bytes] -> [positions, machines, bytes]
        by_position = packed.view(across.size(), inside.size(), -1).transpose(0, 1).contiguous()
        received = _all_to_all(by_position.view(inside.size(), -1), inside)
        received = received.view(inside.size(), across.size(), -1)
        # [positions, machines, bytes] -> [machines, n]
        sums = torch.stack(
            [packing.unpack_sum(received[:, node], dtype) for node in range(across.size())]
        )
        return packing.unpack_sum(_all_to_all(packing.pack(sums), across), dtype)


def _all_to_all(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send row r to rank r, and return the received rows in the order of the ranks."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received
