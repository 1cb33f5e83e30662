"""Allocated and reserved peak memory of a rank, as a sum of named terms.

The peak is the maximum over pipeline ranks and over points in time of a step. The ranks are the
first (most micro-batches in flight, the embedding), the last (head and logits) and one between
them, which may have more layers. The points in time are the first backward, the loss and the
optimizer step. Activations follow arXiv 2205.05198, table 2. For gated models without dropout, the
bytes of all saved tensors are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from plait.planner.architecture import products_of, saved_columns
from plait.planner.block_bytes import saved_by_recomputation
from plait.planner.constants import Rates
from plait.planner.hardware import DEVICE_FAMILIES, PRECISIONS, Numbers
from plait.planner.job import RECOMPUTE, Job, Layouts, stage_layers
from plait.planner.peak_moments import MOMENTS as OWN_MOMENTS
from plait.planner.peak_moments import RANKS, States, moments
from plait.planner.pipeline import in_flight, in_flight_last
from plait.planner.states import account_rows, account_states
from plait.sizes import GIB, MIB

MEMORY_TERMS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered weights and their buffers",
    "activations": "activations kept for the backward",
    "working": "the block that is computed",
    "logits": "logits and loss",
}
MOMENTS = ("backward of the first stage", "loss of the last stage", "optimizer step", *OWN_MOMENTS)


@dataclass(frozen=True)
class Memory:
    """Bytes on the pipeline rank with the highest peak; arrays with one entry per candidate."""

    terms: dict[str, Numbers]
    """Allocated bytes by term at the peak."""
    moment: Numbers
    """Index into MOMENTS of the point of the step at which the peak occurs."""
    slack: Numbers
    """Bytes that the allocator reserves beyond the allocated ones."""
    context: Numbers
    """Bytes outside the allocator: the device's context and communicators."""

    @property
    def allocated(self) -> Numbers:
        """Peak of allocated memory, as torch reports it."""
        return sum(self.terms.values())

    @property
    def reserved(self) -> Numbers:
        """Peak of reserved memory, as torch reports it."""
        return self.allocated + self.slack

    @property
    def total(self) -> Numbers:
        """Device memory that the rank needs: reserved memory and the context."""
        return self.reserved + self.context


def memory_bytes(
    job: Job, rates: Rates, states: States | None = None, *, ranks: tuple[str, ...] = RANKS
) -> Memory:
    """Predict the peak memory of every candidate.

    Args:
        job: The candidates.
        rates: Constants of the device and the framework.
        states: Bytes of model states. None computes them: from the ledger (`account_states`) if
            `job.has_exact_blocks`, otherwise from the framework's bytes per parameter.
        ranks: Names in `RANKS` of the pipeline ranks to consider. Only used if
            `job.has_exact_blocks`.
    """
    return memory_by_rates(job, states, ranks=ranks)(rates)


def memory_by_rates(
    job: Job, states: States | None = None, *, ranks: tuple[str, ...] = RANKS
) -> Callable[[Rates], Memory]:
    """Return a function that predicts the peak memory from the constants.

    Calling the returned function repeatedly is cheaper than calling `memory_bytes`. The arguments
    are those of `memory_bytes`.
    """
    if not job.has_exact_blocks:
        return lambda rates: _memory_by_formula(job, rates, states)
    # The fullest point of Plait's own step does not depend on the constants.
    if states is None:
        # Rows of several models have arrays of sizes.
        several = np.ndim(job.model.layers) > 0
        states = account_rows(job) if several else account_states(job)
    terms, moment = _fullest(_points_of_step(job, states, ranks))
    return lambda rates: _with_slack(job, rates, terms, moment)


def _points_of_step(
    job: Job, states: States, ranks: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Numbers], Numbers]]:
    """Yield the points in time of a step of Plait, rank by rank, for `_fullest`."""
    assert states.units is not None
    pp = np.asarray(job.layouts.pp)
    exists = {"first": np.ones_like(pp, dtype=bool), "last": pp > 1, "inner": pp > 2}
    offset = MOMENTS.index(OWN_MOMENTS[0])
    for rank in ranks:
        if exists[rank].any():
            for index, terms in moments(job, states.of(rank), states.units[rank]):
                yield offset + index, terms, exists[rank]


