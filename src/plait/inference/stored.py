"""Where tensors lie in safetensors files, and their bytes."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.errors import CheckpointError

CHUNK = 16 << 20
"""Bytes of one read."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    path: Path
    offset: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes."""
    dtype: torch.dtype | None
    """None for one that no model computes in."""
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What is in a safetensors file, from its header. Raises CheckpointError where it is not
    one.
    """
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if begin > size:
                raise ValueError(f"its header would end at byte {begin:,} of {size:,}")
            header: dict[str, Any] = json.loads(file.read(begin - 8))
        return {
            name: _entry(path, name, entry, begin, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no readable safetensors file: {error}; download or save the folder again"
        ) from None


def _entry(path: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> Stored:
    low, high = entry["data_offsets"]
    if begin + high > size:
        raise CheckpointError(
            f"{path}: {name} would end at byte {begin + high:,} of {size:,}; the file is cut off"
        )
    dtype = _DTYPES.get(entry["dtype"])
    shape = tuple(entry["shape"])
    if (
        low < 0
        or high < low
        or (dtype is not None and math.prod(shape) * dtype.itemsize != high - low)
    ):
        raise ValueError(f"{name} is {entry['dtype']} {list(shape)} in bytes {low:,} to {high:,}")
    return Stored(path, begin + low, high - low, dtype, shape)


def read_into(
    file: int, view: memoryview, stored: Stored, ended: threading.Event, *, first: int = 0
) -> None:
    """Bytes of a tensor from `first` on, as many as `view` has. Raises CheckpointError where they
    cannot be read.
    """
    begin = stored.offset + first
    done = 0
    while done < len(view) and not ended.is_set():
        try:
            count = os.preadv(file, [view[done : done + CHUNK]], begin + done)
        except OSError as error:
            raise CheckpointError(
                f"{stored.path} cannot be read at byte {begin + done:,}: {error.strerror}"
            ) from error
        if not count:
            raise CheckpointError(
                f"{stored.path} ends at byte {begin + done:,}, and a tensor goes on: the file was"
                " cut off"
            )
        done += count
