"""Seconds of collectives: bytes over the slowest link on their way, plus a latency for every step of a ring.

A ring over n ranks of which q sit in one domain (a node, or an NVL72) carries S (n-1)/n bytes a rank over links inside, and between domains
over the q network cards of those ranks: the model of NCCL's ring, `src/graph/tuning.cc`. A step costs 3.4 us inside and 14 us between,
more on some clouds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.planner.constants import Rates
from plait.planner.hardware import Numbers
from plait.planner.job import Job

INSIDE_STEP, BASE = 3.4e-6, 8.4e-6
"""Seconds: NCCL's Simple protocol over NVLink, and its base. A step over a network is the device's `network_step`."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, how many of them share a domain, and how far apart neighbours are."""

    size: Numbers
    inside: Numbers


def group(job: Job, axis: Literal["tp", "cp", "dp", "shard", "replicate", "ep"]) -> Group:
    """The group of an axis. tp takes neighbouring ranks, then cp, then dp; `shard` is the inner part of dp, and `replicate` the ranks that
    have the same shard; ep lies within dp."""
    at = job.layouts
    size, stride = {
        "tp": (at.tp, 1),
        "cp": (at.cp, at.tp),
        "dp": (at.dp * at.cp, at.tp),
        "shard": (at.dp_shard * at.cp, at.tp),
        "replicate": (at.dp_replicate, at.tp * at.cp * at.dp_shard),
        "ep": (at.ep, at.tp * at.cp),
    }[axis]
    inside = np.clip(np.floor_divide(job.device.domain, stride), 1, size)
    return Group(size, inside)


def collective_seconds(
    job: Job, rates: Rates, where: Group, size_bytes: Numbers, kind: Literal["all_reduce", "one_way", "all_to_all"]
) -> Numbers:
    """All-reduce, one way of it (all-gather or reduce-scatter) or all-to-all of a full tensor of `size_bytes`."""
    n, inside = where.size, where.inside
    domains = np.ceil(n / inside)
    # Few ranks reach less of a link: 268, 325 and 345 GB/s of 450 with 2, 4 and 8 H100 (NCCL's table for them).
    link = job.device.link_bandwidth * rates.on("link", job.device) * inside / (inside + 0.5)
    network = job.device.nic_bandwidth * rates["nic"] * inside / np.power(domains, rates["congestion"])
    bandwidth = np.where(domains > 1, np.minimum(link, network), link)
    rounds = 2.0 if kind == "all_reduce" else 1.0
    wire = rounds * size_bytes * (n - 1) / n / bandwidth
    if kind == "all_to_all":
        away = (domains - 1) / domains
        wire = size_bytes * np.where(domains > 1, np.maximum(away * inside / network, 1 / link), (n - 1) / n / link)
        steps = BASE + job.device.network_step * np.minimum(domains - 1, 16) + INSIDE_STEP * (inside - 1)
    else:
        # Beyond 16 domains trees and other algorithms keep the latency from growing with the ring.
        crossings = np.minimum(domains - 1, 16 + np.log2(np.maximum(domains, 1)))
        steps = BASE + rounds * (crossings * job.device.network_step + np.minimum((inside - 1) * np.maximum(domains, 1), 128) * INSIDE_STEP)
    return np.where(n > 1, wire + rates.on("latency", job.device) * steps, 0.0)


def send_seconds(job: Job, rates: Rates) -> Numbers:
    """One hidden state from a stage to the next: between domains unless two stages fit in one."""
    at = job.layouts
    # Megatron-LM scatters over tp what it sends; Plait's ranks each send what they have, all of it without sequence parallelism.
    parts = np.where(np.asarray(at.sp) > 0, at.tp, 1) if job.own else at.tp
    size = job.element_bytes * job.tokens * job.model.hidden / parts
    per_stage = at.tp * at.cp * at.dp
    near = per_stage * 2 <= job.device.domain
    bandwidth = np.where(near, job.device.link_bandwidth * rates.on("link", job.device), job.device.nic_bandwidth * rates["nic"])
    return np.where(np.asarray(at.pp) > 1, size / bandwidth + job.framework.send_seconds, 0.0)
