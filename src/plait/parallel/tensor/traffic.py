"""Bytes that tensor parallelism sends over tp per optimizer step, from the plan and the shapes.

With T tokens per micro-batch, w features, e bytes per element and n ranks, a collective moves
T w e (n-1)/n, and an all-reduce twice that (ring). Per micro-batch (sp: sequence parallel):

    input of column-parallel siblings  backward all-reduce
                                       sp: forward all-gather, backward reduce-scatter
    row-parallel layer                 forward all-reduce
                                       sp: forward reduce-scatter, backward all-gather
    gathered output, sliced input      forward, backward all-gather
    vocabulary-parallel embedding      forward all-reduce
    loss over sharded logits           forward all-reduces of 3 T elements
    computed on all tokens             sp: forward, backward all-gather

The traffic grows with the activations and not with the parameters (MISSION T3). The exception are
replicated weights that ranks use on different tokens or heads, whose gradients are all-reduced.
Sequence lengths are assumed to divide by n, and by the ranks of cp, whose tokens T includes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.plans import StyledModule, TensorPlan
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
    """Return the bytes that one rank sends per optimizer step, by collective.

    Args:
        facts: The parameters of the model.
        plan: The plan of tensor parallelism.
        ledger: The candidates.
        sequence_parallel: Whether hidden states are sharded along the sequence.
        loss_parallel: Whether the loss takes sharded logits.
    """
    features, gathered = _features(
        facts, plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
    )
    parameters = _summed_numel(facts, plan, sequence_parallel=sequence_parallel)
    itemsize: Any = facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = ledger.compute_bytes
    loss_itemsize = np.maximum(itemsize, 4)
    n = ledger.tp
    tokens = ledger.tokens // ledger.cp

    # Collectives need equal parts, so features are padded.
    gathered_features = sum(shard_size(width, n) * n for width in gathered)
    if sequence_parallel:
        # The backward of the first block's input and the forward of the last one's output gather
        # all tokens, and so do modules that are computed on all tokens.
        hidden = next(
            p.shape[-1]
            for p in facts.parameters
            if p.unit >= 0 and p.name.rpartition(".")[0] in plan.norms
        )
        ends = 2 * np.ones_like(n)
        if ledger.stage is not None:
            ends = ledger.stage.ends
        gathered_features = gathered_features + hidden * (ends + 2 * len(plan.whole))

    token_bytes = tokens * itemsize
    all_reduced = (
        features["all_reduce"] * token_bytes
        + parameters * itemsize
        + features["loss"] * tokens * loss_itemsize
    )
    counts = {
        "all_reduce": 2 * all_reduced,
        "all_gather": (features["all_gather"] + gathered_features) * token_bytes,
        "reduce_scatter": features["reduce_scatter"] * token_bytes,
    }
    return {
        collective: ledger.accumulation * count * (n - 1) // n
        for collective, count in counts.items()
    }


def _features(
    facts: ModelFacts, plan: TensorPlan, *, sequence_parallel: bool, loss_parallel: bool
) -> tuple[Counter[str], list[int]]:
    """Return the widths of the activations that collectives send per token.

    Returns:
        The features of a token by collective (`loss`: float32 elements), and the widths that are
        gathered along features.
    """
    parameter_of = _parameters_by_name(facts)
    moved: Counter[str] = Counter()
    gathered: list[int] = []

    def move(features: int, *, sequence: bool) -> None:
        if sequence:
            moved["all_gather"] += features
            moved["reduce_scatter"] += features
        else:
            moved["all_reduce"] += features

    region_inputs: set[str] = set()
    for entry in plan.modules:
        weight = parameter_of[f"{entry.name}.weight"]
        inputs, outputs = _widths(weight, plan)
        sequence = sequence_parallel and _is_sequence_sharded(entry, facts, plan)
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated", "vocab_head"):
            input_name = _region_input_name(entry, plan, sequence=sequence)
            if input_name not in region_inputs:
                region_inputs.add(input_name)
                move(inputs, sequence=sequence)
        if entry.style == "colwise_gather_output":
            gathered.append(outputs)
        if entry.style == "vocab_head" and loss_parallel:
            moved["loss"] += 3
        elif entry.style == "vocab_head":
            gathered.append(outputs)
        if entry.style in ("rowwise", "rowwise_split_input"):
            move(outputs, sequence=sequence)
        if entry.style == "rowwise_split_input":
            gathered.append(inputs)
        if entry.style == "embedding_rowwise":
            moved["all_reduce"] += weight.shape[1]
    return moved, gathered


def _summed_numel(facts: ModelFacts, plan: TensorPlan, *, sequence_parallel: bool) -> int:
    """Return the elements of replicated parameters whose gradients are summed over tp."""
    # Number of sums of each module or bias.
    sums: Counter[str] = Counter()
    for entry in plan.modules:
        # Ranks see different heads in such a module.
        if entry.style in ("replicated_with_grad_allreduce", "kv_replicated"):
            sums[entry.name] += 1
    if sequence_parallel:
        # Ranks see different tokens in norms, and in the biases of row-parallel layers.
        sums.update(set(plan.norms))
        for entry in plan.modules:
            is_row_parallel = entry.style in ("rowwise", "rowwise_split_input")
            if is_row_parallel and _is_sequence_sharded(entry, facts, plan):
                sums[f"{entry.name}.bias"] += 1

    total = 0
    for name, parameter in _parameters_by_name(facts).items():
        module = name.rpartition(".")[0]
        total += parameter.numel * (sums[module] + sums[name])
    return total


def _parameters_by_name(facts: ModelFacts) -> dict[str, ParameterFacts]:
    return {name: p for p in facts.parameters for name in (p.name, *p.also)}


def _is_sequence_sharded(entry: StyledModule, facts: ModelFacts, plan: TensorPlan) -> bool:
    return is_inside(entry.name, facts.blocks) and not is_inside(entry.name, plan.whole)


def _region_input_name(entry: StyledModule, plan: TensorPlan, *, sequence: bool) -> str:
    """Return the name of the input that a column-parallel layer shares with its siblings."""
    if entry.style == "vocab_head":
        return entry.name
    if sequence:
        for container in plan.regions:
            if entry.name.startswith(f"{container}."):
                return container
    return entry.name.rpartition(".")[0]


def _widths(weight: ParameterFacts, plan: TensorPlan) -> tuple[int, int]:
    """Return the (input, output) features of a layer."""
    style = next(
        entry.style
        for entry in plan.modules
        if f"{entry.name}.weight" in (weight.name, *weight.also)
    )
    if len(weight.shape) < 2:
        return weight.shape[0], weight.shape[0]
    # Transformers' Conv1D stores [in, out], which the dimension that the style splits reveals.
    split_dim = plan.dims[weight.name]
    if style.startswith(("colwise", "vocab")):
        is_transposed = split_dim == 1
    else:
        is_transposed = split_dim == 0
    if is_transposed:
        return weight.shape[0], weight.shape[1]
    return weight.shape[1], weight.shape[0]
