"""One table, as markdown for a file and as aligned columns for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A markdown table; the first column is aligned left, the others right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def aligned(header: Sequence[str], rows: Rows) -> str:
    """Columns padded to their widest cell; the first is aligned left, the others right. Never cut, whatever the terminal."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
