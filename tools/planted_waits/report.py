"""Results of the last runs in docs/development/waits.json, and docs/development/waits.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.common.report import markdown, read, today
from tools.planted.project import ROOT
from tools.planted_waits.places import Wait
from tools.planted_waits.session import Outcome

RESULTS = ROOT / "docs/development/waits.json"
PAGE = ROOT / "docs/development/waits.md"
STILL_ORDERED = {
    "comm/messages.py:work.wait() (2)": "`is_completed` has found the message delivered; the call "
    "raises what failed",
}
"""What orders the work if a wait is taken out that no test misses, keyed by place."""


def load() -> tuple[dict[str, Outcome], str]:
    """Return the outcomes keyed by place, and the date of the last run."""
    recorded = read(RESULTS, {"date": "", "waits": []})
    return {row["place"]: Outcome(**row) for row in recorded["waits"]}, recorded["date"]


def store(outcomes: Mapping[str, Outcome], places: Sequence[Wait]) -> None:
    """Write the outcomes of places that still exist, as of today."""
    names = {wait.place for wait in places}
    rows = [asdict(outcome) for place, outcome in sorted(outcomes.items()) if place in names]
    text = json.dumps({"date": today(), "waits": rows}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def page(places: Sequence[Wait], outcomes: Mapping[str, Outcome], date: str) -> str:
    """Return the page for outcomes of which the newest are of `date`."""
    device = [wait for wait in places if not wait.reason]
    recorded = [outcomes[wait.place] for wait in device if wait.place in outcomes]
    noticed = sum(bool(outcome.noticed) for outcome in recorded)
    open_count = len(device) - len(recorded)
    header = ("place", "what is taken out", "tests that come by", "noticed by", "still ordered by")
    rows = [_row(wait, outcomes.get(wait.place)) for wait in device]
    lines = [
        "# Waits for a device",
        "",
        "Written by `make waits`; do not edit. The table has every call in the package that orders",
        "the work of a device, or lets it overlap, from the syntax tree. Each was taken out alone.",
        "The tests on the simulated device that reach it ran, the fastest first (`test_waits.py`,",
        "`test_ahead.py`, `test_generation.py`, `test_context.py`, `test_cover.py`), until one",
        "failed.",
        "",
        f"**{noticed} of {len(device)} are noticed.**"
        + (f" Not run yet: {open_count}." if open_count else "")
        + f" Last run: {date}.",
        "",
        markdown(header, rows, right=()),
    ]
    others = (
        ("Waits that are not for a device. Tests without one cover them:", "waits for", False),
        ("Waits from which only a measured time follows. They are not taken out:", "why", True),
    )
    for title, column, only_timed in others:
        left_out = [wait for wait in places if wait.reason and wait.only_timed == only_timed]
        rows = [(f"`{wait.file}`", f"`{wait.code}`", wait.reason) for wait in left_out]
        lines += [title, "", markdown(("place", "what it is", column), rows, right=())]
    return "\n".join(lines)


def _row(wait: Wait, outcome: Outcome | None) -> tuple[str, ...]:
    place = (f"`{wait.file}`", f"`{wait.code}`")
    if outcome is None:
        return (*place, "", "not run", "")
    if outcome.noticed:
        return (*place, str(outcome.reached), f"`{outcome.noticed}`", "")
    still = STILL_ORDERED.get(wait.place, "unknown")
    return (*place, str(outcome.reached), "nothing", still)
