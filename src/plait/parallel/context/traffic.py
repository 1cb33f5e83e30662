"""Bytes that context parallelism sends over the cp axis per optimizer step, from the shapes alone.

With T tokens a micro-batch, n ranks, q and w elements of a token's queries and of its keys and
values together (of a tp rank), e bytes an element, a block sends per micro-batch:

    all-gather-kv   forward all-gather T w e (n-1)/n       backward the same, and a reduce-scatter
    of as much ring            forward n-1 messages of T w e / n      backward the same, and n of
    gradients in float32 or wider ulysses         forward all-to-all (2 q + w') (T/n) e (n-1)/n, w'
    with repeated heads; backward the same

All-to-all is counted as the reduce-scatter that gloo carries out with it. What recomputation
repeats is measured elsewhere. Sequence lengths are taken to divide. A parameter's gradient is
all-reduced once a step, after data parallelism has reduced and sharded it.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np

from plait.model.facts import ModelFacts
from plait.model.heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from plait.model.plans import TensorPlan
from plait.parallel.accounting.ledger import Array, Ledger, gradient_bytes
from plait.parallel.context.kinds import Kind


def context_traffic(facts: ModelFacts, ledger: Ledger, kind: Kind) -> dict[str, Array]:
    """Collective to bytes that one rank sends per optimizer step; nothing where cp is 1."""
    n = ledger.cp
    one = np.ones_like(ledger.cp)
    sent = {"all_reduce": 2 * _summed_bytes(facts, ledger) * (n - 1) // n}
    shape = facts.attention
    if shape is None or not facts.blocks:
        return sent
    itemsize = one * (
        facts.parameters[0].itemsize if ledger.compute_bytes is None else ledger.compute_bytes
    )
    passes = ledger.accumulation * len(facts.blocks) * ledger.tokens
    tp = ledger.tp if _splits_heads(facts.tensor_plan) else one
    heads = shape.heads // tp
    kv_heads = np.maximum(shape.kv_heads // tp, 1)
    both = kv_heads * (shape.head_dim + shape.value_dim)
    if kind == "all-gather-kv":
        gathered = passes * both * itemsize * (n - 1) // n
        return {**sent, "all_gather": 2 * gathered, "reduce_scatter": gathered}
    if kind == "ring":
        part = passes * both // n
        return {
            **sent,
            "send": (
                part * ((2 * n - 2) * itemsize + np.where(n > 1, n, 0) * np.maximum(itemsize, 4))
            ),
        }
    repeated = np.asarray(
        [lcm(int(count), int(ranks)) for count, ranks in zip(kv_heads, n, strict=True)]
    )
    width = (heads + repeated) * (shape.head_dim + shape.value_dim)
    return {**sent, "reduce_scatter": 2 * passes * width * itemsize // n * (n - 1) // n}


def _summed_bytes(facts: ModelFacts, ledger: Ledger) -> Array:
    """Gradients that are summed over cp: those of experts on different ranks are reduced over their
    own axis.
    """
    apart = frozenset(facts.experts.parameters) if facts.experts is not None else frozenset()
    if not apart:
        return gradient_bytes(facts, ledger)
    rest = replace(facts, parameters=tuple(p for p in facts.parameters if p.name not in apart))
    return np.where(ledger.ep > 1, gradient_bytes(rest, ledger), gradient_bytes(facts, ledger))


def _splits_heads(plan: TensorPlan | None) -> bool:
    """Whether a rank of tp has a part of the heads. A projection of queries, keys and values that
    are not one head after the other is gathered, and each rank computes all.
    """
    names = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    styles = (
        {entry.style for entry in plan.modules if entry.name.rpartition(".")[2] in names}
        if plan is not None
        else set()
    )
    return bool(styles) and "colwise_gather_output" not in styles
