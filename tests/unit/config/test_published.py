"""Files as projects publish them load unchanged, or are refused for what they request.

None of their keys is ignored silently.
"""

import pytest

from plait.config.resolving.explain import explain, values_of
from plait.config.resolving.resolve import resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import ACCEPTED, CALLER, REFUSED, leaf_paths, load


def check_accepted(row):
    resolved = resolve(load(row["file"]), world_size=4, total_steps=50, auto=CALLER)
    values = {value.name: value.value for value in values_of(dict(resolved), resolved.sources)}
    for key, expected in row["values"].items():
        # YAML has no tuples.
        assert values[key] == (tuple(expected) if isinstance(expected, list) else expected), key


def test_accepted():
    check_rows(ACCEPTED, check_accepted)


def check_refused(row):
    with pytest.raises(ConfigError) as error:
        resolve(load(row["file"]), world_size=4, auto=CALLER)
    assert [problem.field for problem in error.value.problems] == row["fields"]
    assert all(problem.rule and problem.remedy for problem in error.value.problems)


def test_refused():
    check_rows(REFUSED, check_refused)


def check_keys(row):
    names = [key.key for key in explain(row["file"]).keys]
    assert len(names) == len(set(names))
    for path in leaf_paths(row["file"]):
        assert any(path == name or path.startswith(f"{name}.") for name in names), path


def test_every_key_is_explained_once():
    check_rows(ACCEPTED | REFUSED, check_keys)
