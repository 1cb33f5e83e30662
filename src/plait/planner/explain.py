"""Why this layout and not that one: the best of the other kind next to the winner, term by term;
and what changes when the cluster does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from plait.errors import ConfigError
from plait.planner.calibrate import Calibration
from plait.planner.choice import Choice
from plait.planner.fixed import written
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES
from plait.planner.offers import RECOMPUTE_NAMES
from plait.planner.request import Request
from plait.planner.search import Plan, Shortage, plan
from plait.planner.step import TERMS
from plait.units import GIB


@dataclass(frozen=True)
class Comparison:
    """The winner and the best layout that meets a query."""

    query: str
    winner: Choice
    other: Choice | None
    reason: str
    """One sentence: the term that decides, or why there is no such layout."""
    differences: tuple[tuple[str, float, float], ...] = ()
    """(term, seconds of the winner, seconds of the other), the largest difference first."""


def describe(layout: Mapping[str, Any]) -> str:
    """`tp 4 + sp, dp_shard 16, ZeRO 2, micro-batch 2 x 8`."""
    at = {name: int(value) for name, value in layout.items() if isinstance(value, int | float)}
    chunks = f" x {at['vpp']}" if at["vpp"] > 1 else ""
    parts = [f"pp {at['pp']} ({SCHEDULES[at['schedule']]}{chunks})"] if at["pp"] > 1 else []
    parts += [f"tp {at['tp']}" + (" + sp" if at["sp"] else "")] if at["tp"] > 1 else []
    parts += [f"cp {at['cp']} ({CONTEXT[at['context']]})"] if at["cp"] > 1 else []
    parts += [f"ep {at['ep']}"] if at["ep"] > 1 else []
    parts += [
        (
            f"dp {at['dp_replicate']} x {at['dp_shard']}"
            if at["dp_replicate"] > 1 and at["dp_shard"] > 1
            else f"dp {at['dp_replicate'] * at['dp_shard']}"
        )
    ]
    parts += [f"ZeRO {at['stage']}", f"micro-batch {at['micro_batch']} x {at['accumulation']}"]
    parts += [_recomputation(layout)] if at["recompute"] else []
    parts += [f"loss in chunks of {at['loss_chunk']}"] if at["loss_chunk"] else []
    share = layout["offload"]
    parts += (
        ["optimizer on the host" if share == 1 else f"{share:.0%} of the optimizer on the host"]
        if share
        else []
    )
    return ", ".join(parts)


def ties_of(found: Plan) -> str:
    """Which of the best may as well be the fastest, in a sentence; empty where one is faster than
    what two layouts are known to.
    """
    if found.ties < 2:
        return ""
    furthest = found.best[found.ties - 1].seconds / found.best[0].seconds - 1
    return (
        f"1 to {found.ties} are ties: {furthest:.1%} between them is less than what the times of"
        " two layouts are known to"
    )


def _recomputation(layout: Mapping[str, Any]) -> str:
    kind = RECOMPUTE[int(layout["recompute"])]
    every = int(layout["every"])
    if kind == "budget":
        return (
            f"recompute by a budget ({layout['kept_operators']:.0%} of the blocks selective, the"
            " others full)"
        )
    of = f" of every {every}{ {2: 'nd', 3: 'rd'}.get(every, 'th') } block" if every > 1 else ""
    return f"recompute {RECOMPUTE_NAMES[kind]}{of}"


def why(
    found: Plan,
    query: Mapping[str, int],
    text: str,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Comparison:
    """Compare the winner with the best layout that has the values of `query` (`text` is how the
    user wrote them), and those that were `fixed` for the winner where the query does not set them.
    """
    fixed = fixed or {}
    winner = found.best[0]
    if all(int(winner.layout[name]) == value for name, value in query.items()):
        return Comparison(text, winner, winner, f"{text} is what the plan chose")
    try:
        other = plan(found.request, fixed={**fixed, **query}, calibration=calibration, best=1)
    except ConfigError as error:
        return Comparison(text, winner, None, f"{text} cannot be: {error.problems[0].rule}")
    if not other.best:
        least: Shortage | None = (
            min(other.shortages, key=lambda s: s.needed) if other.shortages else None
        )
        reason = f"{least.region} {least}" if least else "no candidate fits with enough certainty"
        return Comparison(text, winner, None, f"{text} does not fit: {reason}")
    one = other.best[0]
    differences = sorted(
        ((name, winner.terms[name], one.terms[name]) for name in TERMS),
        key=lambda entry: -abs(entry[2] - entry[1]),
    )
    name, ours, theirs = max(differences, key=lambda entry: entry[2] - entry[1])
    slower = one.seconds / winner.seconds - 1
    if slower < 0:
        against = written(
            {key: value for key, value in fixed.items() if value != query.get(key, value)}
        )
        because = (
            f"{against} is fixed"
            if against
            else "of these the search keeps what was fastest by the closed form"
        )
        reason = (
            f"{text} is {-slower:.1%} faster ({one.seconds:.3g} s, not {winner.seconds:.3g} s):"
            f" {because}"
        )
        return Comparison(text, winner, one, reason, tuple(differences))
    reason = f"{text} is {slower:.1%} slower ({one.seconds:.3g} s, not {winner.seconds:.3g} s): "
    reason += f"{TERMS[name]} takes {theirs:.3g} s, not {ours:.3g} s"
    unsure = winner.seconds_high > one.seconds
    return Comparison(
        text,
        winner,
        one,
        reason + ("; the difference is within the uncertainty" if unsure and slower < 0.1 else ""),
        tuple(differences),
    )


def neighbours(found: Plan) -> list[str]:
    """Queries one step from the winner, as a user would write them."""
    at = found.best[0].layout
    queries = []
    for name in ("tp", "pp", "micro_batch"):
        value = int(at[name])
        queries += [f"{name}={value * 2}"] + (
            [f"{name}={value // 2}"] if value > 1 and value % 2 == 0 else []
        )
    queries += [f"stage={stage}" for stage in range(4) if stage != int(at["stage"])]
    if len(found.request.offers.recompute) > 1:
        queries += [
            f"recompute={RECOMPUTE_NAMES[kind]}"
            for kind in found.request.offers.recompute
            if kind != RECOMPUTE[int(at["recompute"])]
        ]
    if not found.request.offers.pipeline:
        queries = [query for query in queries if not query.startswith("pp=")]
    return queries


@dataclass(frozen=True)
class Change:
    """The best plan under other circumstances."""

    what: str
    seconds: float | None
    tokens_per_second: float | None
    layout: str
    note: str = ""


def sensitivity(found: Plan, *, calibration: Calibration | None = None) -> list[Change]:
    """The search again with half and twice the network, the links, the memory and the batch."""
    request = found.request
    device = request.cluster.device

    def on(**changes: Any) -> Request:
        return replace(request, cluster=replace(request.cluster, device=replace(device, **changes)))

    cases: list[tuple[str, Request]] = []
    for label, factor in (("half", 0.5), ("twice", 2.0)):
        nic, link, memory = (
            getattr(device, name) * factor
            for name in ("nic_bandwidth", "link_bandwidth", "memory_bytes")
        )
        batch = int(request.global_batch * factor)
        if request.cluster.devices > device.domain:
            cases.append(
                (f"{label} the network ({nic / 1e9:.3g} GB/s a device)", on(nic_bandwidth=nic))
            )
        cases += [
            (f"{label} the links ({link / 1e9:.3g} GB/s)", on(link_bandwidth=link)),
            (f"{label} the memory ({memory / GIB:.3g} GiB)", on(memory_bytes=memory)),
            (f"{label} the batch ({batch})", replace(request, global_batch=max(batch, 1))),
        ]
    changes = []
    for what, changed in cases:
        try:
            outcome = plan(changed, calibration=calibration, best=1)
        except ConfigError as error:
            changes.append(Change(what, None, None, "", f"no layout: {error.problems[0].rule}"))
            continue
        if not outcome.best:
            changes.append(Change(what, None, None, "", "nothing fits"))
            continue
        one = outcome.best[0]
        changes.append(Change(what, one.seconds, one.tokens_per_second, describe(one.layout)))
    return changes
