"""Temporary values of an object's attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def override_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Return a context in which attributes of an object have other values.

    Args:
        target: The object. It has all of the attributes.
        values: Values in the context, keyed by the name of the attribute.
    """
    previous = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(target, name, value)
