"""Measures of style stay within their limits (see tools/style.py)."""

import pytest

from tests.architecture.sources import ROOT
from tools import style

OTHER_LIMITS = {
    "fragments per 100 docstrings": 3.0,
    "conditional expressions per 1,000 lines": 8.0,
    "nested conditional expressions": 0.0,
    "tuple assignments per 1,000 lines": 2.0,
    "vague names per 1,000 names": 1.0,
    "comprehensions per 1,000 lines": 22.0,
}
"""Largest values of tests, tools and benchmarks."""


def exceeded(folder, limits):
    values = style.measure(folder)
    return {name: values[name] for name, limit in limits.items() if values[name] > limit}


def test_package_is_within_the_limits():
    assert exceeded(style.PACKAGE, style.LIMITS) == {}


@pytest.mark.parametrize("folder", ["tests", "tools", "benchmarks"])
def test_other_folders_are_within_the_limits(folder):
    assert exceeded(ROOT / folder, OTHER_LIMITS) == {}


EXAMPLES = {
    "fragments per 100 docstrings": 'def f():\n    """Of one rank."""\n',
    "nested conditional expressions": "x = 1 if a else 2 if b else 3\n" * 100,
    "tuple assignments per 1,000 lines": "a, b = 1, 2\n",
    "vague names per 1,000 names": "found = 1\n",
    "class names that are not unique": "class A:\n    x = 1\n" * 100,
    "comprehensions per 1,000 lines": "x = [y for y in z]\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_limits_are_noticed(tmp_path, name):
    for index in range(100):
        text = EXAMPLES[name].replace("class A", f"class A{index}")
        (tmp_path / f"module{index}.py").write_text(text)
    limits = {**OTHER_LIMITS, **style.LIMITS}
    assert style.measure(tmp_path)[name] > limits[name]
