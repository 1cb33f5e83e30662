"""What every benchmark of training steps says of its baselines: cells of its tables, and the notes that a reader of them needs.

Entries are those of a result document: `spread_seconds`, `agreement`, `foreign_share`, `failure` and, by phase, `phases_ms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GOOD_ENOUGH = 5
"""Fewest undisturbed rounds that a ratio may stand on without a word of warning."""

Entry = Mapping[str, Any]


def failed_row(entry: Entry, columns: int) -> tuple[str, ...] | None:
    """The row of a baseline that has no time; None where it has one."""
    if entry["failure"]:
        word = "failed"
    elif entry["spread_seconds"] is None:
        word = "disturbed"
    else:
        return None
    return (entry["title"], word, *[""] * (columns - 2))


def ratio_cell(ratio: Mapping[str, float] | None) -> str:
    """Median and interval of a ratio."""
    return (
        "" if ratio is None else f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    )


def phase_row(title: str, seen: Mapping[str, float], phases: Sequence[str]) -> tuple[str, ...]:
    """Milliseconds a step and phase, how much of them was waiting, other threads, and all."""
    waiting = sum(seen[f"{phase} waiting"] for phase in phases)
    cells = [*(seen[phase] for phase in phases), waiting, seen["threads"], seen["total"]]
    return (title, *(f"{value:.0f}" for value in cells))


def notes(entries: Mapping[str, Entry], pace: Mapping[str, Any]) -> list[str]:
    """Who failed, disagreed or was disturbed; `pace` has `rounds` and `foreign_share`, the limit of a turn."""
    said = [
        note
        for name, entry in entries.items()
        for note in _notes_of_one(name, entry, pace["rounds"])
    ]
    compared = [entry["agreement"] for entry in entries.values() if entry["agreement"]]
    if compared and all(each["holds"] for each in compared):
        early, late, steps = (
            max(each[key] for each in compared) for key in ("early_loss", "late_loss", "steps")
        )
        said.append(
            f"losses of all {len(compared)} engines agree: by {early:.1e} in the first steps, by {late:.1e} over up to {steps} steps"
        )
    shares = [share for entry in entries.values() for share in entry["foreign_share"]]
    said.append(
        f"{sum(share > pace['foreign_share'] for share in shares)} of {len(shares)} turns were disturbed (other programs used more than "
        f"{pace['foreign_share']:.0%} of the machine) and are not in the numbers"
    )
    return said


def _notes_of_one(name: str, entry: Entry, rounds: int) -> list[str]:
    said = []
    agreement = entry["agreement"]
    if agreement and not agreement["holds"]:
        said.append(
            f"{name} DISAGREES with the reference over {agreement['steps']} steps: loss by {agreement['early_loss']:.1e} early and "
            f"{agreement['late_loss']:.1e} later, gradient norm by {agreement['early_norm']:.1e} relative"
        )
    if entry["failure"]:
        said.append(f"{name} failed: {entry['failure'].splitlines()[0]}")
    elif (entry["spread_seconds"] or {"count": 0})["count"] < min(GOOD_ENOUGH, rounds):
        said.append(f"{name} had fewer than {GOOD_ENOUGH} undisturbed rounds: its ratios are weak")
    return said


def all_good(entries: Mapping[str, Entry]) -> bool:
    """Whether every baseline ran, agreed with the reference where it is to (its agreement is not None), and had an undisturbed turn."""
    return all(
        entry["failure"] is None
        and entry["spread_seconds"] is not None
        and (entry["agreement"] is None or entry["agreement"]["holds"])
        for entry in entries.values()
    )
