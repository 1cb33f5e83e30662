"""Bytes that expert parallelism sends per optimizer step, from shapes alone, where routers choose
all experts equally often.

With T tokens a micro-batch, k experts a token, h elements of a token, e bytes an element, n ranks
of ep and E experts, a layer sends per micro-batch:

    forward    8 E (n-1)/n bytes of counts, and twice T k h e (n-1)/n: the tokens, and the results
    backward   twice T k h e (n-1)/n: the gradients of both

T are those of a rank: of cp and tp each has a part. With m ranks of tp, which have all tokens
before and after such a layer, it sends T m h e (m-1)/m of results in all-gathers forward, and T m h
e (m-1)/m of gradients of tokens backward, with T m k (m-1)/m of those of weights, of 4 bytes or
more. With sequence parallelism each keeps the results and the gradients of its own tokens, and only
gradients of weights are gathered.

All-to-all is counted as the reduce-scatter that gloo carries out with it. Where experts are chosen
unequally, ranks whose experts have more tokens send back more results; the sum over ranks stays
below n / (n-1) times this. What recomputation repeats is measured elsewhere.
"""

from __future__ import annotations

import numpy as np

from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Array, Ledger
from plait.shards import shard_size


def expert_traffic(facts: ModelFacts, ledger: Ledger) -> dict[str, Array]:
    """Collective to bytes that one rank sends per optimizer step; nothing where ep is 1."""
    experts = facts.experts
    n = ledger.ep
    if experts is None:
        return {}
    own = facts.parameters[0].itemsize
    itemsize = np.ones_like(n) * own if ledger.compute_bytes is None else ledger.compute_bytes
    passes = ledger.accumulation * experts.layers
    m = ledger.tp
    whole = ledger.tokens // ledger.cp
    rows = shard_size(whole, m) * experts.per_token * experts.hidden * itemsize * (n - 1) // n
    counts = 8 * experts.count * (n - 1) // n
    tokens = np.where(ledger.sequence_parallel, 0, 2 * experts.hidden * itemsize)
    gathered = (
        shard_size(whole, m) * (tokens + experts.per_token * np.maximum(itemsize, 4)) * (m - 1)
    )
    return {
        "reduce_scatter": passes * np.where(n > 1, 4 * rows + counts, 0),
        "all_gather": passes * np.where(n > 1, gathered, 0),
    }
