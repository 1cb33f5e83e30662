"""Rates of collectives between the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from plait.comm.measure import measure_group
from plait.validation.ceilings import LEAST_SHARE, datasheet, too_slow
from plait.validation.context import Context, timed
from plait.validation.rows import Verdict, verdict


def collectives(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Measure all-reduce, all-gather, reduce-scatter and exchange over all ranks."""
    figure = float(datasheet(context).link_bandwidth)
    mesh = context.group()
    group = mesh.group("dp_replicate")
    assert group is not None
    seconds = 0.2 if context.is_small else 6.0
    measured = measure_group("dp_replicate", group, None, device=context.device, seconds=seconds)

    # Share of a tensor's bytes that a ring sends over each link. An all-reduce passes it twice.
    ranks = context.world
    sent = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "exchange": 1.0,
    }
    rates = {
        name: sent[name] / cost.seconds_per_byte
        for name, cost in measured.whole.costs.items()
        if name in sent and cost.seconds_per_byte
    }
    problem = "no all-reduce was measured"
    if "all_reduce" in rates:
        problem = too_slow("all_reduce", rates["all_reduce"], figure)
    numbers = {
        "rates": rates,
        "datasheet": figure,
        "least_share": LEAST_SHARE,
        "costs": {name: asdict(cost) for name, cost in measured.whole.costs.items()},
    }
    return timed(context, verdict([problem] if problem else [], **numbers))
