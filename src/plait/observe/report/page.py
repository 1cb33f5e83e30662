"""The frame of a page and its plain parts: sections, tables, notes, legends.

Markup is escaped by MarkupSafe, so that no name from a file becomes a tag. Style is `page.css`, written into the page; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from markupsafe import Markup

from plait.version import __version__

_PAGE = Markup(
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
    "<header><h1>{title}</h1><p>{subtitle}</p></header>\n<nav>{links}</nav>\n<main>\n{sections}\n</main>\n"
    "<footer>Written by plait {version}. Nothing on this page is loaded from elsewhere.</footer>\n</body>\n</html>\n"
)


def page(title: str, subtitle: str, sections: Iterable[tuple[str, str, Markup]]) -> str:
    """A whole page. A section is (id, heading, content); those without content are left out."""
    shown = [entry for entry in sections if entry[2]]
    style = Markup(files("plait.observe.report").joinpath("page.css").read_text(encoding="utf-8"))
    return str(
        _PAGE.format(
            title=title,
            subtitle=subtitle,
            style=style,
            links=join(Markup('<a href="#{}">{}</a>\n').format(name, heading) for name, heading, _ in shown),
            sections=join(Markup('<section id="{}">\n<h2>{}</h2>\n{}\n</section>\n').format(*entry) for entry in shown),
            version=__version__,
        )
    )


def join(parts: Iterable[Markup]) -> Markup:
    """One after the other."""
    return Markup("").join(parts)


def note(text: str) -> Markup:
    """A line under a heading or a figure."""
    return Markup('<p class="note">{}</p>\n').format(text)


def warning(text: str) -> Markup:
    """What a reader must not miss."""
    return Markup('<p class="warning">{}</p>\n').format(text)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Markup]], *, numbers: Sequence[int] = (), marked: int | None = None
) -> Markup:
    """A table; the columns in `numbers` are set to the right, the row `marked` stands out. Nothing for no rows."""

    def cell(tag: str, column: int, content: str | Markup) -> Markup:
        return Markup("<{}{}>{}</{}>").format(tag, Markup(' class="number"') if column in numbers else "", content, tag)

    body = [
        Markup("<tr{}>{}</tr>\n").format(
            Markup(' class="marked"') if index == marked else "", join(cell("td", column, content) for column, content in enumerate(row))
        )
        for index, row in enumerate(rows)
    ]
    if not body:
        return Markup("")
    head = join(cell("th", column, name) for column, name in enumerate(columns))
    return Markup('<div class="wide"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody>\n</table></div>\n').format(head, join(body))


def tiles(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Figures that stand out: (what, value, what belongs to it)."""
    tile = Markup('<div class="tile"><div class="what">{}</div><div class="value">{}</div><div class="beside">{}</div></div>\n')
    return Markup('<div class="tiles">\n{}</div>\n').format(join(tile.format(*entry) for entry in entries))


def legend(entries: Mapping[str, str]) -> Markup:
    """CSS class of a colour to what it means."""
    key = Markup('<span class="key"><span class="swatch {}"></span>{}</span>\n')
    return Markup('<div class="legend">\n{}</div>\n').format(join(key.format(*entry) for entry in entries.items()))


def folded(summary: str, content: Markup) -> Markup:
    """What is shown when it is asked for; printed in full."""
    return Markup("<details><summary>{}</summary>\n{}</details>\n").format(summary, content) if content else Markup("")
