"""All-reduce: algorithms of torch's collectives, and buffers that are summed during a backward.

Each algorithm is a generator that yields collectives. The yielded collectives must have ended
before the generator is resumed. `run` executes one algorithm. `advance` executes several in turn,
so that they overlap.

    name                       bytes per rank, tensor of S bytes      sequential messages
    all-reduce                 backend's choice; 2 (n-1)/n S assumed  backend's choice
    reduce-scatter+all-gather  2 (n-1)/n S                            2
    hierarchical               2 (g-1)/g S inside a machine,          3, one of them between
                               2 (k-1)/k S/g between machines         machines
    ring                       2 (n-1)/n S                            2 (n-1)
    recursive-doubling         log2(n) S                              log2(n), 2 more if n is not
                                                                      a power of two

There are n ranks, g on each of k machines. If n does not divide the number of
elements, S is the size of the padded tensor. No algorithm compresses. Each sums in a fixed order,
so that every rank and every run gets the same bits. In a call of NCCL this is the order of NCCL's
ring or tree.

Buckets are buffers of gradients that are summed over a group while the backward runs. In every step
the gradient reducer fills each buffer and calls `start`, and later `finish`, which leaves the sum
in the buffer. All ranks start and finish buffers in the same order, and all starts of a step
precede its first finish.

The buckets in this module use torch's asynchronous all-reduce, or an algorithm of several steps.
Ranks on one machine may use the buckets of `comm.shared_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from plait._torch.groups import all_gather_single, reduce_scatter_single
from plait.cluster.layout import shard_size
from plait.cluster.mesh import Levels

Name = Literal[
    "all-reduce", "reduce-scatter+all-gather", "hierarchical", "ring", "recursive-doubling"
]
Steps = Iterator[list[dist.Work]]
"""Steps of an algorithm, as lists of collectives that have started.

