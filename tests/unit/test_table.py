"""A table of values fails with all its wrong rows."""

import pytest

from tests.table import check_rows


def check_small(value):
    assert value < 3, f"{value} is large"


def test_every_wrong_row_is_named():
    with pytest.raises(AssertionError) as error:
        check_rows({"one": 1, "three": 3, "four": 4}, check_small)
    text = str(error.value)
    assert text.startswith("2 of 3 rows:")
    assert "three: AssertionError: 3 is large" in text and "four: " in text and "one" not in text


def test_an_empty_table_fails():
    with pytest.raises(AssertionError, match="no rows"):
        check_rows({}, check_small)
