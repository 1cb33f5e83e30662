"""Simulate the pipeline of one layout by its schedule's table.

The simulation refines the idle time of the closed form for the best candidates: with uneven stages,
the head on the last stage, and messages in flight. The table is that of the runtime
(`parallel.schedules.schedule`), the simulation `parallel.schedules.timeline`, and the cut of the
model that of the engine (`parallel.pipeline.balance`). Durations come from the closed form.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import ConfigError, InputError
from plait.parallel.pipeline.balance import cut
from plait.parallel.schedules.schedule import make_schedule
from plait.parallel.schedules.timeline import Durations, Timeline, simulate
from plait.planner.compute import head_cost, layer_cost
from plait.planner.constants import Rates
from plait.planner.hardware import only
from plait.planner.job import SCHEDULES, Job
from plait.planner.offers import SCHEDULE_NAMES
from plait.planner.step import host_wait, layer_traffic
from plait.planner.traffic import send_seconds

MOST_ACTIONS = 60_000
"""Longest table that is simulated; a simulation takes about 5 us per action."""
RANK_TERMS = ("products", "attention", "elementwise", "recompute", "head", "host", "tp", "cp", "ep")
"""Terms of a step that are part of the simulated durations. `idle` is the result."""


def simulated_terms(job: Job, rates: Rates, terms: Mapping[str, float]) -> dict[str, float] | None:
    """Return the terms of one candidate with the simulated idle time.

    None without a pipeline, and if the schedule has no table to simulate.
    """
    if int(only(job.layouts.pp)) == 1:
        return None

    try:
        timeline = timeline_of(job, rates)
    except InputError:
        return None
    busiest = max(timeline.busy(rank) for rank in range(len(timeline.ranks)))

    # The closed form counts equal stages; the cut that the engine makes has a pace of its own.
    share = busiest / sum(terms[term] for term in RANK_TERMS)
    return {
        **terms,
        **{term: terms[term] * share for term in RANK_TERMS},
        "idle": timeline.total - busiest,
    }


def timeline_of(job: Job, rates: Rates) -> Timeline:
    """Simulate one candidate. Without a pipeline the micro-batches run one after another.

    Returns:
        Start and end of every computation in seconds.

    Raises:
        InputError: There is no table, or one longer than MOST_ACTIONS.
    """
    at = job.layouts
    pp = int(only(at.pp))
    chunks = int(only(at.vpp))
    micro_batches = int(only(at.accumulation))
    kind = SCHEDULES[int(only(at.schedule))]
    name = "1f1b" if pp == 1 else SCHEDULE_NAMES.get(kind)
    stages = pp * chunks
    if name is None:
        raise InputError(
            f"the schedule {kind} is priced by its published formula and cannot be simulated"
        )
    if 2 * stages * micro_batches > MOST_ACTIONS:
        raise InputError(
            f"{stages} stages and {micro_batches} micro-batches need more than {MOST_ACTIONS:,}"
            " actions, the most that are simulated"
        )

    layers = int(job.model.layers)
    if stages > layers:
        raise InputError(f"{stages} stages need at least {stages} layers, not {layers}")
    try:
        table = make_schedule(name, pp=pp, microbatches=micro_batches, stages_per_rank=chunks)
    except ConfigError as error:  # layouts that are only priced may have no table
        raise InputError(error.problems[0].rule) from None
    return simulate(table, _durations(job, rates, stages))


def _durations(job: Job, rates: Rates, stages: int) -> Durations:
    layer = layer_cost(job, rates)
    traffic = layer_traffic(job, rates, layer)
    between = sum(only(value) for value in traffic.values())
    forward = only(layer.forward) + between / 2
    weight = only(layer.products_backward) / 2
    backward = only(layer.backward) + between / 2
    wait = only(host_wait(job, layer, forward + backward)) / 2
    head = only(head_cost(job, rates))
    per_layer = forward + backward + 2 * wait
    counts = cut([1.0] * int(job.model.layers), stages, first=0, last=head / per_layer)
    heads = [head if index == stages - 1 else 0.0 for index in range(stages)]
    send = only(send_seconds(job, rates)) * float(rates["p2p"])

    return Durations(
        forward=tuple(n * (forward + wait) + h / 3 for n, h in zip(counts, heads, strict=True)),
        input=tuple(
            n * (backward - weight + wait) + h / 3 for n, h in zip(counts, heads, strict=True)
        ),
        weight=tuple(n * weight + h / 3 for n, h in zip(counts, heads, strict=True)),
        send=(send,) * (stages - 1),
    )
