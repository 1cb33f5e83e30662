"""Long sequences and experts with everything that they go with, against plain Transformers in one process: losses, gradients, norms,
weights and biases of routers to 1e-10 in float64. `make combinations` runs all and writes docs/development/combinations.md."""

from __future__ import annotations

import json

import pytest

from tests.parity.combinations import ADVERSARIAL, Case, label, sampled, sampled_of_added
from tests.parity.experts import assert_equal, train
from tests.pool import Pool
from tools import combinations as tool

NAMED = [
    pytest.param(case, id=f"{name}: {label(case)}", marks=[] if number == 0 and case.world == 2 else [pytest.mark.proof])
    for name, group in ADVERSARIAL.items()
    for number, case in enumerate(group)
]


@pytest.mark.parametrize("case", NAMED)
def test_what_is_adversarial_equals_one_process(pool: Pool, case: Case) -> None:
    """Two steps of two micro-batches, clipped."""
    assert_equal(case, pool.run(case.world, train, case))


@pytest.mark.proof
@pytest.mark.parametrize("case", [*sampled(), *sampled_of_added()], ids=label)
def test_sample_equals_one_process(pool: Pool, case: Case) -> None:
    """The same, for a part of the space that no person chose."""
    assert_equal(case, pool.run(case.world, train, case))


def test_the_page_is_of_these_cases() -> None:
    """More than 300, exact, and the page is made from them."""
    data = json.loads(tool.DATA.read_text(encoding="utf-8"))
    assert list(data["sampled"]) == [label(case) for case in sampled()]
    assert {name: list(group) for name, group in data["adversarial"].items()} == {
        name: [label(case) for case in group] for name, group in ADVERSARIAL.items()
    }
    assert len(data["sampled"]) >= 300
    assert list(data["added"]["sampled"]) == [label(case) for case in sampled_of_added()]
    assert len(data["added"]["sampled"]) >= 60
    groups = (data["sampled"], data["added"]["sampled"], *data["adversarial"].values())
    assert max(error for group in groups for error in group.values()) <= tool.TOLERANCE
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(data)
