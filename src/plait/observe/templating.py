"""Pages and drawings from the templates in `templates/`. Values are escaped, so that no name from a
file becomes a tag.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("plait.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters["percent"] = lambda number: f"{number:.3f}".rstrip("0").rstrip(".")
    for digits, name in enumerate(("tenth", "hundredth", "thousandth"), start=1):
        found.filters[name] = f"{{:.{digits}f}}".format
    return found


def render(template: str, **values: Any) -> Markup:
    """A whole template."""
    return Markup(_environment().get_template(template).render(values))


def part(name: str, *arguments: Any, **values: Any) -> Markup:
    """A macro of `parts.html`."""
    return Markup(
        getattr(_environment().get_template("parts.html").module, name)(*arguments, **values)
    )
