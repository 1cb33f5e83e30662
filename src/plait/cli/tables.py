"""Tables on a terminal, and aligned lines in a pipe."""

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
    """Print a table, unless it has no rows.

    Nothing is truncated: long cells are folded on a terminal, and kept in one line in a pipe.

    Args:
        console: The console. Lines are printed if it is not a terminal.
        columns: Headings.
        rows: Cells of each row.
        title: Title of the table.
        indent: Indentation of the lines in a pipe.
    """
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
    # The console may have soft_wrap for its other lines, which would break the table.
    console.print(table, soft_wrap=False)


def aligned(
    rows: Sequence[Sequence[str]], *, indent: str = "", max_widths: Mapping[int, int] | None = None
) -> list[str]:
    """Return one line per row with aligned columns.

    Args:
        rows: Cells of each row, which has the same number of cells as all others.
        indent: Indentation of the lines.
        max_widths: Largest widths of columns by their index. Longer cells push later cells of their
            line to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, limit in (max_widths or {}).items():
        if index < len(widths):
            widths[index] = min(widths[index], limit)
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines
