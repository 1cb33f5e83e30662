"""The reducer's buckets in bytes: which parameters share one, and what their sum sends where that
depends on the bucket's size.

A plain sum does not need this: its bytes are those of all gradients together (`data`'s account).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from plait.comm.algorithms import Name, wire_bytes
from plait.comm.compress import factor_numel, factor_rank, part_of
from plait.comm.quantise import packed_bytes
from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import copies
from plait.parallel.accounting.ledger import Array, Ledger

ALGORITHM_KINDS: dict[str, tuple[str, ...]] = {
    "reduce-scatter+all-gather": ("reduce_scatter", "all_gather"),
    "ring": ("send",),
    "recursive-doubling": ("send",),
}
"""The collectives that the messages of an algorithm count as, in equal parts. The hierarchical
algorithm sends as many bytes as one all-reduce.
"""


def account_buckets(
    algorithm: str,
    ledger: Ledger,
    facts: ModelFacts,
    numels: Iterable[Array],
    *,
    bucket_bytes: int,
    at: NDArray[np.bool_],
) -> Ledger:
    """Traffic and memory of stage 0 with compressed gradients or an algorithm of several messages,
    for the candidates where `at` is true: what the first rank sends. `numels` are the elements of
    every trainable parameter on a rank, in the facts' order.
    """
    scheme = ledger.scheme
    parameters = facts.trainable
    columns = list(numels)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "memory")
    sums = {kind: np.zeros_like(ledger.dp_replicate) for kind in kinds}
    padding = np.zeros_like(ledger.dp_replicate)  # behind the gradients of a bucket, to whole parts
    for candidate in np.flatnonzero(at):
        ranks = int(ledger.dp_replicate[candidate])
        held = [int(np.broadcast_to(column, at.shape)[candidate]) for column in columns]
        split = ledger.tensor_dims if int(ledger.tp[candidate]) > 1 else {}
        sizes = [
            (
                numel * p.itemsize,
                (
                    p.itemsize,
                    len(p.shape) > 1 or not scheme.gradients,
                    split.get(p.name) is not None,
                ),
            )
            for numel, p in zip(held, parameters, strict=True)
        ]
        carried = 0
        if scheme.powersgd_rank:
            carried += 8  # its count of steps
        for members in partition(sizes, bucket_bytes):
            numel = sum(held[i] for i in members)
            itemsize = (
                parameters[members[0]].itemsize
                if ledger.reduce_bytes is None
                else int(ledger.reduce_bytes[candidate])
            )
            if not scheme.gradients:
                sent = sum(
                    wire_bytes(
                        cast(Name, algorithm),
                        numel=numel,
                        itemsize=itemsize,
                        ranks=ranks,
                        per_node=ranks,
                    )
                )
                for kind in ALGORITHM_KINDS[algorithm]:
                    sums[kind][candidate] += sent // len(ALGORITHM_KINDS[algorithm])
            elif len(parameters[members[0]].shape) < 2:
                sums["all_reduce"][candidate] += 2 * (ranks - 1) * numel * itemsize // ranks
            elif scheme.powersgd_rank:
                shapes = [parameters[i].shape for i in members]
                factors = sum(factor_numel(shape, scheme.powersgd_rank) for shape in shapes)
                sums["all_reduce"][candidate] += (
                    2 * (ranks - 1) * factors * max(itemsize, 4) // ranks
                )
                rights = sum(
                    prod(shape[1:]) * factor_rank(shape, scheme.powersgd_rank) for shape in shapes
                )
                carried += (numel + rights) * max(itemsize, 4) * bool(rights)
            else:
                part = part_of(numel, ranks)
                for kind in ("reduce_scatter", "all_gather"):
                    sums[kind][candidate] += (ranks - 1) * packed_bytes(part, scheme.gradient_bits)
                carried += 4 * (ranks + 1) * part * scheme.error_feedback
                padding[candidate] += (ranks * part - numel) * itemsize
        sums["memory"][candidate] += copies(scheme) * carried
    ledger = ledger.add_memory("compression", sums.pop("memory")).add_memory("gradients", padding)
    for kind, count in sums.items():
        ledger = ledger.add_traffic(kind, count)
    return ledger


def partition(sizes: Sequence[tuple[int, Hashable]], bucket_bytes: int) -> list[list[int]]:
    """Buckets of parameters, given as (bytes, kind), in about the order in which their gradients
    appear: last registered first, cut at `bucket_bytes`, one kind a bucket. A bucket comes when its
    last gradient does.
    """
    closed: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        members, held = open_.get(kind, ([], 0))
        if members and held + nbytes > bucket_bytes:
            closed.append(members)
            members = []
            held = 0
        members.append(index)
        open_[kind] = members, held + nbytes
    return sorted(
        [*closed, *(members for members, _ in open_.values())], key=lambda members: -members[-1]
    )
