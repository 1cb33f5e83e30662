"""Bytes that tensor parallelism sends over the tp axis per optimizer step, from the plan and the
shapes alone.

With T tokens a micro-batch, w features, e bytes an element, n ranks, a collective moves T w e
(n-1)/n, twice that for an all-reduce (ring). Per micro-batch:

    input of column-split siblings   backward all-reduce             sequence parallel: forward
    all-gather, backward reduce-scatter row-split layer                  forward all-reduce
    sequence parallel: forward reduce-scatter, backward all-gather gathered output, sliced input
    forward, backward all-gather vocabulary-parallel embedding    forward all-reduce loss over a
    split vocabulary     forward all-reduces of 3 T elements computed on all tokens
    sequence parallel: forward, backward all-gather

It grows with the activations and not with the parameters (MISSION T3), but for the replicated
weights that ranks use on different tokens or heads, whose gradients are all-reduced. Sequence
lengths are taken to divide by n, and by the ranks of cp, of whose tokens T is a part.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.plans import TensorPlan
from plait.model.sequence import is_inside
from plait.parallel.accounting.ledger import Array, Ledger
from plait.shards import shard_size


def tensor_traffic(
    facts: ModelFacts,
    plan: TensorPlan,
    ledger: Ledger,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> dict[str, Array]:
    """Collective to bytes that one rank sends per optimizer step."""
    features, gathered, parameters = _features(
        facts, plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
    )
    itemsize = (
        facts.parameters[0].itemsize if ledger.compute_bytes is None else ledger.compute_bytes
    )
    loss_itemsize = np.maximum(itemsize, 4)
    n = ledger.tp
    tokens = ledger.tokens // ledger.cp
    if sequence_parallel:  # backward of the first block's input, forward of the last
        hidden = next(
            p.shape[-1]
            for p in facts.parameters
            if p.unit >= 0 and p.name.rpartition(".")[0] in plan.norms
        )
        ends = 2 * np.ones_like(n) if ledger.stage is None else ledger.stage.ends
        ends = ends + 2 * len(plan.whole)
    else:
        hidden = 0
        ends = np.zeros_like(n)
    sent = {}
    padded = sum(shard_size(width, n) * n for width in gathered)  # collectives want equal parts
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        count = (
            (features[collective] + (padded + hidden * ends if collective == "all_gather" else 0))
            * tokens
            * itemsize
        )
        if collective == "all_reduce":
            count = 2 * (count + parameters * itemsize + features["loss"] * tokens * loss_itemsize)
        sent[collective] = ledger.accumulation * count * (n - 1) // n
    return sent


def _features(
    facts: ModelFacts, plan: TensorPlan, *, sequence_parallel: bool, loss_parallel: bool
) -> tuple[Counter[str], list[int], int]:
    """Collective to the features of a token that it moves (`loss`: float32 elements), the widths
    that are gathered along features, and the elements of all-reduced parameter gradients.
    """
    shape_of = {name: p for p in facts.parameters for name in (p.name, *p.also)}
    moved: Counter[str] = Counter()
    gathered: list[int] = []
    summed = 0
    region_inputs: set[str] = set()
    for entry in plan.modules:
        weight = shape_of[f"{entry.name}.weight"]
        inputs, outputs = _widths(weight, plan)
        sequence = (
            sequence_parallel
            and is_inside(entry.name, facts.blocks)
            and not is_inside(entry.name, plan.whole)
        )
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated", "vocab_head"):
            container = next(
                (name for name in plan.regions if sequence and entry.name.startswith(f"{name}.")),
                None,
            )
            input_name = (
                entry.name
                if entry.style == "vocab_head"
                else container or entry.name.rpartition(".")[0]
            )
            if input_name not in region_inputs:
                region_inputs.add(input_name)
                moved.update(
                    {"all_gather": inputs, "reduce_scatter": inputs}
                    if sequence
                    else {"all_reduce": inputs}
                )
        if entry.style == "colwise_gather_output":
            gathered.append(outputs)
        if entry.style == "vocab_head" and loss_parallel:
            moved["loss"] += 3
        elif entry.style == "vocab_head":
            gathered.append(outputs)
        if entry.style in ("rowwise", "rowwise_split_input"):
            moved.update(
                {"all_gather": outputs, "reduce_scatter": outputs}
                if sequence
                else {"all_reduce": outputs}
            )
            bias = shape_of.get(f"{entry.name}.bias")
            summed += bias.numel if sequence and bias is not None else 0
        if entry.style == "rowwise_split_input":
            gathered.append(inputs)
        if entry.style == "embedding_rowwise":
            moved["all_reduce"] += weight.shape[1]
        if entry.style in ("replicated_with_grad_allreduce", "kv_replicated"):
            summed += sum(
                p.numel for name, p in shape_of.items() if name.rpartition(".")[0] == entry.name
            )
    if sequence_parallel:
        summed += sum(
            p.numel for name, p in shape_of.items() if name.rpartition(".")[0] in plan.norms
        )
    return moved, gathered, summed


def _widths(weight: ParameterFacts, plan: TensorPlan) -> tuple[int, int]:
    """(in, out) features of a layer; Transformers' Conv1D stores [in, out]."""
    style = next(
        entry.style
        for entry in plan.modules
        if f"{entry.name}.weight" in (weight.name, *weight.also)
    )
    if len(weight.shape) < 2:
        return weight.shape[0], weight.shape[0]
    transposed = plan.dims[weight.name] == (1 if style.startswith(("colwise", "vocab")) else 0)
    return (weight.shape[0], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[0])
