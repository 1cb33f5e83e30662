"""How fast weights are brought to where they compute, measured here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from plait.cluster import accelerator, huge_pages
from plait.errors import InputError
from plait.inference.reading import FileReader, Part
from plait.inference.stored import Stored, stored_tensors
from plait.inference.stream import WeightStream, comes_from_disk

SAMPLE = 256 << 20
"""Bytes that are read or copied."""


def measure_files(tensors: Sequence[Stored], *, total: int, places: int) -> tuple[float, str]:
    """(bytes/s, how it was measured) of reading some of `tensors`, of which every token reads `total` bytes into `places` bytes of memory:
    from the disk where the kernel cannot keep so many in its cache, else as they are found now."""
    chosen = sample(tensors, SAMPLE)
    size = sum(one.size for one in chosen)
    if not size:
        raise InputError("no weights are read from files, so their rate cannot be measured")
    cold = comes_from_disk(total)
    parts = into(chosen, places)
    reader = FileReader({one.path for one in chosen}, largest=size, keeps=not cold)
    try:
        if cold:
            _drop(chosen)
        else:
            reader.read(parts)  # the memory's own pages are new
        seconds = min(_seconds(partial(reader.read, parts)) for _ in range(1 if cold else 3))
    finally:
        reader.close()
    how = "from the disk" if cold else "as the kernel has the files in its cache now"
    return size / seconds, f"{size >> 20} MiB read here, {how}"


def _drop(tensors: Sequence[Stored]) -> None:
    """From the kernel's cache."""
    for one in tensors:
        file = os.open(one.path, os.O_RDONLY)
        os.posix_fadvise(file, one.offset, one.size, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure_handover(parameters: int) -> float:
    """Seconds that a streamed layer of so many parameters costs besides reading and computing: its turn of the thread, and its parameters
    that are put into their place and taken out again."""
    layers = nn.ModuleList(_Few(parameters) for _ in range(8))
    names = [str(index) for index in range(len(layers))]
    x = torch.ones(_Few.SIZE)

    def run() -> None:
        for layer in layers:
            layer(x)

    with tempfile.TemporaryDirectory(prefix="plait-handover-") as folder, torch.no_grad():
        path = Path(folder) / "layers.safetensors"
        save_file({name: parameter.data.clone() for name, parameter in layers.named_parameters()}, path)
        resident = min(_seconds(run) for _ in range(20))
        stream = WeightStream(layers, names, stored_tensors(path))
        try:
            streamed = min(_seconds(run) for _ in range(20))
        finally:
            stream.close()
    return max(0.0, streamed - resident) / len(layers)


class _Few(nn.Module):
    """A layer that computes next to nothing."""

    SIZE = 16

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(self.SIZE)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def into(tensors: Sequence[Stored], places: int) -> list[Part]:
    """Reads of tensors, one after another into `places` bytes, from the beginning again when these are full: what a processor's cache holds
    is written to faster than what streamed layers take."""
    memory = huge_pages.empty((max(places, max(one.size for one in tensors)),), torch.uint8)
    parts, at = [], 0
    for one in tensors:
        at = 0 if at + one.size > memory.numel() else at
        parts.append(Part(one, 0, memory[at : at + one.size]))
        at += one.size
    return parts


def sample(tensors: Sequence[Stored], most: int) -> list[Stored]:
    """The largest, until they have so many bytes."""
    chosen: list[Stored] = []
    size = 0
    for one in sorted(tensors, key=lambda one: -one.size):
        if size >= most:
            break
        chosen.append(one)
        size += one.size
    return chosen


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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
