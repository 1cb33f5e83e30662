"""docs/development/waits.md."""

from __future__ import annotations

from collections.abc import Mapping

from tools.planted_waits.places import Wait, waits
from tools.planted_waits.session import Found

STILL_ORDERED: dict[str, str] = {
    "comm/messages.py:work.wait() (2)": "`is_completed` has found the message delivered; the call raises what failed",
}
"""Place to the edge that orders what a wait that nobody misses ordered."""


def page(results: Mapping[str, Found], date: str) -> str:
    """Return the text for results of which the newest are of `date`."""
    places = waits()
    device = [wait for wait in places if not wait.reason]
    known = [wait for wait in device if wait.place in results]
    noticed = sum(bool(results[wait.place].noticed) for wait in known)
    missing = f" Not run yet: {len(device) - len(known)}." if len(known) < len(device) else ""
    lines = [
        "# Waits for a device",
        "",
        "Written by `python -m tools.planted_waits`; do not edit. Every call in the package that orders a device's work, or lets it",
        "overlap, listed from the syntax tree. Each was taken out alone, and the tests on the simulated device that come by were run, the",
        "fastest first (`test_waits.py`, then `test_ahead.py`, `test_generation.py`, `test_context.py` and `test_cover.py`), until one",
        "failed.",
        "",
        f"**{noticed} of {len(device)} are noticed.**{missing} Last run: {date}.",
        "",
        "| place | what is taken out | tests that come by | noticed by | or still ordered by |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(wait, results.get(wait.place)) for wait in device]
    lines += ["", "Waits that are not for a device, which the tests without one cover:", ""]
    lines += ["| place | what it is | waits for |", "|---|---|---|"]
    lines += [
        f"| `{wait.file}` | `{wait.code}` | {wait.reason} |"
        for wait in places
        if wait.reason and not wait.only_timed
    ]
    lines += [
        "",
        "Waits that are not taken out, because only a measured time follows from them; they count as neither:",
        "",
    ]
    lines += ["| place | what it is | why |", "|---|---|---|"]
    lines += [
        f"| `{wait.file}` | `{wait.code}` | {wait.reason} |" for wait in places if wait.only_timed
    ]
    return "\n".join(lines) + "\n"


def _row(wait: Wait, found: Found | None) -> str:
    if found is None:
        return f"| `{wait.file}` | `{wait.code}` | | not run | |"
    by = f"`{found.noticed}`" if found.noticed else "nothing"
    still = "" if found.noticed else STILL_ORDERED.get(wait.place, "not looked into yet")
    return f"| `{wait.file}` | `{wait.code}` | {found.reached} | {by} | {still} |"
