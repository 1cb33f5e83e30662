"""Frame of a page and its basic elements: sections, tables, notes and legends.

`page.css` is embedded in the page, so that nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from markupsafe import Markup

from plait.observe.templating import render, render_macro
from plait.version import __version__


def page(title: str, subtitle: str, sections: Iterable[tuple[str, str, Markup]]) -> str:
    """Return a page as HTML.

    Args:
        title: Title of the page.
        subtitle: Line under the title.
        sections: Tuples of id, heading and content. Sections without content are left out.
    """
    style = files("plait.observe.report").joinpath("page.css").read_text(encoding="utf-8")
    return str(
        render(
            "page.html",
            title=title,
            subtitle=subtitle,
            style=Markup(style),
            sections=[section for section in sections if section[2]],
            version=__version__,
        )
    )


def join(*elements: Markup) -> Markup:
    """Return the elements one after the other."""
    return Markup("").join(elements)


def note(text: str) -> Markup:
    """Return a paragraph under a heading or a figure."""
    return render_macro("note", text)


def warning(text: str) -> Markup:
    """Return a highlighted paragraph."""
    return render_macro("warning", text)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Markup]],
    *,
    numbers: Sequence[int] = (),
    marked: int | None = None,
) -> Markup:
    """Return a table, or nothing if there are no rows.

    Args:
        columns: Headings.
        rows: Cells of each row.
        numbers: Indices of the columns that are aligned to the right.
        marked: Index of the row that is highlighted.
    """
    body = list(rows)
    if not body:
        return Markup("")
    return render_macro("table", columns, body, numbers, marked)


def tiles(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Return highlighted figures from tuples of name, value and details."""
    return render_macro("tiles", entries)


def legend(entries: Mapping[str, str]) -> Markup:
    """Return a legend from a mapping of CSS classes to meanings."""
    return render_macro("legend", entries)


def folded(summary: str, content: Markup) -> Markup:
    """Return content that is collapsed under its summary. It is expanded in print."""
    if not content:
        return Markup("")
    return render_macro("folded", summary, content)
