"""A part of a test matrix for `make test`; `make proof` takes all of it.

    @pytest.mark.parametrize(("world", "stage", "kind"), cover(product((2, 3, 4), (0, 1, 2, 3), ("llama", "gpt2"))))

Most defects need two settings to meet, few need three, so the part holds every two values that meet somewhere in the matrix: a covering
array of strength 2. It is chosen greedily and always alike, so a test's name says whether `make test` runs it: all others are marked proof.
"""

from collections.abc import Hashable
from itertools import combinations

import pytest

Features = tuple[Hashable, ...] | frozenset[Hashable]
"""Values by column, or values that say themselves what they are values of."""


def chosen(features, *, strength=2, costs=None):
    """Positions of rows that hold every combination of `strength` values, of different columns, that any row holds. `costs` of rows: what
    is new in a row counts by its cost, so that cheap rows come first."""
    price = costs or [1.0] * len(features)
    held = [
        frozenset(
            combinations(
                enumerate(row) if isinstance(row, tuple) else sorted(row, key=repr), strength
            )
        )
        for row in features
    ]
    missing, taken = frozenset().union(*held), []
    while missing:
        best = max(range(len(held)), key=lambda at: (len(held[at] & missing) / price[at], -at))
        taken.append(best)
        missing -= held[best]
    needless = set()
    for at in taken:  # what later rows hold too
        others = [held[other] for other in taken if other != at and other not in needless]
        if others and held[at] <= frozenset().union(*others):
            needless.add(at)
    return sorted(set(taken) - needless)


def cover(cases, *, strength=2, features=None, cost=None, name=None):
    """All cases as parameters; those that the cover does not need are marked proof.

    A case is a tuple of arguments or one argument. `features` tells the values of a case that have to meet (by default its arguments),
    `cost` what it takes (its ranks, say), `name` its id; each is called with the case's arguments.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    traits = [features(*row) if features else row for row in rows]
    kept = set(
        chosen(traits, strength=strength, costs=[cost(*row) for row in rows] if cost else None)
    )
    return [
        pytest.param(
            *row, id=name(*row) if name else None, marks=[] if at in kept else [pytest.mark.proof]
        )
        for at, row in enumerate(rows)
    ]


def proof_after(count, cases, *, name=None):
    """All cases as parameters; those after the first `count` are marked proof. A case is a tuple of arguments or one argument."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(
            *row, id=name(*row) if name else None, marks=[] if at < count else [pytest.mark.proof]
        )
        for at, row in enumerate(rows)
    ]