The collectives of a step must have ended before the next step is requested. All ranks of the group
request the steps of all algorithms in the same order.
"""
Started = tuple[Steps, list[dist.Work]]
"""Remaining steps of an algorithm, and the collectives of the step that has started."""


def run(steps: Steps) -> None:
    """Run an algorithm to completion. Collective."""
    for works in steps:
        for work in works:
            work.wait()


def sum_over(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, algorithm: Name, levels: Levels | None = None
) -> Steps:
    """Return the steps that replace a tensor with its sum over the group.

    Args:
        tensor: Contiguous tensor [n], changed in place.
        group: The process group.
        algorithm: Name of the algorithm.
        levels: Groups inside and across machines, which `hierarchical` requires.
    """
    if algorithm == "hierarchical":
        assert levels is not None
        return _hierarchical(tensor, levels)
    return _FLAT_ALGORITHMS[algorithm](tensor, group)


def wire_bytes(
    algorithm: Name, *, numel: int, itemsize: int, ranks: int, per_node: int = 1
) -> tuple[int, int]:
    """Return (bytes inside the machine, bytes to other machines) of the rank that sends most.

    The table in the module docstring has the formulas. If the group spans machines, only
    `hierarchical` counts bytes as sent inside a machine.

    Args:
        algorithm: Name of the algorithm.
        numel: Elements of the tensor.
        itemsize: Bytes per element.
        ranks: Ranks of the group.
        per_node: Ranks of the group on each machine.
    """
    if algorithm == "hierarchical":
        nodes = ranks // per_node
        shard_bytes = shard_size(numel, per_node) * itemsize
        return 2 * (per_node - 1) * shard_bytes, 2 * (nodes - 1) * shard_bytes // nodes

    if algorithm == "recursive-doubling":
        power = 1 << (ranks.bit_length() - 1)
        doublings = power.bit_length() - 1
        # A rank with a partner beyond the power of two also sends the result to it.
        messages = doublings + (ranks > power)
        sent_bytes = messages * numel * itemsize
    elif algorithm == "all-reduce":
        sent_bytes = 2 * (ranks - 1) * numel * itemsize // ranks
    else:
        sent_bytes = 2 * (ranks - 1) * shard_size(numel, ranks) * itemsize
    if per_node >= ranks:
        return sent_bytes, 0
    return 0, sent_bytes


def _single_call(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    yield [launched(dist.all_reduce(tensor, group=group, async_op=True))]


def _reduce_scatter_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    # Every rank sums one shard, and then all ranks gather the sums.
    stacked = padded(tensor, group.size())
    shard = stacked.new_empty(stacked.numel() // group.size())
    yield from reduce_scatter_steps(shard, stacked, group)
    yield [launched(all_gather_single(stacked, shard, group=group, async_op=True))]
    _unpad(tensor, stacked)


def _hierarchical(tensor: torch.Tensor, levels: Levels) -> Steps:
    # Between machines each rank only sends its shard, which is 1/g of the tensor.
    stacked = padded(tensor, levels.inside.size())
    shard = stacked.new_empty(stacked.numel() // levels.inside.size())
    yield from reduce_scatter_steps(shard, stacked, levels.inside)
    yield [launched(dist.all_reduce(shard, group=levels.across, async_op=True))]
    yield [launched(all_gather_single(stacked, shard, group=levels.inside, async_op=True))]
    _unpad(tensor, stacked)


def _ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    """Sum chunks while they move around a ring of ranks, then send the sums around the ring."""
    ranks = group.size()
    rank = group.rank()
    following = (rank + 1) % ranks
    previous = (rank - 1) % ranks
    stacked = padded(tensor, ranks)
    # [n] -> [ranks, n / ranks]
    chunks = stacked.view(ranks, -1)
    arriving = torch.empty_like(chunks[0])

    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        yield exchange(outgoing, arriving, group, to=following, source=previous)
        chunks[(rank - step - 1) % ranks].add_(arriving)

    # This rank now has the sum of chunk `rank + 1`.
    for step in range(ranks - 1):
        outgoing = chunks[(rank + 1 - step) % ranks]
        incoming = chunks[(rank - step) % ranks]
        yield exchange(outgoing, incoming, group, to=following, source=previous)
    _unpad(tensor, stacked)


def _recursive_doubling(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    """Exchange full tensors with partners at distances 1, 2, 4, ...

    Ranks beyond the largest power of two send their tensor to a partner first, and receive the sum
    at the end.
    """
    ranks = group.size()
    rank = group.rank()
    power = 1 << (ranks.bit_length() - 1)
    if rank >= power:
        yield send(tensor, group, to=rank - power)
        yield receive(tensor, group, source=rank - power)
        return

    arriving = torch.empty_like(tensor)
    if rank + power < ranks:
        yield receive(arriving, group, source=rank + power)
        tensor.add_(arriving)

    distance = 1
    while distance < power:
        partner = rank ^ distance
        yield exchange(tensor, arriving, group, to=partner, source=partner)
        # One partner computes a + b and the other b + a, which have the same bits.
        tensor.add_(arriving)
        distance *= 2

    if rank + power < ranks:
        yield send(tensor, group, to=rank + power)


_FLAT_ALGORITHMS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], Steps]] = {
    "all-reduce": _single_call,
    "reduce-scatter+all-gather": _reduce_scatter_all_gather,
    "ring": _ring,
    "recursive-doubling": _recursive_doubling,
}


def padded(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the tensor itself if `ranks` divides it, or a copy with zeros at its end."""
    missing = -tensor.numel() % ranks
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing)])


def _unpad(tensor: torch.Tensor, stacked: torch.Tensor) -> None:
    """Copy the sum from `stacked` to `tensor`, unless `padded` has returned `tensor` itself."""
    if stacked is not tensor:
        tensor.copy_(stacked[: tensor.numel()])


def reduce_scatter_steps(
    output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup
) -> Steps:
    """Return the steps that write this rank's shard of the sum of `stacked` to `output`.

    Args:
        output: Tensor [n].
        stacked: Addend of this rank [ranks x n].
        group: The process group.
    """
    if stacked.device.type != "cpu":
        yield [launched(reduce_scatter_single(output, stacked, group=group, async_op=True))]
        return
    # gloo's own reduce-scatter is slower than an all-to-all and a local sum.
    shards = torch.empty_like(stacked)
    yield [launched(dist.all_to_all_single(shards, stacked, group=group, async_op=True))]
    # [ranks, n] -> [n]
    torch.sum(shards.view(group.size(), -1), 0, out=output)


