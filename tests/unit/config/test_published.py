"""Files as projects publish them load as they are, or are refused for what they ask, and no key of theirs is passed over in silence."""

from __future__ import annotations

import pytest

from plait.config.resolving.explain import explain, values_of
from plait.config.resolving.resolve import resolve
from plait.errors import ConfigError
from tests.unit.config.cases import load
from tests.unit.config.published import ACCEPTED, REFUSED, leaves

CALLER = {"train_micro_batch_size_per_gpu": 2, "bf16.enabled": True}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    tree, expected = ACCEPTED[name]
    config = load(tree)
    values = {
        value.name: value.value
        for value in values_of(resolve(config, world_size=4, total_steps=50, auto=CALLER))
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    tree, keys = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        resolve(load(tree), world_size=4, auto=CALLER)
    assert [problem.field for problem in error.value.problems] == keys
    assert all(problem.rule and problem.remedy for problem in error.value.problems)


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_every_key_has_a_row(name: str) -> None:
    tree = (ACCEPTED.get(name) or REFUSED[name])[0]
    rows = [row.key for row in explain(tree).keys]
    assert len(rows) == len(set(rows))
    for leaf in leaves(tree):
        assert any(leaf == row or leaf.startswith(f"{row}.") for row in rows), leaf
