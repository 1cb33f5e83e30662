"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if there is no similar one.

    The comparison ignores the case of the letters.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    # get_close_matches takes quadratic time, and a file may contain names of any length.
    matches = get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.6)
    if not matches:
        return None
    return by_lower[matches[0]]


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest known name, or a list of all of them."""
    names = sorted(known)
    suggestion = nearest(name, names)
    if suggestion is not None:
        return f"did you mean `{suggestion}`?"
    if not names:
        return "leave it out"
    return f"known are {', '.join(names)}"
