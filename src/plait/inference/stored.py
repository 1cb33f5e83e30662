"""Locations of tensors in safetensors files, and reads of their bytes."""

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

READ_BYTES = 16 << 20
"""Largest size of one read. Between reads a thread can be ended."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a file."""

    path: Path
    offset: int
    """First byte in the file."""
    size: int
    """Number of bytes."""
    dtype: torch.dtype | None
    """Dtype; None for those that no model computes in."""
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors of a safetensors file, from its header.

    Raises:
        CheckpointError: The file cannot be read, is not a safetensors file, or is incomplete.
    """
    try:
        with path.open("rb") as file:
            # The file begins with the size of its header as a 64-bit integer.
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if begin > size:
                raise ValueError(f"its header would end at byte {begin:,} of {size:,}")
            header: dict[str, Any] = json.loads(file.read(begin - 8))
        return {
            name: _location(path, name, entry, begin, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no readable safetensors file: {error}; download or save the folder again"
        ) from None


def _location(path: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> StoredTensor:
    # Offsets count from the end of the header.
    low, high = entry["data_offsets"]
    if begin + high > size:
        raise CheckpointError(
            f"{path}: {name} would end at byte {begin + high:,} of {size:,}; the file is cut off"
        )
    dtype = _DTYPES.get(entry["dtype"])
    shape = tuple(entry["shape"])
    has_wrong_size = dtype is not None and math.prod(shape) * dtype.itemsize != high - low
    if low < 0 or high < low or has_wrong_size:
        raise ValueError(f"{name} is {entry['dtype']} {list(shape)} in bytes {low:,} to {high:,}")
    return StoredTensor(path, begin + low, high - low, dtype, shape)


def read_into(
    file: int, view: memoryview, stored: StoredTensor, ended: threading.Event, *, first: int = 0
) -> None:
    """Read bytes of a tensor into memory, until it is full or the event is set.

    Args:
        file: Descriptor of the tensor's file.
        view: The memory.
        stored: Location of the tensor.
        ended: Event after which nothing more is read.
        first: First byte of the tensor.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    begin = stored.offset + first
    done = 0
    while done < len(view) and not ended.is_set():
        try:
            count = os.preadv(file, [view[done : done + READ_BYTES]], begin + done)
        except OSError as error:
            raise CheckpointError(
                f"{stored.path} cannot be read at byte {begin + done:,}: {error.strerror}"
            ) from error
        if not count:
            raise CheckpointError(
                f"{stored.path} ends at byte {begin + done:,}, before the end of a tensor: the file"
                " was cut off"
            )
        done += count
