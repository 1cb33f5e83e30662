"""Files as projects publish them load as they are, or are refused for what they ask, and no key of theirs is passed over in silence."""

import pytest

from plait.config.resolving.explain import explain, values_of
from plait.config.resolving.resolve import resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import ACCEPTED, CALLER, REFUSED, leaves, load


def check_accepted(row):
    made = resolve(load(row["file"]), world_size=4, total_steps=50, auto=CALLER)
    values = {value.name: value.value for value in values_of(dict(made), made.sources)}
    found = {key: values[key] for key in row["values"]}
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()} == row[
        "values"
    ]


def test_accepted():
    check_rows(ACCEPTED, check_accepted)


def check_refused(row):
    with pytest.raises(ConfigError) as error:
        resolve(load(row["file"]), world_size=4, auto=CALLER)
    assert [problem.field for problem in error.value.problems] == row["fields"]
    assert all(problem.rule and problem.remedy for problem in error.value.problems)


def test_refused():
    check_rows(REFUSED, check_refused)


def check_every_key(row):
    names = [key.key for key in explain(row["file"]).keys]
    assert len(names) == len(set(names))
    for leaf in leaves(row["file"]):
        assert any(leaf == name or leaf.startswith(f"{name}.") for name in names), leaf


def test_every_key_has_a_row():
    check_rows(ACCEPTED | REFUSED, check_every_key)
