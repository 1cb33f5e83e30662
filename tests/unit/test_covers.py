"""The part of a matrix that `make test` takes."""

from itertools import combinations, product

from tests.covers import chosen, cover


def pairs(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_two_values_meet():
    """In a fraction of the product: 4 x 4 is the least that two columns of four values need."""
    rows = list(product(range(4), "abcd", (True, False), (1, 3)))
    found = [rows[at] for at in chosen(rows)]
    assert pairs(found) == pairs(rows)
    assert 16 <= len(found) <= 20
    assert chosen(rows) == chosen(rows)


def test_what_never_meets_is_not_asked_for():
    rows = [row for row in product(range(3), range(3), range(3)) if row[0] != row[1]]
    assert pairs([rows[at] for at in chosen(rows)]) == pairs(rows)


def test_the_cheap_come_first():
    rows = [("a", 1), ("b", 1), ("ab", 2)]
    assert chosen([(0,), (1,), (0,)], strength=1, costs=[1, 1, 9]) == [0, 1]
    params = cover(
        rows,
        strength=1,
        features=lambda letters, _: frozenset(letters),
        cost=lambda _, n: n,
        name=lambda letters, _: letters,
    )
    assert [param.id for param in params] == ["a", "b", "ab"]


def test_the_rest_is_proof():
    params = cover([(1, "x"), (1, "y"), (2, "x"), (2, "y")], strength=1)
    assert sum(not param.marks for param in params) == 2
    assert {mark.name for param in params for mark in param.marks} == {"proof"}
    assert [param.values for param in cover(["a", "b"], strength=1)] == [("a",), ("b",)]
