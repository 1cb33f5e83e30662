"""Long sequences and experts with other techniques equal plain Transformers in one process.

Losses, gradients, norms, weights and router biases are compared to 1e-10 in float64. `make
combinations` runs all cases and writes docs/development/combinations.md.
"""

import json

import pytest

from tests.parity.combinations import ADVERSARIAL, label, sampled, sampled_of_added
from tests.parity.experts import assert_equal, train
from tools import combinations as tool


def adversarial():
    """Return parameters. Small first cases of the groups run in `make test`."""
    parameters = []
    for name, group in ADVERSARIAL.items():
        for number, case in enumerate(group):
            marks = [] if number == 0 and case.world == 2 else [pytest.mark.proof]
            parameters.append(pytest.param(case, id=f"{name}: {label(case)}", marks=marks))
    return parameters


def compare(pool, record_property, case):
    """Compare a case, and record its deviation for tools/combinations.py."""
    record_property("case", label(case))
    record_property("deviation", assert_equal(case, pool.run(case.world, train, case)))


@pytest.mark.parametrize("case", adversarial())
def test_adversarial_case_equals_one_process(pool, record_property, case):
    compare(pool, record_property, case)


@pytest.mark.proof
@pytest.mark.parametrize("case", [*sampled(), *sampled_of_added()], ids=label)
def test_sample_equals_one_process(pool, record_property, case):
    compare(pool, record_property, case)


def counts(summary):
    return {
        axis: {value: count for value, (count, _) in values.items()}
        for axis, values in summary["axes"].items()
    }


def test_the_page_has_these_cases():
    data = json.loads(tool.DATA.read_text(encoding="utf-8"))
    recorded_counts = {name: count for name, (count, _) in data["named"].items()}
    assert recorded_counts == {name: len(group) for name, group in ADVERSARIAL.items()}
    named = [case for group in ADVERSARIAL.values() for case in group]
    groups = (sampled(), named, sampled_of_added())
    for recorded, cases in zip(tool.samples(data), groups, strict=True):
        expected = tool.summary(cases, dict.fromkeys(map(label, cases), 0.0))
        assert recorded["cases"] == recorded["exact"] == expected["cases"]
        assert recorded["largest"] <= tool.TOLERANCE
        assert counts(recorded) == counts(expected)
    assert data["sampled"]["cases"] >= 300
    assert data["added"]["sampled"]["cases"] >= 60
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(data)
