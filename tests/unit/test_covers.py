"""`cover` chooses the part of a matrix that `make test` runs."""

from itertools import combinations, product

from tests.covers import chosen, cover


def pairs(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_two_values_meet():
    rows = list(product(range(4), "abcd", (True, False), (1, 3)))
    covering = [rows[index] for index in chosen(rows)]
    assert pairs(covering) == pairs(rows)
    # Two columns of four values need 4 x 4 rows.
    assert 16 <= len(covering) <= 20
    assert chosen(rows) == chosen(rows)


def test_pairs_without_a_row_are_not_covered():
    rows = [row for row in product(range(3), range(3), range(3)) if row[0] != row[1]]
    assert pairs([rows[index] for index in chosen(rows)]) == pairs(rows)


def test_cheap_rows_come_first():
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


def test_other_rows_are_proof():
    params = cover([(1, "x"), (1, "y"), (2, "x"), (2, "y")], strength=1)
    assert sum(not param.marks for param in params) == 2
    assert {mark.name for param in params for mark in param.marks} == {"proof"}
    assert [param.values for param in cover(["a", "b"], strength=1)] == [("a",), ("b",)]
