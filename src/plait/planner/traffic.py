"""Seconds of collectives: bytes over the slowest link, plus a latency per step of a ring.

A ring over n ranks, of which q share a domain (a node, or an NVL72), moves S (n-1)/n bytes per rank
over links inside, and between domains over the q network cards of those ranks. This is the model of
NCCL's ring (`src/graph/tuning.cc`). A step takes 3.4 us inside and 14 us between domains, more on
some clouds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.planner.constants import Rates
from plait.planner.hardware import Numbers
from plait.planner.job import Job

INSIDE_STEP = 3.4e-6
BASE = 8.4e-6
"""Base seconds of a collective: that of NCCL's Simple protocol over NVLink."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, and how many of them share a domain of fast links."""

    size: Numbers
    inside: Numbers

    @property
    def domains(self) -> Numbers:
        """Number of domains of the group."""
        return np.ceil(self.size / self.inside)


def group(job: Job, axis: Literal["tp", "cp", "dp", "shard", "replicate", "ep"]) -> Group:
    """Return the group of an axis.

    tp takes neighboring ranks, then cp, then dp. `shard` is the inner part of dp, and `replicate`
    are the ranks with the same shard. Other frameworks shard states over cp too; Plait replicates
    them there. ep is a part of dp; Plait's takes neighboring ranks of all axes.
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
        crossing: Share of an all-to-all's bytes for other domains that is sent there.
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

    The bytes are those of `parallel.context.traffic`, forward and backward.

    Args:
        job: The candidates.
        rates: Constants.
        attention: Seconds of the forward, under which messages of a ring arrive.
        backward: Seconds of the backward.
        again: Share of forwards that are repeated.
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

    Tokens are sent to their experts and back. Ranks of tp in Plait have the same tokens: each sends
    a part, and results and gradients are gathered, unless sequence parallelism shards them anyway.

    Args:
        job: The candidates.
        rates: Constants.
        again: Share of forwards that are repeated.
    """
    model = job.model
    at = job.layouts
    hidden = job.element_bytes * job.tokens * model.hidden
    sent = hidden * model.active / np.where(job.is_plait | (np.asarray(at.sp) > 0), at.tp, 1)
    ranks = group(job, "ep")

    # A token goes once to every domain that has one of its experts, and is passed on there (DeepEP;
    # Megatron-LM's flexible dispatcher). Of `active` experts, spread evenly over d domains, d (1 -
    # (1 - 1/d)^active) have one. Plait sends a copy for every expert.
    domains = ranks.domains
    active = np.maximum(model.active, 1)
    once = domains * (1 - np.power(1 - 1 / domains, active)) / active
    exchange = collective_seconds(
        job, rates, ranks, sent, "all_to_all", crossing=np.where(job.is_plait, 1.0, once)
    ) * (4 + 2 * again)
    gathered = collective_seconds(job, rates, group(job, "tp"), hidden, "one_way") * (2 + again)

    return exchange + np.where(
        job.is_plait & (np.asarray(at.ep) > 1) & (np.asarray(at.sp) == 0), gathered, 0.0
    )


def send_seconds(job: Job, rates: Rates) -> Numbers:
    """Return the seconds to send hidden states to the next stage.

    The stages are in different domains unless two fit into one.
    """
    at = job.layouts

    # Megatron-LM scatters over tp what it sends; Plait's ranks each send what they have, all of it
    # without sequence parallelism.
    parts = np.where((np.asarray(at.sp) > 0) | ~job.is_plait, at.tp, 1)
    size = job.element_bytes * job.tokens * job.model.hidden / parts
    per_stage = at.tp * at.cp * at.dp
    near = per_stage * 2 <= job.device.domain
    bandwidth = np.where(
        near,
        job.device.link_bandwidth * rates.on("link", job.device),
        job.device.nic_bandwidth * rates["nic"],
    )
    return np.where(np.asarray(at.pp) > 1, size / bandwidth + job.framework.send_seconds, 0.0)
