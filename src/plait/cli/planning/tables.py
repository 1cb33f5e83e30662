"""Tables on a terminal, aligned lines in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    indent: str = "  ",
) -> None:
    """One table. Nothing is cut: long cells are folded on a terminal and in full in a pipe."""
    if not rows:
        return
    if not console.is_terminal:
        if title:
            print(title)
        print("\n".join(aligned([columns, *rows], indent=indent)), end="\n\n")
        return
    table = Table(*columns, title=title or None, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=False)  # also on a console whose other lines are not wrapped


def aligned(
    rows: Sequence[Sequence[str]], *, indent: str = "", most: Mapping[int, int] | None = None
) -> list[str]:
    """A line a row, its cells under each other. The columns `most` are at most so wide: longer
    cells push the others to the right.
    """
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    widths = [min(width, (most or {}).get(index, width)) for index, width in enumerate(widths)]
    return [
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
