"""Bytes that expert parallelism sends per optimizer step, from shapes alone, where routers choose all experts equally often.

With T tokens a micro-batch, k experts a token, h elements of a token, e bytes an element, n ranks of ep and E experts, a layer sends per
micro-batch:

    forward    8 E (n-1)/n bytes of counts, and twice T k h e (n-1)/n: the tokens, and the results
    backward   twice T k h e (n-1)/n: the gradients of both

All-to-all is counted as the reduce-scatter that gloo carries out with it. Where experts are chosen unequally, ranks whose experts have more
tokens send back more results; the sum over ranks stays below n / (n-1) times this. What recomputation repeats is measured elsewhere.
"""

from __future__ import annotations

import numpy as np

from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Array, Ledger


def expert_traffic(facts: ModelFacts, ledger: Ledger) -> dict[str, Array]:
    """Collective to bytes that one rank sends per optimizer step; nothing where ep is 1."""
    experts, n = facts.experts, ledger.ep
    if experts is None:
        return {}
    own = facts.parameters[0].itemsize
    itemsize = np.ones_like(n) * own if ledger.compute_bytes is None else ledger.compute_bytes
    rows = ledger.tokens * experts.per_token * experts.hidden * itemsize * (n - 1) // n
    counts = 8 * experts.count * (n - 1) // n
    return {"reduce_scatter": ledger.accumulation * experts.layers * np.where(n > 1, 4 * rows + counts, 0)}
