"""Rendering of the templates in `templates/`.

Values are escaped, so that a name from a file cannot become a tag.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("plait.observe"),
        autoescape=True,
        # A misspelt variable raises instead of rendering as nothing.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = _format_percent
    for digits, name in enumerate(("tenth", "hundredth", "thousandth"), start=1):
        environment.filters[name] = f"{{:.{digits}f}}".format
    return environment


def _format_percent(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


def render(template: str, **values: Any) -> Markup:
    """Render a template with values for its variables."""
    return Markup(_environment().get_template(template).render(values))


def render_macro(name: str, *arguments: Any, **values: Any) -> Markup:
    """Render a macro of `parts.html` with its arguments."""
    macro = getattr(_environment().get_template("parts.html").module, name)
    return Markup(macro(*arguments, **values))
