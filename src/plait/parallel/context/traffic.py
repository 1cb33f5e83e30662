"""Bytes that context parallelism sends over the cp axis per optimizer step, from the shapes only.

With T tokens per micro-batch, n ranks, q and w elements of a token's queries and of its keys and
values together (of a tp rank), and e bytes per element, a block sends per micro-batch:

    all-gather-kv   forward:  all-gather of T w e (n-1)/n
                    backward: the same, and a reduce-scatter of as much
    ring            forward:  n-1 messages of T w e / n
                    backward: the same, and n messages of gradients in float32 or wider
    ulysses         forward:  all-to-all of (2 q + w') (T/n) e (n-1)/n, w' with repeated heads
                    backward: the same

All-to-all is counted as the reduce-scatter with which gloo carries it out. What recomputation
repeats is measured elsewhere. Sequence lengths are assumed to be divisible. A parameter's gradient
is all-reduced once per step, after data parallelism has reduced and sharded it.
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
    """Return the bytes that one rank sends per optimizer step, by collective."""
    n = ledger.cp
    one_per_candidate = np.ones_like(ledger.cp)
    sent = {"all_reduce": 2 * _summed_bytes(facts, ledger) * (n - 1) // n}
    shape = facts.attention
    if shape is None or not facts.blocks:
        return sent

    itemsize = one_per_candidate * facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = one_per_candidate * ledger.compute_bytes
    # Tokens of all micro-batches and blocks.
    tokens = ledger.accumulation * len(facts.blocks) * ledger.tokens
    tp = ledger.tp if _splits_heads(facts.tensor_plan) else one_per_candidate
    heads = shape.heads // tp
    kv_heads = np.maximum(shape.kv_heads // tp, 1)
    kv_width = kv_heads * (shape.head_dim + shape.value_dim)
    if kind == "all-gather-kv":
        gathered = tokens * kv_width * itemsize * (n - 1) // n
        return {**sent, "all_gather": 2 * gathered, "reduce_scatter": gathered}

    if kind == "ring":
        part = tokens * kv_width // n
        gradient_messages = np.where(n > 1, n, 0)
        gradient_itemsize = np.maximum(itemsize, 4)
        bytes_per_element = (2 * n - 2) * itemsize + gradient_messages * gradient_itemsize
        return {**sent, "send": part * bytes_per_element}

    repeated_kv_heads = np.asarray(
        [lcm(int(count), int(ranks)) for count, ranks in zip(kv_heads, n, strict=True)]
    )
    width = (heads + repeated_kv_heads) * (shape.head_dim + shape.value_dim)
    return {**sent, "reduce_scatter": 2 * tokens * width * itemsize // n * (n - 1) // n}


def _summed_bytes(facts: ModelFacts, ledger: Ledger) -> Array:
    """Return the bytes of the gradients that are summed over cp."""
    if facts.experts is None or not facts.experts.parameters:
        return gradient_bytes(facts, ledger)
    # Gradients of experts on different ranks are reduced over their own axis.
    experts = frozenset(facts.experts.parameters)
    others = tuple(p for p in facts.parameters if p.name not in experts)
    without_experts = replace(facts, parameters=others)
    return np.where(
        ledger.ep > 1, gradient_bytes(without_experts, ledger), gradient_bytes(facts, ledger)
    )


def _splits_heads(plan: TensorPlan | None) -> bool:
    """Return True if each tp rank has a part of the heads.

    A fused projection whose heads are not contiguous is gathered, and each rank computes all heads.
    """
    if plan is None:
        return False
    names = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    styles = {entry.style for entry in plan.modules if entry.name.rpartition(".")[2] in names}
    return bool(styles) and "colwise_gather_output" not in styles