def _fullest(
    points: Iterable[tuple[int, dict[str, Numbers], Numbers]],
) -> tuple[dict[str, Numbers], Numbers]:
    """Return (bytes by term, index into MOMENTS) of the peak of every candidate.

    Args:
        points: Points in time as (index into MOMENTS, bytes by term, mask of the candidates whose
            step has this point).
    """
    most = chosen = np.zeros(1)
    terms: dict[str, Numbers] = dict.fromkeys(MEMORY_TERMS, 0.0)
    for index, point, exists in points:
        total = np.where(exists, np.asarray(sum(point.values()), dtype=float), 0.0)
        larger = total > most
        if larger.any():
            most = np.where(larger, total, most)
            chosen = np.where(larger, index, chosen)
            terms = {
                name: np.where(larger, point.get(name, 0.0), terms[name]) for name in MEMORY_TERMS
            }
    return terms, chosen.astype(int)


def _memory_by_formula(job: Job, rates: Rates, states: States | None) -> Memory:
    layouts = job.layouts
    # States from the ledger are exact.
    counted = 1.0
    if states is None:
        counted = rates["memory:states"]
    states = states or recipe_states(job)
    first_layers, last_layers = stage_layers(job)[1:]
    per_layer, per_checkpoint = layer_activations(job)
    single = np.asarray(layouts.pp) == 1
    factor = rates["memory:activations"] * (1 - layouts.offload_activations)
    keeps_all = np.asarray(layouts.recompute) == RECOMPUTE.index("none")
    share = 1 / layouts.every
    working = (
        np.where(keeps_all, 0.0, per_layer) * np.minimum(1, share)
        + 4 * job.tokens * job.model.hidden
    )
    saved = share * per_checkpoint + (1 - share) * per_layer
    first_saved = first_layers * saved * np.where(single, 1.0, in_flight(layouts)) * factor
    last_saved = last_layers * saved * np.where(single, 1.0, in_flight_last(layouts)) * factor
    zero = np.zeros_like(np.asarray(first_saved, dtype=float))

    first = _with_states(states.first, counted) | {
        "activations": first_saved,
        "working": working * factor,
        "logits": zero,
    }
    last = _with_states(states.last, counted) | {
        "activations": last_saved,
        "working": zero,
        "logits": _logits(job, rates),
    }
    last["gathered"] = last["gathered"] - states.last.get("reducing", 0.0) * counted

    # At the start of a backward all activations exist, but no gradients if the backward itself
    # allocates them, except for those of an earlier micro-batch.
    before = 1 - np.asarray(job.framework.late_gradients) * (np.asarray(layouts.accumulation) <= 1)
    first["gradients"] = first["gradients"] * before
    last["gradients"] = last["gradients"] * before
    # In addition to the states, the step holds a temporary tensor of the optimizer and one of the
    # gradient norm.
    step = _with_states(states.first, counted) | {
        "activations": zero,
        "working": 64.0 * MIB + zero,
        "logits": zero,
    }
    step["gathered"] = np.where(np.asarray(layouts.stage) >= 3, 0.0, step["gathered"])
    terms, moment = _fullest(
        (index, point, True) for index, point in enumerate((first, last, step))
    )
    return _with_slack(job, rates, terms, moment)


def _with_slack(job: Job, rates: Rates, terms: dict[str, Numbers], moment: Numbers) -> Memory:
    layouts = job.layouts
    allocated = sum(terms.values())
    groups = sum(
        np.asarray(degree) > 1
        for degree in (layouts.tp, layouts.pp, layouts.cp, layouts.dp, layouts.ep)
    )
    on_gpu = np.asarray(job.device.family) != DEVICE_FAMILIES.index("cpu")
    context = np.where(on_gpu, 0.8 * GIB + 0.25 * GIB * groups, 0.3 * GIB) * rates["memory:context"]
    moving = terms["activations"] + terms["working"] + terms["logits"] + terms["gathered"]
    slack = job.framework.slack * rates["memory:slack"] * moving + 0.01 * allocated
    return Memory(terms, moment, slack, context)


def _with_states(states: dict[str, Numbers], factor: Numbers) -> dict[str, Numbers]:
    return {
        name: states[name] * factor for name in ("weights", "gradients", "optimizer", "gathered")
    }


