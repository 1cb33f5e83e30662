"""Bytes that expert parallelism sends per optimizer step, with equally many tokens per expert.

With T tokens per micro-batch, k experts per token, h elements per token, e bytes per element, n
ranks of ep and E experts, a layer sends per micro-batch:

    forward    8 E (n-1)/n bytes of counts, and twice T k h e (n-1)/n: the tokens, and the results
    backward   twice T k h e (n-1)/n: the gradients of both

T are the tokens of a rank, after cp and tp have split them. With m ranks of tp, which have all
tokens before and after such a layer, it sends in all-gathers T m h e (m-1)/m of results in forward,
and in backward T m h e (m-1)/m of gradients of tokens and T m k (m-1)/m gradients of weights, of 4
bytes or more each. With sequence parallelism each rank keeps the results and the gradients of its
tokens, and only gradients of weights are gathered.

All-to-all is counted as the reduce-scatter with which gloo carries it out. If experts are chosen
unequally, ranks whose experts have more tokens send back more results. The sum over ranks stays
below n / (n-1) times this. What recomputation repeats is measured elsewhere.
"""

from __future__ import annotations

import numpy as np

from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Array, Ledger
from plait.shards import shard_size


def expert_traffic(facts: ModelFacts, ledger: Ledger) -> dict[str, Array]:
    """Return the bytes that one rank sends per optimizer step, by collective. 0 where ep is 1."""
    experts = facts.experts
    n = ledger.ep
    if experts is None:
        return {}
    itemsize = np.ones_like(n) * facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = ledger.compute_bytes
    passes = ledger.accumulation * experts.layers
    m = ledger.tp
    tokens = shard_size(ledger.tokens // ledger.cp, m)

    rows = tokens * experts.per_token * experts.hidden * itemsize * (n - 1) // n
    counts = 8 * experts.count * (n - 1) // n
    # Results and gradients of tokens, which sequence parallelism does not gather.
    hidden_bytes = np.where(ledger.sequence_parallel, 0, 2 * experts.hidden * itemsize)
    weight_bytes = experts.per_token * np.maximum(itemsize, 4)
    gathered = tokens * (hidden_bytes + weight_bytes) * (m - 1)
    return {
        "reduce_scatter": passes * np.where(n > 1, 4 * rows + counts, 0),
        "all_gather": passes * np.where(n > 1, gathered, 0),
    }
