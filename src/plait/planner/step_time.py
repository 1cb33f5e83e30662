"""Seconds of an optimizer step as a sum of named terms.

The time of a step is that of the slowest pipeline stage for its micro-batches, plus the idle time
of the schedule. Of communication that can overlap with computation, only the exposed part counts;
the overlapped part slows the computation by a factor. Invariant: the terms sum to the time of the
step.

The time of a collective is its bytes divided by the bandwidth of the slowest link, plus a latency
per step of a ring. In a ring over n ranks, an all-gather or reduce-scatter of S bytes makes every
rank send S (n-1)/n bytes. If q of the ranks share a domain (a node, or an NVL72), the bytes are
sent over the links inside the domain, and over the q network cards of these ranks between domains.
This is the model of NCCL's ring (`src/graph/tuning.cc`). A step of the ring takes 3.4 us inside
a domain and 14 us between domains, more on some clouds.

`simulated_terms` simulates the pipeline of one layout. For the best candidates its result replaces
the closed-form idle time, because the simulation includes uneven stages, the head on the last
stage, and messages in flight. The simulation (`parallel.schedules.timeline`) uses the action table
of the runtime (`parallel.schedules.schedule`) and the engine's partition of the model
(`parallel.pipeline.estimates`). Durations of actions come from the formulas of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.errors import ConfigError, InputError
from plait.parallel.pipeline.estimates import balance_stages
from plait.parallel.schedules.schedule import make_schedule
from plait.parallel.schedules.timeline import Durations, Timeline, simulate
from plait.planner.compute import (
    LayerCost,
    accumulation_seconds,
    head_cost,
    layer_cost,
    memory_rate,
    optimizer_seconds,
)
from plait.planner.constants import Rates
from plait.planner.hardware import Numbers, only
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, recompute_share, stage_layers
from plait.planner.pipeline import idle_share, micro_batches_between_chunks
from plait.planner.techniques import SCHEDULE_NAMES

INSIDE_STEP = 3.4e-6
"""Seconds of one step of a ring inside a domain."""
BASE = 8.4e-6
"""Base latency of a collective in seconds, as in NCCL's Simple protocol over NVLink."""


@dataclass(frozen=True)
class Group:
    """Size of the process group of a collective, and how its ranks are spread over domains."""

    size: Numbers
    """Number of ranks."""
    inside: Numbers
    """Number of these ranks that share a domain of fast links."""

    @property
    def domains(self) -> Numbers:
        """Number of domains of fast links, such as NVLink, that the group spans."""
        return np.ceil(self.size / self.inside)