def exchange(
    outgoing: torch.Tensor,
    incoming: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    to: int,
    source: int,
) -> list[dist.Work]:
    """Start to send a tensor to one rank of the group and to receive one from another rank."""
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
        ]
    )


def send(tensor: torch.Tensor, group: dist.ProcessGroup, *, to: int) -> list[dist.Work]:
    """Start to send a tensor to one rank of the group."""
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=group, group_peer=to)])


def receive(tensor: torch.Tensor, group: dist.ProcessGroup, *, source: int) -> list[dist.Work]:
    """Start to receive a tensor from one rank of the group."""
    return dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, group=group, group_peer=source)])


def launched(work: dist.Work | None) -> dist.Work:
    """Return the argument with the type `Work`. torch annotates it as optional."""
    assert work is not None
    return work


def launch(steps: Steps) -> Started:
    """Start the first step of an algorithm."""
    return steps, next(steps, [])


def advance(running: Sequence[Started]) -> None:
    """Run started algorithms to their end, one step of each in turn. Collective.

    All ranks must pass the algorithms in the same order.
    """
    while running:
        unfinished = []
        for steps, works in running:
            for work in works:
                work.wait()
            started = next(steps, None)
            if started is not None:
                unfinished.append((steps, started))
        running = unfinished


@dataclass(frozen=True)
class Flat:
    """Content of a buffer: flattened tensors, one after the other.

    A buffer has either shards of tensor parallelism or replicated tensors. The position of an
    element determines in which order it is summed and with which other elements it is quantised.
    Replicated tensors must get the same bits on all ranks of tp, so their positions must not depend
    on the sizes of shards.

    Attributes:
        dtype: Dtype of the buffer.
        shapes: Shapes of the tensors.
        tp_local: Whether the tensors are shards of tensor parallelism.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    tp_local: bool = False

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(map(prod, self.shapes))

    @property
    def matrices(self) -> bool:
        """True if all tensors have two or more dimensions, so that they may be compressed."""
        return all(len(shape) > 1 for shape in self.shapes)


class Buckets(Protocol):
    """Interface of gradient buckets. The module docstring explains the order of calls."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers of this rank, [n] each, initially zero."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """State that persists between steps, by name, for checkpoints."""

    def start(self, index: int) -> None:
        """Start the sum of a filled buffer. Nothing may use the buffer before `finish` returns."""

    def finish(self, index: int) -> None:
        """Wait until the buffer has the sum over all ranks."""


class GroupBuckets:
    """Gradient buckets that are summed by torch's all-reduce."""

    def __init__(
        self, group: dist.ProcessGroup, flats: Sequence[Flat], device: torch.device
    ) -> None:
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self.state: dict[str, torch.Tensor] = {}
        self._group = group
        self._works: dict[int, dist.Work] = {}

    def start(self, index: int) -> None:
        """Start the all-reduce of a buffer."""
        work = dist.all_reduce(self.buffers[index], group=self._group, async_op=True)
        self._works[index] = launched(work)

    def finish(self, index: int) -> None:
        """Wait for the all-reduce of a buffer."""
        self._works.pop(index).wait()


class AlgorithmBuckets:
    """Gradient buckets that are summed by an algorithm of `sum_over`.

    The first step of each buffer overlaps with the backward. The first `finish` performs the
    remaining steps of all buffers in turn.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        flats: Sequence[Flat],
        device: torch.device,
        *,
        algorithm: Name,
        levels: Levels | None = None,
    ) -> None:
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self.state: dict[str, torch.Tensor] = {}
        self._sum = partial(sum_over, group=group, algorithm=algorithm, levels=levels)
        self._running: list[Started] = []

    def start(self, index: int) -> None:
        """Start the first step of a buffer's sum."""
        self._running.append(launch(self._sum(self.buffers[index])))

    def finish(self, index: int) -> None:
        """Finish the sums of all started buffers, `index` among them."""
        advance(self._running)
        self._running = []
