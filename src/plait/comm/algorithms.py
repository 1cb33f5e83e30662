"""All-reduce algorithms, each a generator of the collectives to wait for: `run` one, or advance
many in turn so that they overlap.

    name                        bytes that a rank sends, of a tensor of S bytes
    sequential messages all-reduce                  the backend's choice; counted as 2 (n-1)/n S
    the backend's reduce-scatter+all-gather   2 (n-1)/n S
    2 hierarchical                2 (g-1)/g S inside, 2 (k-1)/k S/g across                   3, of
    which one crosses machines ring                        2 (n-1)/n S
    2 (n-1) recursive-doubling          log2(n) S
    log2(n), and 2 where n is no power of two

n ranks, g of them on each of k machines. Where n does not divide the tensor, S is that of the
padded one. All are exact sums in a fixed order: the same bits on every rank and in every run. NCCL
chooses its own ring or tree inside a single call; these algorithms are composed of such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single, reduce_scatter_single
from plait.cluster.mesh import Levels
from plait.shards import shard_size

Name = Literal[
    "all-reduce", "reduce-scatter+all-gather", "hierarchical", "ring", "recursive-doubling"
]
Steps = Iterator[list[dist.Work]]
"""Each item was launched and must be waited for before the next is taken. Every rank of the group
takes the items in one order.
"""
Started = tuple[Steps, list[dist.Work]]
"""The remaining steps, and the collectives that were launched."""


def run(steps: Steps) -> None:
    """To the end."""
    for works in steps:
        for work in works:
            work.wait()


def sum_over(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, algorithm: Name, levels: Levels | None = None
) -> Steps:
    """`tensor` [n], contiguous, becomes its sum over the group, in place. `hierarchical` needs the
    intra-node and inter-node groups.
    """
    if algorithm == "hierarchical":
        assert levels is not None
        return _hierarchical(tensor, levels)
    return _FLAT[algorithm](tensor, group)


def wire_bytes(
    algorithm: Name, *, numel: int, itemsize: int, ranks: int, per_node: int = 1
) -> tuple[int, int]:
    """(bytes that a rank sends inside its machine, bytes that it sends to others), by the table.
    Where ranks of one machine and of others are in one flat group, all are counted as crossing when
    the group spans machines (`per_node < ranks`). The most that any rank sends.
    """
    if algorithm == "hierarchical":
        nodes = ranks // per_node
        part = shard_size(numel, per_node)
        return 2 * (per_node - 1) * part * itemsize, 2 * (nodes - 1) * part * itemsize // nodes
    if algorithm == "recursive-doubling":
        power = 1 << (ranks.bit_length() - 1)
        sent = ((power.bit_length() - 1) + (ranks > power)) * numel * itemsize
    elif algorithm == "all-reduce":
        sent = 2 * (ranks - 1) * numel * itemsize // ranks
    else:
        sent = 2 * (ranks - 1) * shard_size(numel, ranks) * itemsize
    return (sent, 0) if per_node >= ranks else (0, sent)


def _single_call(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    yield [_launched(dist.all_reduce(tensor, group=group, async_op=True))]


def _reduce_scatter_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    stacked = padded(tensor, group.size())
    mine = stacked.new_empty(stacked.numel() // group.size())
    yield from reduce_scatter_steps(mine, stacked, group)
    yield [_launched(all_gather_single(stacked, mine, group=group, async_op=True))]
    _unpad(tensor, stacked)


def _hierarchical(tensor: torch.Tensor, levels: Levels) -> Steps:
    stacked = padded(tensor, levels.inside.size())
    mine = stacked.new_empty(stacked.numel() // levels.inside.size())
    yield from reduce_scatter_steps(mine, stacked, levels.inside)
    yield [_launched(dist.all_reduce(mine, group=levels.across, async_op=True))]
    yield [_launched(all_gather_single(stacked, mine, group=levels.inside, async_op=True))]
    _unpad(tensor, stacked)


def _ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    """Chunks are sent around the ring, each rank adds its own; then the sums are sent around once
    more.
    """
    ranks = group.size()
    rank = group.rank()
    stacked = padded(tensor, ranks)
    pieces = stacked.view(ranks, -1)
    arriving = torch.empty_like(pieces[0])
    for step in range(ranks - 1):
        yield exchange(
            pieces[(rank - step) % ranks],
            arriving,
            group,
            to=(rank + 1) % ranks,
            source=(rank - 1) % ranks,
        )
        pieces[(rank - step - 1) % ranks].add_(arriving)
    for step in range(ranks - 1):
        incoming = pieces[(rank - step) % ranks]
        yield exchange(
            pieces[(rank + 1 - step) % ranks],
            incoming,
            group,
            to=(rank + 1) % ranks,
            source=(rank - 1) % ranks,
        )
    _unpad(tensor, stacked)


def _recursive_doubling(tensor: torch.Tensor, group: dist.ProcessGroup) -> Steps:
    """Ranks exchange full tensors with partners 1, 2, 4, ... away. Ranks beyond the largest power
    of two send theirs to a partner first.
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
        tensor.add_(arriving)  # a + b on one side, b + a on the other: the same bits
        distance *= 2
    if rank + power < ranks:
        yield send(tensor, group, to=rank + power)


_FLAT: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], Steps]] = {
    "all-reduce": _single_call,
    "reduce-scatter+all-gather": _reduce_scatter_all_gather,
    "ring": _ring,
    "recursive-doubling": _recursive_doubling,
}


def padded(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """The tensor itself, or a copy with zeros at its end so that `ranks` divides it."""
    missing = -tensor.numel() % ranks
    return torch.cat([tensor, tensor.new_zeros(missing)]) if missing else tensor


def _unpad(tensor: torch.Tensor, stacked: torch.Tensor) -> None:
    if stacked is not tensor:
        tensor.copy_(stacked[: tensor.numel()])


def reduce_scatter_steps(
    output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup
) -> Steps:
    """`output` [n] = this rank's part of the sum of `stacked` [ranks x n]. On gloo by an all-to-all
    and a local sum, which is faster.
    """
    if stacked.device.type != "cpu":
        yield [_launched(reduce_scatter_single(output, stacked, group=group, async_op=True))]
        return
    parts = torch.empty_like(stacked)
    yield [_launched(dist.all_to_all_single(parts, stacked, group=group, async_op=True))]
    torch.sum(parts.view(group.size(), -1), 0, out=output)


def exchange(
    outgoing: torch.Tensor,
    incoming: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    to: int,
    source: int,
) -> list[dist.Work]:
    """Send to one rank of the group and receive from one, at the same time."""
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
        ]
    )


def send(tensor: torch.Tensor, group: dist.ProcessGroup, *, to: int) -> list[dist.Work]:
    """To one rank of the group."""
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, group=group, group_peer=to)])


def receive(tensor: torch.Tensor, group: dist.ProcessGroup, *, source: int) -> list[dist.Work]:
    """From one rank of the group."""
    return dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, group=group, group_peer=source)])


def _launched(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def launch(steps: Steps) -> Started:
    """Begin the first step."""
    return steps, next(steps, [])


def advance(running: Sequence[Started]) -> None:
    """Finish all launched algorithms in turn: while one step is waited for, those of the others
    run. All ranks must have them in one order.
    """
    while running:
        going = []
        for steps, works in running:
            for work in works:
                work.wait()
            following = next(steps, None)
            if following is not None:
                going.append((steps, following))
        running = going