def group(job: Job, axis: Literal["tp", "cp", "dp", "shard", "replicate", "ep"]) -> Group:
    """Return the process group of a mesh dimension.

    Ranks of a tp group are neighbors. cp is the next dimension, then dp. `shard` is the inner part
    of dp, and `replicate` is the group of ranks with the same shard. Plait replicates model states
    over cp, while other frameworks shard them. A group of ep consists of neighboring ranks in
    Plait, and of ranks of one dp group in other frameworks.
    """
    layouts = job.layouts
    over_cp = np.where(job.is_plait, 1, layouts.cp)
    size, stride = {
        "tp": (layouts.tp, 1),
        "cp": (layouts.cp, layouts.tp),
        "dp": (layouts.dp * over_cp, layouts.tp * layouts.cp // over_cp),
        "shard": (layouts.dp_shard * over_cp, layouts.tp * layouts.cp // over_cp),
        "replicate": (layouts.dp_replicate, layouts.tp * layouts.cp * layouts.dp_shard),
        "ep": (layouts.ep, np.where(job.is_plait, 1, layouts.tp * layouts.cp)),
    }[axis]
    inside = np.clip(np.floor_divide(job.device.domain, stride), 1, size)
    return Group(size, inside)


def collective_seconds(
    job: Job,
    rates: Rates,
    where: Group,
    size_bytes: Numbers,
    kind: Literal["all_reduce", "one_way", "all_to_all"],
    *,
    crossing: Numbers = 1.0,
) -> Numbers:
    """Return the seconds of a collective.

    Args:
        job: The candidates.
        rates: Constants.
        where: Group of ranks.
        size_bytes: Bytes of the full tensor.
        kind: `one_way` is an all-gather or a reduce-scatter.
        crossing: Fraction of the bytes for ranks of other domains that is actually sent between
            domains. It is below 1 if a token is sent only once to a domain with several of its
            experts. Only used for an all-to-all.
    """
    ranks = where.size
    inside = where.inside
    domains = where.domains

    # Few ranks reach less of a link: 268, 325 and 345 GB/s of 450 with 2, 4 and 8 H100 (NCCL's
    # table for them).
    link = job.device.link_bandwidth * rates.on("link", job.device) * inside / (inside + 0.5)
    network = (
        job.device.nic_bandwidth * rates["nic"] * inside / np.power(domains, rates["congestion"])
    )
    bandwidth = np.where(domains > 1, np.minimum(link, network), link)
    rounds = 2.0 if kind == "all_reduce" else 1.0
    wire = rounds * size_bytes * (ranks - 1) / ranks / bandwidth
    if kind == "all_to_all":
        away = crossing * (domains - 1) / domains
        wire = size_bytes * np.where(
            domains > 1, np.maximum(away * inside / network, 1 / link), (ranks - 1) / ranks / link
        )
        steps = (
            BASE
            + job.device.network_step * np.minimum(domains - 1, 16)
            + INSIDE_STEP * (inside - 1)
        )
    else:
        # Beyond 16 domains trees and other algorithms keep the latency from growing with the ring.
        crossings = np.minimum(domains - 1, 16 + np.log2(np.maximum(domains, 1)))
        steps = BASE + rounds * (
            crossings * job.device.network_step
            + np.minimum((inside - 1) * np.maximum(domains, 1), 128) * INSIDE_STEP
        )

    return np.where(ranks > 1, wire + rates.on("latency", job.device) * steps, 0.0)


def context_seconds(
    job: Job, rates: Rates, attention: Numbers, backward: Numbers, again: Numbers
) -> Numbers:
    """Return the exposed seconds of context parallelism in Plait, per layer and micro-batch.

    The time covers forward and backward. Note [Traffic of context parallelism] in
    `parallel.techniques.context_parallel` has the numbers of bytes.

    Args:
        job: The candidates.
        rates: Constants.
        attention: Seconds of attention's forward, with which the messages of a ring overlap.
        backward: Seconds of attention's backward.
        again: Fraction of the forwards that recomputation repeats.
    """
    model = job.model
    layouts = job.layouts
    tp = job.attention_tp
    ranks = group(job, "cp")
    width = job.element_bytes * job.tokens * (model.head_dim + model.value_width)
    keys_values = width * np.maximum(model.kv_heads / tp, 1)
    full_gather = collective_seconds(job, rates, ranks, keys_values * layouts.cp, "one_way")
    gathered = (3 + again) * full_gather
    # Seconds of one message to the neighbor.
    part = full_gather / np.maximum(layouts.cp - 1, 1)

    # Gradients are sent in float32. Nothing is computed during the last message. On CPUs nothing is
    # computed during the others either, because the cores that compute also carry the traffic.
    message = part * 4 / job.element_bytes
    earlier = message * (layouts.cp - 1)
    overlapped = np.where(job.device.on_cpu, 0.0, earlier)
    ring_backward = (
        np.maximum(full_gather + overlapped - backward, 0) + earlier - overlapped + message
    )
    ring = (1 + again) * np.maximum(full_gather - attention, 0) + ring_backward
    repeated = np.lcm(
        np.asarray(np.maximum(model.kv_heads / tp, 1), dtype=int), np.asarray(layouts.cp, dtype=int)
    )
    exchanged = width * (model.heads / tp + repeated)
    ulysses = (2 + again) * collective_seconds(job, rates, ranks, exchanged, "all_to_all")
    return np.choose(np.asarray(layouts.context), np.broadcast_arrays(gathered, ring, ulysses))


def expert_seconds(job: Job, rates: Rates, again: Numbers) -> Numbers:
    """Return the exposed seconds of expert parallelism per layer with experts.

    Tokens are sent to their experts and back. Without sequence parallelism all tp ranks have the
    same tokens. In Plait each of these ranks then sends a part of the tokens, and results and
    gradients are all-gathered over tp.

    Args:
        job: The candidates.
        rates: Constants.
        again: Fraction of the forwards that recomputation repeats.
    """
    model = job.model
    layouts = job.layouts
    hidden = job.element_bytes * job.tokens * model.hidden
    sent = (
        hidden * model.active / np.where(job.is_plait | (np.asarray(layouts.sp) > 0), layouts.tp, 1)
    )
    ranks = group(job, "ep")

    # Other frameworks send a token once to every domain that has one of its experts, and distribute
    # it there (DeepEP; Megatron-LM's flexible dispatcher). If `active` experts are spread evenly
    # over d domains, d (1 - (1 - 1/d)^active) domains have one. Plait sends a copy per expert.
    domains = ranks.domains
    active = np.maximum(model.active, 1)
    once = domains * (1 - np.power(1 - 1 / domains, active)) / active
    exchange = collective_seconds(
        job, rates, ranks, sent, "all_to_all", crossing=np.where(job.is_plait, 1.0, once)
    ) * (4 + 2 * again)
    gathered = collective_seconds(job, rates, group(job, "tp"), hidden, "one_way") * (2 + again)

    return exchange + np.where(
        job.is_plait & (np.asarray(layouts.ep) > 1) & (np.asarray(layouts.sp) == 0), gathered, 0.0
    )


def send_seconds(job: Job, rates: Rates) -> Numbers:
    """Return the seconds to send the hidden states of a micro-batch to the next pipeline stage.

    The two stages are assumed to be in different domains unless both fit into one domain.
    """
    layouts = job.layouts

    # Megatron-LM splits the hidden states over tp before it sends them. In Plait every rank sends
    # its own, which are complete without sequence parallelism.
    parts = np.where((np.asarray(layouts.sp) > 0) | ~job.is_plait, layouts.tp, 1)
    size = job.element_bytes * job.tokens * job.model.hidden / parts
    per_stage = layouts.tp * layouts.cp * layouts.dp
    near = per_stage * 2 <= job.device.domain
    bandwidth = np.where(
        near,
        job.device.link_bandwidth * rates.on("link", job.device),
        job.device.nic_bandwidth * rates["nic"],
    )
    return np.where(np.asarray(layouts.pp) > 1, size / bandwidth + job.framework.send_seconds, 0.0)


STEP_TERMS = {
    "products": "matrix products of the layers",
    "attention": "attention",
    "elementwise": "norms, residuals and activation functions",
    "recompute": "forward computed again",
    "head": "head and loss",
    "host": "waiting for the host to launch",
    "tp": "exposed traffic of tensor parallelism",
    "cp": "exposed traffic of context parallelism",
    "ep": "exposed traffic of experts",
    "p2p": "sends between stages",
    "idle": "idle pipeline",
    "dp": "exposed traffic of data parallelism",
    "contention": "computation slowed by traffic under it",
    "offload": "activations to the host and back",
    "accumulate": "gradients of micro-batches added up",
    "optimizer": "optimizer step",
    "stragglers": "waiting for the slowest node",
    "fixed": "fixed cost of a step",
}
"""Meaning of each term, in the order of a report."""


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step by term; arrays with one entry per candidate."""

    terms: dict[str, Numbers]

    @property
    def seconds(self) -> Numbers:
        """Sum of the terms."""
        return sum(self.terms.values())


def step_seconds(job: Job, rates: Rates) -> Step:
    """Predict the seconds of an optimizer step for every candidate."""
    layouts = job.layouts
    layers, last_layers = _pace_layers(job)
    layer = layer_cost(job, rates)
    head = head_cost(job, rates)
    per_layer = layer_traffic(job, rates, layer)
    m = layouts.accumulation

    device_layer = (
        layer.forward + layer.backward + per_layer["tp"] + per_layer["cp"] + per_layer["ep"]
    )
    wait = host_wait(job, layer, device_layer)
    sends = 2 * layouts.vpp * send_seconds(job, rates) * rates["p2p"]
    inner = layers * (device_layer + wait) + sends
    last = last_layers * (device_layer + wait) + head + sends
    last_is_slowest = last > inner
    slowest = np.where(last_is_slowest, last, inner)
    all_stages = job.model.layers * (device_layer + wait) + head + layouts.pp * sends
    idle = np.maximum(all_stages - slowest, 0) * idle_share(layouts) * rates["bubble"]

    count = m * np.where(last_is_slowest, last_layers, layers)
    terms = {
        "products": count * (layer.products + layer.products_backward),
        "attention": count * (layer.attention + layer.attention_backward),
        "elementwise": count * (layer.elementwise + layer.elementwise_backward),
        "recompute": count * layer.again,
        "head": m * head * last_is_slowest,
        "host": count * wait,
        "tp": count * per_layer["tp"],
        "cp": count * per_layer["cp"],
        "ep": count * per_layer["ep"],
        "p2p": m * sends,
        "idle": idle,
    }
    compute = sum(
        terms[name]
        for name in ("products", "attention", "elementwise", "recompute", "head", "host")
    )
    parameters = rank_parameters(job)
    exposed, slowed = _data_traffic(
        job,
        rates,
        parameters,
        compute,
        layers * (layer.backward + wait * 0.5),
        layers * (layer.forward + wait * 0.5),
    )
    terms |= {"dp": exposed, "contention": slowed, "offload": _activation_offload(job, compute)}
    sharded = np.where(np.asarray(layouts.stage) >= 1, parameters / layouts.dp_shard, parameters)
    terms["accumulate"] = accumulation_seconds(job, rates, parameters)
    terms["optimizer"] = optimizer_seconds(job, rates, sharded)
    # Stragglers slow every term so far, but not the fixed cost of a step.
    nodes = np.maximum(layouts.world / job.device.devices_per_node, 1)
    terms["stragglers"] = sum(terms.values()) * rates["straggler"] * np.log2(nodes)

    # Few devices have less to coordinate. A quarter of the cost on one device, and all of it from
    # eight devices on, is a guess.
    terms["fixed"] = rates["fixed"] * np.minimum(1 + np.log2(layouts.world), 4) / 4 + np.zeros_like(
        np.asarray(slowest, dtype=float)
    )
    return Step(terms)


def _pace_layers(job: Job) -> tuple[Numbers, Numbers]:
    """Return (layers of the largest stage except the last one, layers of the last stage).

    Plait partitions the model so that the slowest stage is as fast as possible
    (`parallel.pipeline.estimates`). The last stage also computes the head. With one chunk per rank
    it therefore has fewer layers than the other stages.
    """
    most, _, last = stage_layers(job)
    layouts = job.layouts
    model = job.model
    if not job.has_exact_blocks:
        return most, last
    head = (
        model.vocab
        * model.hidden
        / (model.block_parameters / model.layers - model.small_parameters)
    )
    stages = np.maximum(layouts.pp, 2)
    others = stages - 1
    fewest = np.clip(
        np.floor((model.layers + head) / stages - head), 1, np.maximum(model.layers - others, 1)
    )
    pace_of = [
        np.maximum(np.ceil((model.layers - ends) / others), ends + head)
        for ends in (fewest, fewest + 1)
    ]
    ends = np.where(pace_of[1] < pace_of[0], fewest + 1, fewest)
    balanced = (np.asarray(layouts.pp) > 1) & (np.asarray(layouts.vpp) == 1)

    return np.where(balanced, np.ceil((model.layers - ends) / others), most), np.where(
        balanced, ends, last
    )


def host_wait(job: Job, layer: LayerCost, device_seconds: Numbers) -> Numbers:
    """Return the seconds that the device waits for the host in a layer's forward and backward.

    A GPU queues kernels, so it waits only if all launches take longer than `device_seconds`. On a
    CPU, where the process that launches a kernel also computes it, all of the host's time counts.
    """
    host = layer.host * (2.0 + recompute_share(job) * (np.asarray(job.layouts.recompute) > 0))
    return np.where(job.device.on_cpu, host, np.maximum(host - device_seconds, 0))


def rank_parameters(job: Job) -> Numbers:
    """Return the number of parameters of the largest pipeline stage on one tp and ep rank.

    Sharding by data parallelism is not included.
    """
    model = job.model
    layouts = job.layouts
    layers, first, last = stage_layers(job)
    per_layer = model.block_parameters / model.layers
    routed = np.where(
        np.asarray(model.experts) > 0,
        model.expert_layers / model.layers * model.routed_parameters,
        0,
    )

    # Plait also distributes experts over the ranks of tp, so that a rank has complete experts.
    local = (per_layer - routed) / layouts.tp + routed / layouts.ep / np.where(
        job.is_plait, 1, layouts.tp
    )
    one_stage = (
        model.layers * local + (model.embedding_parameters + model.head_parameters) / layouts.tp
    )
    head = (
        np.where(np.asarray(model.tied) > 0, model.vocab * model.hidden, model.head_parameters)
        / layouts.tp
    )
    several = np.maximum(
        first * local + model.embedding_parameters / layouts.tp,
        np.maximum(layers * local, last * local + head),
    )
    return np.where(np.asarray(layouts.pp) > 1, several, one_stage)


def layer_traffic(job: Job, rates: Rates, layer: LayerCost) -> dict[str, Numbers]:
    """Return the exposed seconds of a layer's collectives in forward and backward, per micro-batch.

    The keys are "tp", "cp" and "ep".
    """
    model = job.model
    layouts = job.layouts
    hidden_bytes = job.element_bytes * job.tokens * model.hidden
    tp = group(job, "tp")
    kind = np.asarray(layouts.recompute)
    repeated_share = np.where(
        kind == RECOMPUTE.index("budget"),
        1 - layouts.kept_operators,
        kind == RECOMPUTE.index("full"),
    )

    # Recomputation of full blocks repeats their collectives. In Plait recomputation of operators
    # does as well, because it saves no results of collectives.
    repeated_share = np.where(job.is_plait & (kind >= RECOMPUTE.index("full")), 1.0, repeated_share)
    again = recompute_share(job) * repeated_share
    reduce = collective_seconds(job, rates, tp, hidden_bytes, "all_reduce")
    one_way = collective_seconds(job, rates, tp, hidden_bytes, "one_way")
    sequence = np.asarray(layouts.sp) > 0
    shown = 1 - job.framework.hidden_tp

    # There are two all-reduces per pass. Sequence parallelism splits each into two collectives, and
    # gathers twice more in the backward, half of which overlaps with products. If recomputation
    # ends before a block's last product, the collective after the product is not repeated.
    left_out = job.stops_early * (1 - model.expert_layers / model.layers)
    tensor = np.where(
        sequence, (9 + (4 - left_out) * again) * one_way, (4 + (2 - left_out) * again) * reduce
    )
    # Queries, keys and values are gathered in the forward, and the gradient of the output in the
    # backward.
    if job.replicates_attention:
        tensor = tensor + 4 * one_way
    kv_bytes = (
        job.element_bytes
        * job.tokens
        * layouts.cp
        * model.kv_heads
        * (model.head_dim + model.value_width)
        / layouts.tp
    )
    ring = collective_seconds(job, rates, group(job, "cp"), kv_bytes, "one_way") * (3 + again) * 0.4
    if np.any(np.asarray(layouts.cp) > 1):
        ring = np.where(
            job.is_plait,
            context_seconds(job, rates, layer.attention, layer.attention_backward, again),
            ring,
        )

    exchange = expert_seconds(job, rates, again)
    return {"tp": tensor * shown, "cp": ring, "ep": exchange * model.expert_layers / model.layers}


def _data_traffic(
    job: Job,
    rates: Rates,
    parameters: Numbers,
    compute: Numbers,
    backward: Numbers,
    forward: Numbers,
) -> tuple[Numbers, Numbers]:
    """Return (exposed seconds of data-parallel traffic, seconds that it adds to computation).

    Args:
        job: The candidates.
        rates: Constants.
        parameters: Parameters per rank.
        compute: Seconds of computation per step.
        backward: Seconds of the backward of a micro-batch.
        forward: Seconds of the forward of a micro-batch.
    """
    layouts = job.layouts
    framework = job.framework
    dp_group = group(job, "dp")
    shards = group(job, "shard")
    gradient_bytes = framework.wire_reduce * parameters
    weight_bytes = framework.wire_gather * parameters
    stage = np.asarray(layouts.stage)
    replicated = np.asarray(layouts.dp_replicate) > 1
    reduce_all = collective_seconds(job, rates, dp_group, gradient_bytes, "all_reduce")
    scatter_all = collective_seconds(job, rates, dp_group, gradient_bytes, "one_way")
    scatter = collective_seconds(job, rates, shards, gradient_bytes, "one_way")
    gather = collective_seconds(job, rates, shards, weight_bytes, "one_way")

    # Gradients of a block are packed for their collective and unpacked. On a GPU this overlaps with
    # other kernels and costs little.
    packed = rates["packing.cpu"] * gradient_bytes / memory_rate(job, rates)
    packed = np.where(job.device.on_cpu & (stage >= 2), packed, 0.0)
    scatter = scatter + packed
    scatter_all = scatter_all + packed
    # Replicas reduce their shards with the ranks that have the same shard.
    between = collective_seconds(
        job, rates, group(job, "replicate"), gradient_bytes / shards.size, "all_reduce"
    )

    # At the end of a step, Plait sums the gradients over the ranks of context parallelism.
    rank_bytes = gradient_bytes / np.where(stage > 0, shards.size, 1)
    parts = np.where(
        job.is_plait,
        collective_seconds(job, rates, group(job, "cp"), rank_bytes, "all_reduce"),
        0.0,
    )
    grads = np.where(stage == 0, reduce_all, np.where(replicated, scatter + between, scatter_all))

    # Stage 2 reduces the gradients of every micro-batch. With a pipeline only Plait does this:
    # DeepSpeed does not support the combination, and other frameworks reduce once.
    reduces_each = (stage == 2) & (job.is_plait | (np.asarray(layouts.pp) == 1))
    grads = np.where(reduces_each, scatter * (layouts.accumulation - 1) + grads, grads)
    weights = np.where(stage == 0, 0.0, gather)
    # On CPUs the cores that compute also communicate, so nothing overlaps.
    overlap = np.where(job.device.on_cpu, 0.0, framework.hidden_dp)
    spread = np.where(job.is_plait, 1.0, micro_batches_between_chunks(layouts))
    window_back = np.where(reduces_each, layouts.accumulation, spread) * backward
    shown_grads = grads - np.minimum(grads * overlap, window_back * overlap)
    shown_weights = weights - np.minimum(weights * overlap, spread * forward * overlap)
    hidden = (grads - shown_grads) + (weights - shown_weights)

    traffic = layouts.accumulation * (2 * gather + scatter) + between
    shown_sharded = np.maximum(traffic - overlap * compute, (1 - overlap) * 0.5 * traffic)
    hidden_sharded = traffic - shown_sharded
    is_stage_3 = stage == 3
    exposed = np.where(is_stage_3, shown_sharded, shown_grads + shown_weights) + parts
    return exposed * rates["dp"], np.where(is_stage_3, hidden_sharded, hidden) * rates["contention"]


def _activation_offload(job: Job, compute: Numbers) -> Numbers:
    """Return the exposed seconds of moving activations to the host and back."""
    layouts = job.layouts
    model = job.model
    if not np.any(layouts.offload_activations):
        return np.zeros_like(np.asarray(compute, dtype=float))
    layers = stage_layers(job)[0]
    per_token = (
        12 * model.hidden
        + 2 * model.kv_heads * (model.head_dim + model.value_width)
        + 6 * model.ffn
    ) / layouts.tp
    moved = (
        2
        * layouts.accumulation
        * layers
        * job.tokens
        * per_token
        * layouts.offload_activations
        / job.device.host_bandwidth
    )
    return np.maximum(moved - compute, 0.05 * moved)


MOST_ACTIONS = 60_000
"""Largest number of actions that are simulated, at about 5 us per action."""
RANK_TERMS = ("products", "attention", "elementwise", "recompute", "head", "host", "tp", "cp", "ep")
"""Terms of a step that are part of the simulated durations. The simulation computes `idle`."""


def simulated_terms(job: Job, rates: Rates, terms: Mapping[str, float]) -> dict[str, float] | None:
    """Return the terms of one candidate, with the idle time from a simulation of its pipeline.

    The result is None without a pipeline, or if the schedule has no action table.
    """
    if int(only(job.layouts.pp)) == 1:
        return None

    try:
        timeline = timeline_of(job, rates)
    except InputError:
        return None
    # The busiest rank determines the terms of computation. The rest of the simulated time is idle.
    busiest = max(map(timeline.busy, range(len(timeline.ranks))))

    # The closed form counts equal stages, but the engine's partition has a slowest stage.
    share = busiest / sum(terms[term] for term in RANK_TERMS)
    return {
        **terms,
        **{term: terms[term] * share for term in RANK_TERMS},
        "idle": timeline.total - busiest,
    }


def timeline_of(job: Job, rates: Rates) -> Timeline:
    """Simulate the pipeline of one candidate.

    Without a pipeline, micro-batches run one after another.

    Returns:
        Start and end of every action in seconds.

    Raises:
        InputError: The schedule has no action table, or more than MOST_ACTIONS actions.
    """
    layouts = job.layouts
    pp = int(only(layouts.pp))
    chunks = int(only(layouts.vpp))
    micro_batches = int(only(layouts.accumulation))
    kind = SCHEDULES[int(only(layouts.schedule))]
    name = "1f1b" if pp == 1 else SCHEDULE_NAMES.get(kind)
    stages = pp * chunks
    if name is None:
        raise InputError(
            f"schedule {kind}: Plait does not run it, so it cannot be simulated; use another"
            " schedule"
        )
    if 2 * stages * micro_batches > MOST_ACTIONS:
        raise InputError(
            f"{stages} stages and {micro_batches} micro-batches need more than {MOST_ACTIONS:,}"
            " actions, the most that can be simulated; use fewer micro-batches"
        )

    layers = int(job.model.layers)
    if stages > layers:
        raise InputError(
            f"{stages} stages need at least {stages} layers, but the model has {layers}; use fewer"
            " stages"
        )
    try:
        table = make_schedule(name, pp=pp, microbatches=micro_batches, stages_per_rank=chunks)
    except ConfigError as error:  # layouts that are only estimated may have no table
        raise InputError(error.problems[0].rule) from None
    return simulate(table, _durations(job, rates, stages))


def _durations(job: Job, rates: Rates, stages: int) -> Durations:
    layer = layer_cost(job, rates)
    traffic = layer_traffic(job, rates, layer)
    between = sum(only(value) for value in traffic.values())
    # Half of a layer's traffic belongs to each pass.
    forward = only(layer.forward) + between / 2
    weight = only(layer.products_backward) / 2
    backward = only(layer.backward) + between / 2
    wait = only(host_wait(job, layer, forward + backward)) / 2
    head = only(head_cost(job, rates))
    per_layer = forward + backward + 2 * wait
    counts = balance_stages([1.0] * int(job.model.layers), stages, first=0, last=head / per_layer)
    send = only(send_seconds(job, rates)) * float(rates["p2p"])

    # The products of the head in the forward, for the gradient of its input and for that of its
    # weight take the same time.
    heads = [0.0] * (stages - 1) + [head / 3]

    def of_stages(per_block: float) -> tuple[float, ...]:
        return tuple(n * per_block + extra for n, extra in zip(counts, heads, strict=True))

    return Durations(
        forward=of_stages(forward + wait),
        input=of_stages(backward - weight + wait),
        weight=of_stages(weight),
        send=(send,) * (stages - 1),
    )
