"""Degrees by which a layout splits the parameters of experts.

Expert parameters are split over ep along their first dimension, like a dimension that tensor
parallelism splits. They are replicated or sharded over the ranks that have the same experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plait.parallel.accounting.ledger import Ledger


def is_sharded(ledger: Ledger) -> NDArray[np.bool_]:
    """Return True for candidates that shard parameters, or cast them for the computation."""
    return (ledger.dp_shard > 1) | np.asarray(ledger.compute_bytes is not None)


def of_experts(ledger: Ledger) -> Ledger:
    """Return a ledger with the degrees for parameters of experts, and without any bytes.

    Ranks along dp_replicate that have the same experts shard them as well.
    """
    same = ledger.dp_replicate * ledger.dp_shard * ledger.cp * ledger.tp // ledger.ep
    shards = is_sharded(ledger)
    single = np.ones_like(same)
    # ep takes the place of tp: it splits experts along their first dimension, and tp does not split
    # them.
    return ledger.with_(
        dp_replicate=np.where(shards, single, same),
        dp_shard=np.where(shards, same, single),
        shard_rank=np.where(shards, ledger.edp_rank, 0),
        tp=ledger.ep,
        tp_rank=np.zeros_like(same),
        tensor_dims=dict.fromkeys(ledger.experts, 0),
        memory={},
        traffic={},
    )


def view_of(ledger: Ledger) -> Callable[[str], Ledger]:
    """Return a function from a parameter's name to the ledger with its degrees of parallelism."""
    if not ledger.experts:
        return lambda name: ledger
    expert_ledger = of_experts(ledger)

    def view(name: str) -> Ledger:
        if name in ledger.experts:
            return expert_ledger
        return ledger

    return view
