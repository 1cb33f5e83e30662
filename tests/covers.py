"""Selects a part of a test matrix for `make test`; `make proof` runs all of it.

    @pytest.mark.parametrize(
        ("world", "stage", "kind"), cover(product((2, 3, 4), (0, 1, 2, 3), ("llama", "gpt2")))
    )

Most defects need two settings to meet, and few need three. The part therefore contains every two
values that meet anywhere in the matrix (a covering array of strength 2). The greedy choice is
deterministic, so the name of a test says whether `make test` runs it: all others are marked proof.
"""

from collections.abc import Hashable
from itertools import combinations

import pytest

Features = tuple[Hashable, ...] | frozenset[Hashable]
"""Values by column, or a set of values that name their column themselves."""


def chosen(features, *, strength=2, costs=None):
    """Return the positions of rows that cover every combination of values that any row has.

    Args:
        features: `Features` of every row.
        strength: Number of values in a combination.
        costs: Costs of the rows. New combinations of a cheap row count more.
    """
    costs = costs or [1.0] * len(features)
    combinations_of = [_combinations(row, strength) for row in features]
    missing = frozenset().union(*combinations_of)
    selected = []
    while missing:
        gains = [
            len(row & missing) / cost for row, cost in zip(combinations_of, costs, strict=True)
        ]
        best = gains.index(max(gains))
        selected.append(best)
        missing -= combinations_of[best]

    # Later rows may cover everything that an earlier row was selected for.
    for index in list(selected):
        others = [combinations_of[other] for other in selected if other != index]
        if others and combinations_of[index] <= frozenset().union(*others):
            selected.remove(index)
    return sorted(selected)


def _combinations(row, strength):
    values = enumerate(row) if isinstance(row, tuple) else sorted(row, key=repr)
    return frozenset(combinations(values, strength))


def cover(cases, *, strength=2, features=None, cost=None, name=None):
    """Return all cases as parameters; those that the cover does not need are marked proof.

    Args:
        cases: Tuples of arguments, or single arguments.
        strength: Number of values that have to meet.
        features: Returns the `Features` of a case from its arguments, by default the arguments.
        cost: Returns the cost of a case from its arguments, such as its ranks.
        name: Returns the id of a case from its arguments.
    """
    rows = _rows(cases)
    row_features = [features(*row) if features else row for row in rows]
    costs = [cost(*row) for row in rows] if cost else None
    return _parameters(rows, set(chosen(row_features, strength=strength, costs=costs)), name)


def proof_after(count, cases, *, name=None):
    """Return all cases as parameters; those after the first `count` are marked proof.

    `cases` and `name` are those of `cover`.
    """
    return _parameters(_rows(cases), range(count), name)


def _rows(cases):
    return [case if isinstance(case, tuple) else (case,) for case in cases]


def _parameters(rows, selected, name):
    parameters = []
    for index, row in enumerate(rows):
        marks = [] if index in selected else [pytest.mark.proof]
        parameters.append(pytest.param(*row, id=name(*row) if name else None, marks=marks))
    return parameters
