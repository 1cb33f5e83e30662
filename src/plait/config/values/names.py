"""Which known name a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most like, whatever the case of its letters; None where nothing
    is near.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def instead(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean `{near}`?"
    return f"known are {', '.join(names)}" if names else "leave it out"
