"""How results are written: rounded, and with short lists and objects on one line.

benchmarks/results has what pages, tests and readers use, at most `MOST_BYTES` per file. Raw rounds stay out of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 20 * 1024
"""Largest result file; tests/architecture/test_result_files.py checks it."""
WIDTH = 140


def rounded(value: Any, digits: int = 5) -> Any:
    """Return the JSON value with all floats rounded to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry, digits) for entry in value]
    return value


def dumps(value: Any, depth: int = 0) -> str:
    """Return JSON text in which a list or object is on one line if it fits there."""
    line = json.dumps(value)
    if not isinstance(value, (dict, list, tuple)) or depth + len(line) <= WIDTH:
        return line
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        opening, closing = "{", "}"
        entries = [
            f"{json.dumps(str(key))}: {dumps(entry, depth + 1)}" for key, entry in value.items()
        ]
    else:
        opening, closing = "[", "]"
        entries = [dumps(entry, depth + 1) for entry in value]
    lines = f",\n{inner}".join(entries)
    return f"{opening}\n{inner}{lines}\n{' ' * depth}{closing}"


def write(path: Path, value: Any, digits: int = 5) -> None:
    """Write the value, rounded to significant digits."""
    path.write_text(dumps(rounded(value, digits)) + "\n", encoding="utf-8")