def recipe_states(job: Job) -> States:
    """Return the bytes of model states, computed from the framework's bytes per parameter."""
    first_layers, last_layers = stage_layers(job)[1:]
    model = job.model
    single = np.asarray(job.layouts.pp) == 1
    head = np.where(
        (np.asarray(model.tied) > 0) & ~single, model.vocab * model.hidden, model.head_parameters
    )
    ends = np.where(
        single, model.embedding_parameters + model.head_parameters, model.embedding_parameters
    )
    first_count = np.where(single, model.layers, first_layers)
    last_count = np.where(single, model.layers, last_layers)

    return States(
        _states_of_stage(job, first_count, ends),
        _states_of_stage(job, last_count, np.where(single, ends, head)),
    )


def _states_of_stage(job: Job, layers: Numbers, ends: Numbers) -> dict[str, Numbers]:
    model = job.model
    layouts = job.layouts
    framework = job.framework
    expert_share = model.expert_layers / model.layers
    routed = np.where(np.asarray(model.experts) > 0, expert_share * model.routed_parameters, 0)
    block = model.block_parameters / model.layers
    dense = (layers * (block - routed) + ends) / layouts.tp
    experts = layers * routed / layouts.tp / layouts.ep
    shard = layouts.dp_shard * layouts.cp
    expert_shard = np.maximum(shard / layouts.ep, 1)
    stage = np.asarray(layouts.stage)

    def sharded_bytes(width: Numbers, sharded: Numbers) -> Numbers:
        return width * (
            dense / np.where(sharded, shard, 1) + experts / np.where(sharded, expert_shard, 1)
        )

    # torch's FSDP shards weights at stage 2 too (SHARD_GRAD_OP), and keeps the gathered ones from
    # the forward to the backward.
    sharded = (stage >= 3) | (
        (stage == 2) & (np.asarray(framework.late_gradients) > 0) & ~job.is_plait
    )
    weights = sharded_bytes(framework.weights, sharded)
    gradients = sharded_bytes(framework.gradients, stage >= 2)
    optimizer = sharded_bytes(framework.optimizer, stage >= 1) * (1 - layouts.offload)

    # If weights are used in another dtype, a copy exists while they are used. It has all weights,
    # or at stage 3 the ends (gathered from the forward to the end of the backward) and two blocks,
    # with the gradient of one block and its reduction.
    width = np.where(sharded, 2, framework.gathered)
    unit = (block - routed + routed / layouts.ep) / layouts.tp
    unsharded = width * (dense + experts)
    reducing = (2 + framework.wire_reduce) * unit
    few = width * (ends / layouts.tp + 2 * unit)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": np.where(
            stage >= 3, np.minimum(few + reducing, unsharded + 6 * unit), unsharded
        ),
        "reducing": np.where(stage >= 3, reducing, 0.0),
    }


def _logits(job: Job, rates: Rates) -> Numbers:
    """Return the peak bytes of the head and the loss for one micro-batch."""
    columns = job.model.vocab / np.where(
        np.asarray(job.framework.whole_logits) > 0, 1, job.layouts.tp
    )
    return job.framework.logits * job.loss_tokens * columns * rates["memory:logits"]


def _attention_saved(job: Job) -> Numbers:
    """Return the bytes per token that attention saves: queries, keys, values, and its output.

    Latent attention concatenates its keys from two parts. In eager mode the values are a view of a
    matrix multiplication's output. This output, which also contains one part of the keys, is saved
    completely.
    """
    model = job.model
    width = model.heads * model.head_dim
    value = model.heads * model.value_width
    split_keys = (
        model.heads * (model.head_dim - model.rope_dim) * np.asarray(job.framework.separate_norms)
    )
    plain = 4 * width + 4 * model.kv_heads * model.head_dim
    scores = np.where(job.attention_in_parts, 4 * model.heads * job.sequence, 0)
    return np.where(model.is_latent, 4 * width + 4 * value + 2 * split_keys, plain) + scores


