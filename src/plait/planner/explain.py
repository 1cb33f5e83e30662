"""Explanation of a plan: the best layout compared with alternatives that a user asks about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import ConfigError
from plait.planner.calibrate import Calibration
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES
from plait.planner.search import LayoutChoice, Plan, plan
from plait.planner.step_time import STEP_TERMS
from plait.planner.techniques import RECOMPUTE_NAMES, format_fixed


@dataclass(frozen=True)
class Comparison:
    """Best layout of a search, compared with the best layout that satisfies a user's query."""

    query: str
    winner: LayoutChoice
    other: LayoutChoice | None
    reason: str
    """Sentence with the term that decides, or the reason why no such layout exists."""
    differences: tuple[tuple[str, float, float], ...] = ()
    """(term, winner's seconds, other's seconds), the largest difference first."""


def describe(layout: Mapping[str, Any]) -> str:
    """Return a layout as text, such as `tp 4 + sp, dp 16, ZeRO 2, micro-batch 2 x 8`."""
    fields = {name: int(value) for name, value in layout.items() if isinstance(value, int | float)}
    parts = []
    if fields["pp"] > 1:
        chunks = f" x {fields['vpp']}" if fields["vpp"] > 1 else ""
        parts.append(f"pp {fields['pp']} ({SCHEDULES[fields['schedule']]}{chunks})")
    if fields["tp"] > 1:
        parts.append(f"tp {fields['tp']}" + (" + sp" if fields["sp"] else ""))
    if fields["cp"] > 1:
        parts.append(f"cp {fields['cp']} ({CONTEXT[fields['context']]})")
    if fields["ep"] > 1:
        parts.append(f"ep {fields['ep']}")
    if fields["dp_replicate"] > 1 and fields["dp_shard"] > 1:
        parts.append(f"dp {fields['dp_replicate']} x {fields['dp_shard']}")
    else:
        parts.append(f"dp {fields['dp_replicate'] * fields['dp_shard']}")
    parts.append(f"ZeRO {fields['stage']}")
    parts.append(f"micro-batch {fields['micro_batch']} x {fields['accumulation']}")
    if fields["recompute"]:
        parts.append(_describe_recomputation(layout))
    if fields["loss_chunk"]:
        parts.append(f"loss in chunks of {fields['loss_chunk']}")
    share = layout["offload"]
    if share == 1:
        parts.append("optimizer on the host")
    elif share:
        parts.append(f"{share:.0%} of the optimizer on the host")
    return ", ".join(parts)


def ties_of(result: Plan) -> str:
    """Return a sentence that says how many of the best layouts may be equally fast.

    The result is empty if there is only one.
    """
    if result.ties < 2:
        return ""
    furthest = result.best[result.ties - 1].seconds / result.best[0].seconds - 1
    return (
        f"1 to {result.ties} are ties: their times differ by at most {furthest:.1%}, which is less"
        " than the accuracy of comparing two layouts"
    )


def _describe_recomputation(layout: Mapping[str, Any]) -> str:
    kind = RECOMPUTE[int(layout["recompute"])]
    if kind == "budget":
        return (
            f"recompute by a budget ({layout['kept_operators']:.0%} of the blocks selective, the"
            " others full)"
        )

    interval = ""
    every = int(layout["every"])
    if every > 1:
        interval = f" of every {every}{ {2: 'nd', 3: 'rd'}.get(every, 'th') } block"
    return f"recompute {RECOMPUTE_NAMES[kind]}{interval}"


def why(
    result: Plan,
    query: Mapping[str, int],
    text: str,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Comparison:
    """Compare the best layout of a plan with the best layout that satisfies a query.

    Args:
        result: Plan with at least one layout.
        query: Layout fields and their values in the query, such as tp = 4.
        text: The query as the user wrote it.
        fixed: Layout fields that were fixed in the plan. The query overrides them.
        calibration: Constants of this machine. None uses those of the package.
    """
    fixed = fixed or {}
    winner = result.best[0]
    if all(int(winner.layout[name]) == value for name, value in query.items()):
        return Comparison(text, winner, winner, f"{text} is what the plan chose")

    try:
        other = plan(result.request, fixed={**fixed, **query}, calibration=calibration, best=1)
    except ConfigError as error:
        return Comparison(text, winner, None, f"{text} cannot be: {error.problems[0].rule}")
    if not other.best:
        reason = "no candidate fits with enough certainty"
        if other.shortages:
            least = min(other.shortages, key=lambda shortage: shortage.needed_bytes)
            reason = f"{least.region} {least}"
        return Comparison(text, winner, None, f"{text} does not fit: {reason}")

    alternative = other.best[0]
    differences = sorted(
        ((name, winner.terms[name], alternative.terms[name]) for name in STEP_TERMS),
        key=lambda entry: -abs(entry[2] - entry[1]),
    )
    name, ours, theirs = max(differences, key=lambda entry: entry[2] - entry[1])
    slower = alternative.seconds / winner.seconds - 1
    if slower < 0:
        against = format_fixed(
            {key: value for key, value in fixed.items() if value != query.get(key, value)}
        )
        because = "of these the search keeps what was fastest by the closed form"
        if against:
            because = f"{against} is fixed"
        reason = (
            f"{text} is {-slower:.1%} faster ({alternative.seconds:.3g} s, not"
            f" {winner.seconds:.3g} s): {because}"
        )
        return Comparison(text, winner, alternative, reason, tuple(differences))

    reason = (
        f"{text} is {slower:.1%} slower ({alternative.seconds:.3g} s, not {winner.seconds:.3g} s): "
        f"{STEP_TERMS[name]} takes {theirs:.3g} s, not {ours:.3g} s"
    )
    if winner.seconds_high > alternative.seconds and slower < 0.1:
        reason += "; the difference is within the uncertainty"
    return Comparison(text, winner, alternative, reason, tuple(differences))


def neighbours(result: Plan) -> list[str]:
    """Return queries such as `tp=4`, each of which changes one field of the best layout."""
    layout = result.best[0].layout
    techniques = result.request.techniques
    queries = []
    for name in ("tp", "pp", "micro_batch"):
        if name == "pp" and not techniques.pipeline:
            continue
        value = int(layout[name])
        queries.append(f"{name}={value * 2}")
        if value > 1 and value % 2 == 0:
            queries.append(f"{name}={value // 2}")

    queries += [f"stage={stage}" for stage in range(4) if stage != int(layout["stage"])]
    for kind in techniques.recompute:
        if kind != RECOMPUTE[int(layout["recompute"])]:
            queries.append(f"recompute={RECOMPUTE_NAMES[kind]}")
    return queries
