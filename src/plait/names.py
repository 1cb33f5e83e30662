"""Names and numbers in messages: suggestions for misspelt names, lists, and nouns in the plural."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def similar_names(
    name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Return the known names that are most similar to `name`, most similar first.

    The comparison ignores the case of the letters.

    Args:
        name: The misspelt name.
        known: Names to choose from.
        count: Largest number of names to return.
        cutoff: Least similarity of a name, from 0 to 1.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    # get_close_matches takes quadratic time, and a file may contain names of any length.
    matches = get_close_matches(name.lower()[:100], by_lower, n=count, cutoff=cutoff)
    return [by_lower[match] for match in matches]


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" for similar names, followed by a space, or "" without any.

    The arguments are those of `similar_names`.
    """
    matches = similar_names(name, known, count=count, cutoff=cutoff)
    return f"did you mean {', '.join(matches)}? " if matches else ""


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest known name, or a list of all of them."""
    names = sorted(known)
    matches = similar_names(name, names)
    if matches:
        return f"did you mean `{matches[0]}`?"
    if not names:
        return "leave it out"
    return f"known are {', '.join(names)}"


def listed_names(names: Sequence[str], most: int) -> str:
    """Return a list of the first `most` names as text, followed by the number of further ones."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def number_of(count: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: `1 process`, `2 processes`."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count} {noun}{ending}"
