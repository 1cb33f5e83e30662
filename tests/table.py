"""Tables of values whose rows are checked in one test."""

import pytest


def check_rows(rows, check):
    """Call `check` with each row, and fail at the end with the names of all rows that failed.

    Args:
        rows: Arguments of `check`, keyed by the name of the row.
        check: Raises an error for a row that is wrong.
    """
    failures = []
    for name, row in rows.items():
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    assert rows, "the table has no rows"
    assert not failures, "\n".join([f"{len(failures)} of {len(rows)} rows:", *failures])


def check_each(rows, check):
    """Call `check` with the columns of each row, and fail at the end with all rows that failed.

    Args:
        rows: Tuples of columns.
        check: Raises an error for a row that is wrong.
    """
    named = {f"{index}: {row[0]!s:.60}": row for index, row in enumerate(rows)}
    check_rows(named, lambda row: check(*row))
