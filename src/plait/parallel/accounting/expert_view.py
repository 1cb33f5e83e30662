"""How experts on different ranks are held: split over ep along their first dimension, as tensor
parallelism splits, then replicated or sharded over the ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plait.parallel.accounting.ledger import Ledger


def is_sharded(ledger: Ledger) -> NDArray[np.bool_]:
    """Whether anything is, or is cast for the computation."""
    return (ledger.dp_shard > 1) | np.asarray(ledger.compute_bytes is not None)


def of_experts(ledger: Ledger) -> Ledger:
    """The degrees as experts see them; nothing is priced yet. Ranks of dp_replicate that have the
    same ones share them out too.
    """
    same = ledger.dp_replicate * ledger.dp_shard * ledger.cp * ledger.tp // ledger.ep
    shards = is_sharded(ledger)
    one = np.ones_like(same)
    return ledger.with_(
        dp_replicate=np.where(shards, one, same),
        dp_shard=np.where(shards, same, one),
        shard_rank=np.where(shards, ledger.edp_rank, 0),
        tp=ledger.ep,
        tp_rank=np.zeros_like(same),
        tensor_dims=dict.fromkeys(ledger.experts, 0),
        memory={},
        traffic={},
    )


def view_of(ledger: Ledger) -> Callable[[str], Ledger]:
    """A parameter's name to the degrees as it sees them."""
    if not ledger.experts:
        return lambda name: ledger
    experts = of_experts(ledger)
    return lambda name: experts if name in ledger.experts else ledger
