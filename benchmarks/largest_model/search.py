"""Which is the largest of a row of sizes that fits. Pure."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    fits: Callable[[int], bool], *, least: int = 1, most: int, tolerance: float = 0.1
) -> int:
    """The largest size from `least` to `most` that fits, to within `tolerance` of it; 0 where not even `least` does. Doubles until it does
    not fit, then halves what is between. A size that fits is one that was tried."""
    good, bad = 0, most + 1
    size = least
    while size < bad:
        if not fits(size):
            bad = size
            break
        good, size = size, min(2 * size, most) if size < most else bad
    while good and bad - good > 1 and bad - good > tolerance * good:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
