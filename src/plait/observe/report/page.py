"""The frame of a page and its plain parts: sections, tables, notes, legends. `page.css` is written
into the page; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from markupsafe import Markup

from plait.observe.templating import part, render
from plait.version import __version__


def page(title: str, subtitle: str, sections: Iterable[tuple[str, str, Markup]]) -> str:
    """A whole page. A section is (id, heading, content); those without content are left out."""
    style = Markup(files("plait.observe.report").joinpath("page.css").read_text(encoding="utf-8"))
    shown = [entry for entry in sections if entry[2]]
    return str(
        render(
            "page.html",
            title=title,
            subtitle=subtitle,
            style=style,
            sections=shown,
            version=__version__,
        )
    )


def join(*parts: Markup) -> Markup:
    """One after the other."""
    return Markup("").join(parts)


def note(text: str) -> Markup:
    """A line under a heading or a figure."""
    return part("note", text)


def warning(text: str) -> Markup:
    """What a reader must not miss."""
    return part("warning", text)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Markup]],
    *,
    numbers: Sequence[int] = (),
    marked: int | None = None,
) -> Markup:
    """A table; the columns in `numbers` are set to the right, the row `marked` stands out. Nothing
    for no rows.
    """
    body = list(rows)
    return part("table", columns, body, numbers, marked) if body else Markup("")


def tiles(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Figures that stand out: (what, value, what belongs to it)."""
    return part("tiles", entries)


def legend(entries: Mapping[str, str]) -> Markup:
    """CSS class of a colour to what it means."""
    return part("legend", entries)


def folded(summary: str, content: Markup) -> Markup:
    """What is shown when it is asked for; printed in full."""
    return part("folded", summary, content) if content else Markup("")