def _operators_saved(job: Job, share: Numbers) -> Numbers:
    """Return the bytes per token that a block saves with recomputation of operators.

    These are the block's input, and the outputs of attention and of every second matrix
    multiplication. A compiled block does not save the output of its last matrix multiplication,
    because its backward does not read it. Routed experts save nothing.
    """
    model = job.model
    block_products = products_of(job.model)
    *inner, down = block_products.dense
    dense = saved_columns(tuple(inner)) + down.columns * down.is_saved * np.asarray(
        job.framework.separate_activation
    )
    elements = (
        model.hidden
        + saved_columns(block_products.attention)
        + (1 - share) * dense
        + share * saved_columns(block_products.shared)
    )
    core = np.where(
        job.attention_in_parts, 0, 2 * model.heads * model.value_width + 4 * model.heads
    )
    return 2 * elements + core


def layer_activations(job: Job) -> tuple[Numbers, Numbers]:
    """Return the bytes that a layer saves per micro-batch.

    Returns:
        (bytes without recomputation, bytes with the layout's recomputation).
    """
    if job.has_exact_blocks:
        return saved_by_recomputation(job)
    if job.counted is None:
        return _by_formula(job)

    # The formula is scaled by the ratio of counted to computed bytes of a block on one rank.
    none, full, operators = (RECOMPUTE.index(name) for name in ("none", "full", "operators"))
    alone, _ = _by_formula(replace(job, layouts=Layouts(recompute=none)))
    _, results = _by_formula(replace(job, layouts=Layouts(recompute=operators)))
    counted = job.counted
    every, saved = _by_formula(job)
    kind = np.asarray(job.layouts.recompute)
    of_all = (
        job.sequence * (counted.none.linear + counted.none.scores + counted.dropped_scores) / alone
    )
    of_inputs = counted.full / (job.element_bytes * job.model.hidden)
    of_results = np.where(
        np.isin(kind, [operators, RECOMPUTE.index("budget")]),
        job.sequence * counted.operators.linear / results,
        1.0,
    )
    of_results = np.where(kind == full, of_inputs, of_results)
    return every * of_all, saved * np.where(kind == none, of_all, of_results)


def _by_formula(job: Job) -> tuple[Numbers, Numbers]:
    """Compute `layer_activations` from the sizes of the model, without `job.counted`."""
    model = job.model
    layouts = job.layouts
    framework = job.framework
    hidden = model.hidden
    width = model.heads * model.head_dim
    kv = model.kv_heads * model.head_dim
    sequence = np.where(np.asarray(layouts.sp) > 0, layouts.tp, 1)

    # Older frameworks train GPT with dropout, which saves one mask per dropout layer.
    old = (1 - model.gated) * (framework.attention > 0)
    share = model.expert_layers / model.layers
    ffn = (1 - share) * model.ffn + share * (model.active * model.expert_ffn + model.shared_ffn)
    gathered = framework.whole_inputs
    replicated = (framework.norms - 4 + 2 * old) * hidden / sequence + 4 * hidden * (
        gathered + (1 - gathered) / sequence
    )
    inner = np.where(np.asarray(model.gated) > 0, 6 + 2 * framework.separate_activation, 4) * ffn
    attention_tp = job.attention_tp
    split = inner / layouts.tp + (_attention_saved(job) + 4 * model.heads) / attention_tp
    latents = (4 + 4 * framework.separate_norms) * (model.query_rank + model.latent_rank) / sequence
    split = split + share * 4 * model.active * hidden / layouts.tp
    split = split + (2 + 6 * framework.separate_norms) * model.qk_norm * (width + kv) / attention_tp
    scores = (
        np.choose(np.asarray(framework.attention), [0.0, 4 + 1 * old, 8 + 1 * old])
        * model.heads
        * job.sequence
        / attention_tp
    )

    # Products in 8 and 4 bits save their converted inputs, except for those of torchao, which
    # convert the inputs again in the backward.
    narrow = (np.asarray(job.precision) >= PRECISIONS.index("fp8")) & (
        np.asarray(framework.dynamic_scaling) == 0
    )
    low = np.where(narrow, 0.7, 1.0)
    replicated = (replicated + latents) * low
    split = split * low
    every = job.tokens * (replicated + split + scores)
    checkpoint = job.tokens * 2 * hidden / sequence
    operators = np.minimum(every, job.tokens * _operators_saved(job, share) / layouts.tp)
    saved = np.choose(
        np.asarray(layouts.recompute),
        np.broadcast_arrays(
            every,
            job.tokens * (replicated + split),
            checkpoint,
            operators,
            checkpoint + layouts.kept_operators * (operators - checkpoint),
        ),
    )
    return every, saved
