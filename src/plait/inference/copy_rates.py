"""How fast weights are brought to where they compute, measured here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import torch

from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.errors import InputError
from plait.inference.stored import Stored, read_into

SAMPLE = 256 << 20
"""Bytes that are read or copied."""


def measure_files(tensors: Sequence[Stored], *, total: int) -> tuple[float, str]:
    """(bytes/s, how it was measured) of reading some of `tensors`, of which every token reads `total` bytes: from the disk where the
    kernel cannot keep so many in its cache, else as they are found now."""
    chosen, size = [], 0
    for one in sorted(tensors, key=lambda one: -one.size):
        if size < SAMPLE:
            chosen.append(one)
            size += one.size
    if not size:
        raise InputError("no weights are read from files, so their rate cannot be measured")
    free = free_host_bytes()
    cold = free is not None and total > free
    files = {path: os.open(path, os.O_RDONLY) for path in {one.path for one in chosen}}
    place = bytearray(max(one.size for one in chosen))
    view = memoryview(place)
    ended = threading.Event()
    try:
        if cold:
            for one in chosen:
                os.posix_fadvise(files[one.path], one.offset, one.size, os.POSIX_FADV_DONTNEED)
        else:
            for one in chosen[:1]:  # the place's own pages are new
                read_into(files[one.path], view[: one.size], one, ended)
        began = time.perf_counter()
        for one in chosen:
            read_into(files[one.path], view[: one.size], one, ended)
        seconds = time.perf_counter() - began
    finally:
        for file in files.values():
            os.close(file)
    how = "from the disk" if cold else "as the kernel has the files in its cache now"
    return size / seconds, f"{size >> 20} MiB read here, {how}"


def measure_host_copies(device: torch.device) -> float:
    """Bytes/s from pinned memory to `device`."""
    source = torch.empty(SAMPLE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(4):
        accelerator.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return SAMPLE / min(seconds[1:])
