"""Compressed collectives of the data-parallel ranks. Fewer bytes are sent; the received values
differ from the sent ones by a bounded error.

    collective            stage     on the wire
    state bucket, int8 or int4  0         quantised parts to their owners, quantised sums back
    two errors, with feedback bucket, PowerSGD      0         two thin factors of each matrix
    its error and factors all-gather            1 to 3    quantised shards; every rank uses what
    arrived, its own too          none reduce-scatter        1 to 3    quantised parts to their
    owners; across machines once more (2 hops)  an error, with feedback

Error feedback adds the residual of the last step to this step's gradients before they are
quantised. Vectors (norms, biases) are sent uncompressed. On every rank the result has the same
bits. The schemes are those of ZeRO++ (arXiv:2306.10209) and PowerSGD (arXiv:1905.13727).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single
from plait._torch.units import AllGather, ReduceScatter
from plait.cluster.mesh import Levels
from plait.comm.buckets import Flat
from plait.comm.quantise import BLOCK, Bits, Packing, Segment, blocks_of
from plait.shards import shard_size

_HOPS_AT_ONCE = 2
"""Buckets on their first hop before the oldest is waited for: the link has the next while it is
added up.
"""
POWERSGD_START = 10
"""Steps that are reduced uncompressed before factors replace gradients: early gradients change too
much.
"""


@dataclass
class Carried:
    """Tensors that a compressed collective keeps between steps (residuals, factors), by name.

    A skipped step must not change them, but whether a step is skipped is known only after all of
    its gradients were sent. If steps may be skipped, the new value of a tensor is written to a
    second tensor, which replaces the first when the step is applied.
    """

    revocable: bool
    """True if steps may be skipped. Otherwise new values overwrite the old ones."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values after the last step that was not skipped, which a checkpoint stores."""
    _made: dict[str, torch.Tensor] = field(default_factory=dict)
    """New values of the running step."""
    _spare: dict[str, torch.Tensor] = field(default_factory=dict)

    def now(self, name: str) -> torch.Tensor:
        """Return the value of a tensor, with the changes of the running step so far."""
        return self._made.get(name, self.state[name])

    def change(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (value, destination): the caller writes the new value in full to the destination.

        Both are one tensor if the old value need not be kept.
        """
        now = self.now(name)
        if self.revocable and name not in self._made:
            spare = self._spare.pop(name, None)
            self._made[name] = (
                torch.empty_like(now) if spare is None or spare.shape != now.shape else spare
            )
        return now, self._made.get(name, now)

    @property
    def aside(self) -> list[torch.Tensor]:
        """All tensors in memory besides `state`."""
        return [*self._made.values(), *self._spare.values()]

    def end_step(self, *, skipped: bool) -> None:
        """Keep the new values of the step that has ended, or drop them if it was skipped."""
        for name, made in self._made.items():
            if skipped:
                self._spare[name] = made
            else:
                self._spare[name], self.state[name] = self.state[name], made
        self._made = {}


class _TwoHops(ABC):
    """Buckets that are sent twice. A bucket's second message starts with the bucket after the next,
    so it overlaps with the backward too; the order of starts alone decides which bucket that is, so
    it is the same on every rank.
    """

    def __init__(self) -> None:
        self._first_hop: list[int] = []
        """Buckets that are on it, in order."""

    def _started(self, index: int) -> None:
        """A bucket's first hop has begun."""
        self._first_hop.append(index)
        if len(self._first_hop) > _HOPS_AT_ONCE:
            self._second_hop(self._first_hop.pop(0))

    def _start_the_rest(self) -> None:
        """No further bucket begins before the first is finished."""
        while self._first_hop:
            self._second_hop(self._first_hop.pop(0))

    @abstractmethod
    def _second_hop(self, index: int) -> None:
        """Wait for a bucket's first hop, and begin its second."""


class QuantisedBuckets(_TwoHops):
    """Buckets (see `comm.buckets`) whose matrices are sent in `bits`: parts to their owners, which
    sum them and return the sums. Buckets that hold a vector are summed as they are.
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
        """A bucket as its owners' parts [ranks, part], zeros behind its end; None where it is
        summed as it is.
        """
        self.buffers: list[torch.Tensor] = []
        self._works: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        """Bucket to what is sent, and what it fills."""
        self.carried = Carried(revocable)
        """Errors by name, float32; none without feedback."""
        for index, flat in enumerate(flats):
            if not flat.matrices:
                self._rows.append(None)
                self.buffers.append(torch.zeros(flat.numel, dtype=flat.dtype, device=device))
                continue
            part = part_of(flat.numel, group.size())
            rows = torch.zeros(group.size(), part, dtype=flat.dtype, device=device)
            self._rows.append(rows)
            self.buffers.append(rows.view(-1)[: flat.numel])
            if feedback:
                self.carried.state[f"{index}.sent"] = torch.zeros(
                    group.size(), part, dtype=torch.float32, device=device
                )
                self.carried.state[f"{index}.owned"] = torch.zeros(
                    1, part, dtype=torch.float32, device=device
                )

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """See Buckets."""
        return self.carried.state

    def start(self, index: int) -> None:
        """See Buckets."""
        rows = self._rows[index]
        if rows is None:
            buffer = self.buffers[index]
            self._works[index] = (
                _launched(dist.all_reduce(buffer, group=self._group, async_op=True)),
                buffer,
            )
            return
        packed = _pack(self._packing(rows), rows, self.carried, f"{index}.sent")
        received = torch.empty_like(packed)
        self._works[index] = (
            _launched(dist.all_to_all_single(received, packed, group=self._group, async_op=True)),
            received,
        )
        self._started(index)

    def finish(self, index: int) -> None:
        """See Buckets."""
        self._start_the_rest()
        work, everyone = self._works.pop(index)
        work.wait()
        rows = self._rows[index]
        if rows is not None:
            rows.copy_(self._packing(rows).unpack(everyone.view(rows.shape[0], -1), torch.float32))
            rows.view(-1)[
                self.buffers[index].numel() :
            ].zero_()  # a block that is not finite reaches behind the end

    def _second_hop(self, index: int) -> None:
        work, received = self._works[index]
        work.wait()
        rows = self._rows[index]
        assert rows is not None
        packing = self._packing(rows)
        packed = _pack(
            packing,
            packing.unpack_sum(received, torch.float32).unsqueeze(0),
            self.carried,
            f"{index}.owned",
        )
        everyone = packed.new_empty(rows.shape[0] * packed.shape[1])
        self._works[index] = (
            _launched(all_gather_single(everyone, packed[0], group=self._group, async_op=True)),
            everyone,
        )

    def _packing(self, rows: torch.Tensor) -> Packing:
        return Packing((Segment(rows.shape[1], matrix=True),), self._bits)


def part_of(numel: Any, ranks: Any) -> Any:
    """Elements of a bucket that one rank owns: full blocks of quantization (ints or arrays)."""
    return blocks_of(shard_size(numel, ranks)) * BLOCK


@dataclass(frozen=True)
class _Factored:
    """A matrix of a bucket that is sent as factors, `left.T @ right`. Both lie: [rank, rows] and
    [rank, columns] make the products with the matrix several times as fast on a CPU as their
    transposes do.
    """

    at: int
    rows: int
    columns: int
    right: str
    """The name of the factor `right` of the last step."""

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """[rows, columns], a view."""
        return buffer[self.at : self.at + self.rows * self.columns].view(self.rows, -1)


class PowerSGDBuckets(_TwoHops):
    """Buckets whose matrices are sent as two factors of `rank` columns, with error feedback and
    warm start; a matrix that would not shrink to half is sent uncompressed. The results are those
    of torch's DDP hook, but the caller's thread issues every collective, in one order, and the
    first factors overlap with the backward.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        flats: Sequence[Flat],
        device: torch.device,
        *,
        rank: int,
        whole_steps: int = POWERSGD_START,
        revocable: bool = False,
    ) -> None:
        """`whole_steps` first ones are summed as they are."""
        super().__init__()
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self._group = group
        self._whole_steps = whole_steps
        self._works: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}
        """Bucket to what is sent: nothing but the buffer, left factors with the uncompressed
        tensors, or right factors.
        """
        self._lefts: dict[int, list[torch.Tensor]] = {}
        """Of buckets whose right factors are sent: orthonormal left factors, then the uncompressed
        sums.
        """
        self.carried = Carried(revocable, {"steps": torch.zeros((), dtype=torch.int64)})
        """Errors, right factors and the number of steps, by name."""
        self._factored: dict[int, list[_Factored]] = {}
        self._whole: dict[int, list[tuple[int, int]]] = {}
        """Bucket to (offset, length) of what is sent as it is."""
        drawn = {True: 0, False: 0}
        for index, flat in enumerate(flats):
            # Counted by kind: a rank of the tp axis that has fewer buckets of its own parts draws
            # the same factors for what all hold.
            self._divide(index, flat, rank, seed=2 * drawn[flat.tp_local] + flat.tp_local)
            drawn[flat.tp_local] += 1
        for index in self._factored:
            self.carried.state[f"{index}.error"] = torch.zeros_like(
                self.buffers[index], dtype=_wide(flats[index].dtype)
            )

    def _divide(self, index: int, flat: Flat, rank: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)  # the same on every rank
        buffer = self.buffers[index]
        at = 0
        for shape in flat.shapes:
            numel = prod(shape)
            columns = factor_rank(shape, rank)
            if columns:
                drawn = torch.randn(columns, numel // shape[0], generator=generator)
                right = drawn.to(buffer.device, _wide(flat.dtype))
                factored = self._factored.setdefault(index, [])
                factored.append(
                    _Factored(at, shape[0], numel // shape[0], f"{index}.{len(factored)}.right")
                )
                self.carried.state[factored[-1].right] = right
            else:
                self._whole.setdefault(index, []).append((at, numel))
            at += numel

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """See Buckets."""
        return self.carried.state

    def start(self, index: int) -> None:
        """See Buckets."""
        if index == 0:
            steps, into = self.carried.change("steps")
            torch.add(steps, 1, out=into)
        if int(self.carried.now("steps")) <= self._whole_steps or index not in self._factored:
            self._works[index] = (
                _launched(dist.all_reduce(self.buffers[index], group=self._group, async_op=True)),
                [],
            )
            return
        buffer, (before, error) = self.buffers[index], self.carried.change(f"{index}.error")
        torch.add(before, buffer, out=error)  # what should be sent
        lefts = [
            _orthonormal(self.carried.now(f.right)) @ f.of(error).T for f in self._factored[index]
        ]
        whole = [
            buffer[at : at + numel].to(error.dtype) for at, numel in self._whole.get(index, [])
        ]
        self._works[index] = self._sum([*lefts, *whole])
        self._started(index)

    def finish(self, index: int) -> None:
        """See Buckets."""
        self._start_the_rest()
        work, rights = self._works.pop(index)
        work.wait()
        if not rights:
            return
        buffer = self.buffers[index]
        error = self.carried.now(f"{index}.error")
        factored = self._factored[index]
        summed = self._lefts.pop(index)
        for f, left, right in zip(factored, summed, rights, strict=False):
            f.of(buffer).copy_(left.T @ right)
            before, into = self.carried.change(f.right)
            into.copy_(torch.where(right.isfinite().all(), right, before))
            f.of(error).sub_(f.of(buffer), alpha=1 / self._group.size())
        for (at, numel), total in zip(
            self._whole.get(index, []), summed[len(factored) :], strict=True
        ):
            buffer[at : at + numel].copy_(total)
            error[at : at + numel].zero_()
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # an overflow is of this step only

    def _second_hop(self, index: int) -> None:
        work, summed = self._works[index]
        work.wait()
        factored = self._factored[index]
        error = self.carried.now(f"{index}.error")
        lefts = [_orthonormal(left) for left in summed[: len(factored)]]
        self._lefts[index] = [*lefts, *summed[len(factored) :]]
        self._works[index] = self._sum(
            [left @ f.of(error) for f, left in zip(factored, lefts, strict=True)]
        )

    def _sum(self, tensors: list[torch.Tensor]) -> tuple[dist.Work, list[torch.Tensor]]:
        """(the work, what will be their sums), of tensors in one message."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = _launched(dist.all_reduce(flat, group=self._group, async_op=True))
        return work, [
            part.view(t.shape)
            for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
        ]


def _pack(packing: Packing, rows: torch.Tensor, carried: Carried, name: str) -> torch.Tensor:
    """Pack, with the error of that name where there is one."""
    if name not in carried.state:
        return packing.pack(rows)
    error, into = carried.change(name)
    return packing.pack(rows, error, into=into)


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """[rank, n] with the same span of rows."""
    return torch.linalg.qr(rows.T).Q.T


def factor_rank(shape: Sequence[int], rank: int) -> int:
    """Columns of the factors of a tensor, seen as a matrix of its first dimension; 0 where it is
    sent as it is, because factors are not less than half of it.
    """
    if len(shape) < 2 or not prod(shape):
        return 0
    rows = shape[0]
    columns = prod(shape[1:])
    rank = min(rows, columns, rank)
    return rank if 2 * (rows + columns) * rank < rows * columns else 0


def factor_numel(shape: Sequence[int], rank: int) -> int:
    """Elements that are summed over the ranks for a tensor."""
    columns = factor_rank(shape, rank)
    return (shape[0] + prod(shape[1:])) * columns if columns else prod(shape)


class QuantisedAllGather(AllGather):
    """For one unit of `fully_shard`, whose parameters' shards are `segments`."""

    def __init__(self, segments: Sequence[Segment], *, bits: Bits) -> None:
        self._segments = tuple(segments)
        self._bits = bits

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` [ranks x n] from every rank's quantised `input_tensor` [n]. Done when it
        returns.
        """
        dtype = input_tensor.dtype
        if not dtype.is_floating_point:  # parameters of several dtypes, as bytes
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        packing = Packing.of(self._segments, self._bits, numel=input_tensor.numel())
        packed = packing.pack(input_tensor.view(1, -1))
        everyone = packed.new_empty(group.size() * packed.shape[1])
        all_gather_single(everyone, packed[0], group=group)
        output_tensor.view(group.size(), -1).copy_(
            packing.unpack(everyone.view(group.size(), -1), dtype)
        )


class QuantisedReduceScatter(ReduceScatter):
    """For one unit of `fully_shard`, whose trainable parameters' shards are `segments`. With
    `levels`, sums inside a machine come first; they are quantised a second time and sent across
    machines once.
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
        self.carried = Carried(revocable)
        """The error, float32 [ranks, padded], once there is one."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` [n] = this rank's part of the sum (or mean: `op` is SUM or AVG) of
        `input_tensor` [ranks x n]. Done when it returns.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduce-scatter by {op}")
        rows = input_tensor.view(group.size(), -1)
        packing = Packing.of(self._segments, self._bits, numel=rows.shape[1])
        self._have_error(packing, rows)
        packed = _pack(packing, rows, self.carried, "error")
        if self._levels is None:
            total = packing.unpack_sum(_all_to_all(packed, group), input_tensor.dtype)
        else:
            total = self._in_two_hops(packing, packed, input_tensor.dtype)
        output_tensor.view(-1).copy_(total)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    def _have_error(self, packing: Packing, rows: torch.Tensor) -> None:
        shape = (rows.shape[0], packing.padded)
        state = self.carried.state
        if self._feedback and ("error" not in state or state["error"].shape != shape):
            state["error"] = torch.zeros(shape, dtype=torch.float32, device=rows.device)

    def _in_two_hops(
        self, packing: Packing, packed: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Ranks count through the machines: what is for position l of any machine goes to this
        machine's position l first.
        """
        assert self._levels is not None
        inside = self._levels.inside
        across = self._levels.across
        by_position = packed.view(across.size(), inside.size(), -1).transpose(0, 1).contiguous()
        here = _all_to_all(by_position.view(inside.size(), -1), inside).view(
            inside.size(), across.size(), -1
        )
        sums = torch.stack(
            [packing.unpack_sum(here[:, node], dtype) for node in range(across.size())]
        )
        return packing.unpack_sum(_all_to_all(packing.pack(sums), across), dtype)


def _all_to_all(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row r to rank r; the rows that came, in the order of the ranks."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _launched(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
