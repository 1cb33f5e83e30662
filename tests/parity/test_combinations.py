"""Long sequences and experts with everything that they go with, against plain Transformers in one process: losses, gradients, norms,
weights and biases of routers to 1e-10 in float64. `make combinations` runs all and writes docs/development/combinations.md."""

import json

import pytest

from tests.parity.combinations import ADVERSARIAL, label, sampled, sampled_of_added
from tests.parity.experts import assert_equal, train
from tools import combinations as tool

NAMED = [
    pytest.param(
        case,
        id=f"{name}: {label(case)}",
        marks=[] if number == 0 and case.world == 2 else [pytest.mark.proof],
    )
    for name, group in ADVERSARIAL.items()
    for number, case in enumerate(group)
]


@pytest.mark.parametrize("case", NAMED)
def test_what_is_adversarial_equals_one_process(pool, record_property, case):
    """Two steps of two micro-batches, clipped."""
    _compare(pool, record_property, case)


@pytest.mark.proof
@pytest.mark.parametrize("case", [*sampled(), *sampled_of_added()], ids=label)
def test_sample_equals_one_process(pool, record_property, case):
    """The same, for a part of the space that no person chose."""
    _compare(pool, record_property, case)


def _compare(pool, record_property, case):
    """Record the deviation for tools.combinations."""
    record_property("case", label(case))
    record_property("deviation", assert_equal(case, pool.run(case.world, train, case)))


def test_the_page_is_of_these_cases():
    """More than 300, exact, and the page is made from them."""
    data = json.loads(tool.DATA.read_text(encoding="utf-8"))
    assert {name: count for name, (count, _) in data["named"].items()} == {
        name: len(group) for name, group in ADVERSARIAL.items()
    }
    adversarial = [case for group in ADVERSARIAL.values() for case in group]
    for recorded, cases in zip(
        tool.samples(data), (sampled(), adversarial, sampled_of_added()), strict=True
    ):
        expected = tool.summary({label(case): 0.0 for case in cases})
        assert (recorded["cases"], recorded["exact"]) == (expected["cases"], expected["cases"])
        assert recorded["largest"] <= tool.TOLERANCE
        assert _counts(recorded) == _counts(expected)
    assert data["sampled"]["cases"] >= 300
    assert data["added"]["sampled"]["cases"] >= 60
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(data)


def _counts(summary):
    return {
        axis: {value: count for value, (count, _) in values.items()}
        for axis, values in summary["axes"].items()
    }
