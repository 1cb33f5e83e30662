"""Units and how they are printed. Names carry their unit everywhere else: `_bytes`, `_seconds`,
`_tokens`.
"""

from __future__ import annotations

import math
import re

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
"""The floating types that a configuration may name."""

SHORT_NAMES: dict[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def dtype_of(name: str) -> torch.dtype:
    """`bf16` or `bfloat16` to `torch.bfloat16`. Raises KeyError for an unknown name."""
    return DTYPES[SHORT_NAMES.get(name, name)]


def format_bytes(count: float) -> str:
    """1536 to `1.5 KiB`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_enough_bytes(count: float) -> str:
    """Return `format_bytes` of at least `count`: what is printed suffices as a budget."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{math.ceil(10 * count / size) / 10:.1f} {unit}"
    return f"{math.ceil(count)} B"


def format_count(count: float) -> str:
    """10_400_000 to `10.4 M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """3725 to `1:02:05`, 65 to `1:05`, 3.21 to `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_of(text: str, name: str) -> int:
    """Return the bytes of a size.

    Args:
        text: `100000`, `512 MiB`, `8g` (binary, as container tools and shells mean it) or `2GB`
            (decimal, as Accelerate means it).
        name: Option that the size belongs to.

    Raises:
        InputError: It is no such size, or less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)?", text.strip().lower())
    size = 0
    if match is not None:
        base = 1000 if match[3] == "b" else 1024
        size = int(float(match[1]) * base ** (" kmgt".index(match[2]) if match[2] else 0))
    if size < 1:
        raise InputError(
            f"{name} {text}: give a size such as 2GiB, 512MiB, 2GB or a number of bytes"
        )
    return size
