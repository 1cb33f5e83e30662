"""Units of sizes and dtypes, and the functions that parse and print them.

In the rest of the package, names of variables end with their unit: `_bytes`, `_seconds`, `_tokens`.
"""

from __future__ import annotations

import math
import re
from typing import TypeGuard

import torch

from plait.errors import InputError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Floating-point dtypes that a configuration can name."""

SHORT_NAMES: dict[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype for a name: `torch.bfloat16` for `bf16` and `bfloat16`.

    Raises:
        KeyError: The name is unknown.
    """
    return DTYPES[SHORT_NAMES.get(name, name)]


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an integer that is not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Return True for a whole number of at least 1."""
    return is_integer(value) and value >= 1


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without torch's prefix, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `dtype` is accumulated: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def format_bytes(count: float) -> str:
    """Format a number of bytes: 1536 as `1.5 KiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_bytes_rounded_up(count: float) -> str:
    """Format a number of bytes, rounded up, so that the printed size suffices as a budget."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{math.ceil(10 * count / size) / 10:.1f} {unit}"
    return f"{math.ceil(count)} B"


def format_count(count: float) -> str:
    """Format a number: 10_400_000 as `10.4 M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 3725 as `1:02:05`, 65 as `1:05`, 3.21 as `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"

    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{remaining_seconds:02d}"
    return f"{minutes}:{remaining_seconds:02d}"


def parse_bytes(text: str, name: str) -> int:
    """Parse a size and return its number of bytes.

    Args:
        text: `100000`, `512 MiB`, `8g` (binary, as container tools and shells mean it) or `2GB`
            (decimal, as Accelerate means it).
        name: Option that the size belongs to.

    Raises:
        InputError: The text is not a size, or the size is less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?", text.strip().lower())
    size = 0
    if match is not None:
        base = 1000 if match[3] == "b" else 1024
        exponent = " kmgt".index(match[2] or " ")
        size = int(float(match[1]) * base**exponent)
    if size < 1:
        raise InputError(
            f"{name} {text}: pass a size such as 2GiB, 512MiB, 2GB or a number of bytes"
        )
    return size
