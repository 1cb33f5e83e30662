"""Tables on a terminal, aligned lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """One table. Nothing is cut: long cells are folded on a terminal and in full in a pipe."""
    if not rows:
        return
    if not console.is_terminal:
        if title:
            print(title)
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        for row in [columns, *rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
        return
    from rich.table import Table

    table = Table(*columns, title=title or None, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    console.print(table)
