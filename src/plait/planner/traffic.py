"""Seconds of collectives: bytes over the slowest link on their way, plus a latency for every step
of a ring.

A ring over n ranks of which q sit in one domain (a node, or an NVL72) carries S (n-1)/n bytes a
rank over links inside, and between domains over the q network cards of those ranks: the model of
NCCL's ring, `src/graph/tuning.cc`. A step costs 3.4 us inside and 14 us between, more on some
clouds.
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
"""Seconds: NCCL's Simple protocol over NVLink, and its base. A step over a network is the device's
`network_step`.
"""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, how many of them share a domain, and how far apart
    neighbours are.
    """

    size: Numbers
    inside: Numbers

    @property
    def domains(self) -> Numbers:
        """That they are in."""
        return np.ceil(self.size / self.inside)


def group(job: Job, axis: Literal["tp", "cp", "dp", "shard", "replicate", "ep"]) -> Group:
    """The group of an axis. tp takes neighbouring ranks, then cp, then dp; `shard` is the inner
    part of dp, and `replicate` the ranks that have the same shard. Others shard states over cp too;
    Plait replicates them there. ep lies within dp, but Plait's takes neighbouring ranks of all
    axes.
    """
    at = job.layouts
    over_cp = np.where(job.is_plait, 1, at.cp)
    size, stride = {
        "tp": (at.tp, 1),
        "cp": (at.cp, at.tp),
        "dp": (at.dp * over_cp, at.tp * at.cp // over_cp),
        "shard": (at.dp_shard * over_cp, at.tp * at.cp // over_cp),
        "replicate": (at.dp_replicate, at.tp * at.cp * at.dp_shard),
        "ep": (at.ep, np.where(job.is_plait, 1, at.tp * at.cp)),
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
    """All-reduce, one way of it (all-gather or reduce-scatter) or all-to-all of a full tensor of
    `size_bytes`; of an all-to-all's bytes for other domains the share `crossing` is sent there.
    """
    n = where.size
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
    wire = rounds * size_bytes * (n - 1) / n / bandwidth
    if kind == "all_to_all":
        away = crossing * (domains - 1) / domains
        wire = size_bytes * np.where(
            domains > 1, np.maximum(away * inside / network, 1 / link), (n - 1) / n / link
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
    return np.where(n > 1, wire + rates.on("latency", job.device) * steps, 0.0)


def context_seconds(
    job: Job, rates: Rates, attention: Numbers, backward: Numbers, again: Numbers
) -> Numbers:
    """Exposed seconds a layer of the keys and values that Plait moves between the parts of
    sequences, forward and backward, for a micro-batch. `attention` and `backward` are the seconds
    under which a ring's messages arrive; `again` is the share of forwards that are repeated. The
    bytes are those of `parallel.context.traffic`.
    """
    model = job.model
    at = job.layouts
    tp = 1 if job.whole_attention else at.tp
    ranks = group(job, "cp")
    width = job.element_bytes * job.tokens * (model.head_dim + model.value_width)
    both = width * np.maximum(model.kv_heads / tp, 1)
    whole = collective_seconds(job, rates, ranks, both * at.cp, "one_way")
    gathered = (3 + again) * whole
    part = whole / np.maximum(at.cp - 1, 1)  # a message to the neighbour
    # Gradients are sent in float32. Nothing is computed during the last message. On CPUs nothing is
    # computed during the others either, because the cores that compute also carry the traffic.
    message = part * 4 / job.element_bytes
    earlier = message * (at.cp - 1)
    overlapped = np.where(job.device.on_cpu, 0.0, earlier)
    ring_backward = np.maximum(whole + overlapped - backward, 0) + earlier - overlapped + message
    ring = (1 + again) * np.maximum(whole - attention, 0) + ring_backward
    repeated = np.lcm(
        np.asarray(np.maximum(model.kv_heads / tp, 1), dtype=int), np.asarray(at.cp, dtype=int)
    )
    exchanged = width * (model.heads / tp + repeated)
    ulysses = (2 + again) * collective_seconds(job, rates, ranks, exchanged, "all_to_all")
    return np.choose(np.asarray(at.context), np.broadcast_arrays(gathered, ring, ulysses))


def expert_seconds(job: Job, rates: Rates, again: Numbers) -> Numbers:
    """Exposed seconds of a layer with experts on different ranks: tokens there and back, and where
    Plait's ranks of tp have the same tokens, the results and gradients gathered from the part that
    each sent, but where each keeps a part of the sequence.
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
    """One hidden state from a stage to the next: between domains unless two stages fit in one."""
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
