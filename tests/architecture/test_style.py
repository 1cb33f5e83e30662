"""Measures of style stay within their limits (see tools/style.py)."""

import pytest

from tools import style


def test_package_is_within_the_limits():
    values = style.measure(style.PACKAGE)
    exceeded = {name: values[name] for name, limit in style.LIMITS.items() if values[name] > limit}
    assert exceeded == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fragments per 100 docstrings", 'def f():\n    """Of one rank."""\n'),
        ("nested conditional expressions", "x = 1 if a else 2 if b else 3\n" * 100),
        ("tuple assignments per 1,000 lines", "a, b = 1, 2\n"),
        ("vague names per 1,000 names", "found = 1\n"),
        ("class names that are not unique", "class A:\n    x = 1\n" * 100),
    ],
)
def test_limits_are_noticed(tmp_path, name, text):
    for index in range(100):
        (tmp_path / f"module{index}.py").write_text(text.replace("class A", f"class A{index}"))
    assert style.measure(tmp_path)[name] > style.LIMITS[name]
