"""Account of the reducer's gradient buckets: which parameters share one, and what their sums send.

A plain all-reduce does not need this, because its traffic is that of all gradients together (see
`DataParallel.account`). Compression and other algorithms depend on the size of a bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from plait.comm.algorithms import Name, wire_bytes
from plait.comm.compress import factor_numel, factor_rank, owned_numel
from plait.comm.quantise import packed_bytes
from plait.model.facts import ModelFacts
from plait.parallel.accounting.compression_scheme import copies
from plait.parallel.accounting.ledger import Array, Ledger

ALGORITHM_KINDS: dict[str, tuple[str, ...]] = {
    "reduce-scatter+all-gather": ("reduce_scatter", "all_gather"),
    "ring": ("send",),
    "recursive-doubling": ("send",),
}
"""Collectives that the messages of an algorithm are accounted as, in equal parts.

The hierarchical algorithm is absent, because it sends as many bytes as one all-reduce.
"""


def account_buckets(
    algorithm: str,
    ledger: Ledger,
    facts: ModelFacts,
    numels: Iterable[Array],
    *,
    bucket_bytes: int,
    candidates: NDArray[np.bool_],
) -> Ledger:
    """Add the traffic and memory of stage 0 that depend on the buckets.

    The account is that of the first rank.

    Args:
        algorithm: Name of the algorithm that sums uncompressed gradients.
        ledger: The ledger of all candidate layouts.
        facts: The parameters of the model.
        numels: Elements of every trainable parameter on a rank, in the order of `facts`.
        bucket_bytes: Size of a gradient bucket.
        candidates: The candidates to account, as a mask.
    """
    columns = [np.broadcast_to(numel, candidates.shape) for numel in numels]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "compression", "gradients")
    sums = {kind: np.zeros_like(ledger.dp_replicate) for kind in kinds}
    for candidate in np.flatnonzero(candidates):
        costs = _candidate_costs(
            algorithm,
            ledger,
            facts,
            [int(column[candidate]) for column in columns],
            bucket_bytes=bucket_bytes,
            candidate=int(candidate),
        )
        for kind, count in costs.items():
            sums[kind][candidate] = count

    for kind in ("compression", "gradients"):
        ledger = ledger.add_memory(kind, sums.pop(kind))
    for kind, counts in sums.items():
        ledger = ledger.add_traffic(kind, counts)
    return ledger


def _candidate_costs(
    algorithm: str,
    ledger: Ledger,
    facts: ModelFacts,
    numels: Sequence[int],
    *,
    bucket_bytes: int,
    candidate: int,
) -> Counter[str]:
    """Return the bytes of each kind of traffic and of memory, for one candidate of the ledger."""
    scheme = ledger.scheme
    parameters = facts.trainable
    ranks = int(ledger.dp_replicate[candidate])
    tensor_dims: Mapping[str, int | None] = {}
    if int(ledger.tp[candidate]) > 1:
        tensor_dims = ledger.tensor_dims

    # The same kinds as in `Reducer._partition`.
    sizes: list[tuple[int, Hashable]] = []
    for numel, parameter in zip(numels, parameters, strict=True):
        kind = (
            parameter.itemsize,
            len(parameter.shape) > 1 or not scheme.gradients,
            tensor_dims.get(parameter.name) is not None,
        )
        sizes.append((numel * parameter.itemsize, kind))

    costs = Counter[str]()
    carried = 0
    if scheme.powersgd_rank:
        # PowerSGD's count of steps, int64.
        carried += 8
    for members in partition(sizes, bucket_bytes):
        numel = sum(numels[i] for i in members)
        itemsize = parameters[members[0]].itemsize
        if ledger.reduce_bytes is not None:
            itemsize = int(ledger.reduce_bytes[candidate])

        if not scheme.gradients:
            sent_bytes = sum(
                wire_bytes(
                    cast(Name, algorithm),
                    numel=numel,
                    itemsize=itemsize,
                    ranks=ranks,
                    per_node=ranks,
                )
            )
            for collective in ALGORITHM_KINDS[algorithm]:
                costs[collective] += sent_bytes // len(ALGORITHM_KINDS[algorithm])
        elif len(parameters[members[0]].shape) < 2:
            # Vectors are sent uncompressed.
            costs["all_reduce"] += 2 * (ranks - 1) * numel * itemsize // ranks
        elif scheme.powersgd_rank:
            shapes = [parameters[i].shape for i in members]
            factors = sum(factor_numel(shape, scheme.powersgd_rank) for shape in shapes)
            costs["all_reduce"] += 2 * (ranks - 1) * factors * max(itemsize, 4) // ranks
            right_factors = sum(
                prod(shape[1:]) * factor_rank(shape, scheme.powersgd_rank) for shape in shapes
            )
            # Residuals of the bucket and right factors, at least in float32.
            carried += (numel + right_factors) * max(itemsize, 4) * bool(right_factors)
        else:
            part_numel = owned_numel(numel, ranks)
            for collective in ("reduce_scatter", "all_gather"):
                costs[collective] += (ranks - 1) * packed_bytes(part_numel, scheme.gradient_bits)
            # float32 residuals of both collectives: all parts, and the part of this rank.
            carried += 4 * (ranks + 1) * part_numel * scheme.error_feedback
            # Buckets are padded to equal parts.
            costs["gradients"] += (ranks * part_numel - numel) * itemsize
    costs["compression"] = copies(scheme) * carried
    return costs


def partition(sizes: Sequence[tuple[int, Hashable]], bucket_bytes: int) -> list[list[int]]:
    """Assign parameters to gradient buckets, in about the order in which their gradients appear.

    Parameters are taken in reverse order of registration. A bucket is closed before it exceeds
    `bucket_bytes`, and holds one kind of parameters.

    Args:
        sizes: (bytes, kind) of each parameter.
        bucket_bytes: Largest size of a bucket with several parameters.

    Returns:
        The indices of the parameters of each bucket, ordered by the arrival of their last gradient.
    """
    closed: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        members, filled = open_.get(kind, ([], 0))
        if members and filled + nbytes > bucket_bytes:
            closed.append(members)
            members = []
            filled = 0
        members.append(index)
        open_[kind] = members, filled + nbytes

    buckets = [*closed, *(members for members, _ in open_.values())]
    # The last member is the parameter that was registered first, whose gradient comes last.
    return sorted(buckets, key=lambda members: -members[-1])
