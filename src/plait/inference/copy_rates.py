"""How fast weights are brought to where they compute, measured here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from plait.cluster import accelerator, huge_pages
from plait.errors import InputError
from plait.inference.reading import PAGE, FileReader, Image, Part
from plait.inference.stored import Stored, stored_tensors
from plait.inference.stream import SLOTS, WeightStream, comes_from_disk

SAMPLE = 256 << 20
"""Bytes that are read or copied."""


def measure_files(tensors: Sequence[Stored], *, total: int, places: int, straight: bool) -> tuple[float, str]:
    """(bytes/s, how it was measured) of reading some of `tensors`, of which every token reads `total` bytes into `places` bytes of memory:
    from the disk where the kernel cannot keep so many in its cache, else as they are found now. `straight`: to where they compute, where
    they lie in their file as streamed layers have to (see `reading`)."""
    cold = comes_from_disk(total)
    reads = as_streamed(tensors, places // SLOTS, straight=straight) if cold else [(into(sample(tensors, SAMPLE), places), None)]
    size = sum(part.memory.numel() for parts, _ in reads for part in parts)
    if not size:
        raise InputError("no weights are read from files, so their rate cannot be measured")
    reader = FileReader({part.stored.path for parts, _ in reads for part in parts}, largest=size, keeps=not cold)

    def run() -> None:
        with ThreadPoolExecutor(SLOTS) as threads:
            for _ in threads.map(lambda read: reader.read(*read), reads):
                pass

    try:
        if cold:
            _drop([part.stored for parts, _ in reads for part in parts])
        else:
            run()  # the memory's own pages are new
        seconds = min(_seconds(run) for _ in range(1 if cold else 3))
    finally:
        reader.close()
    how = "from the disk" if cold else "as the kernel has the files in its cache now"
    return size / seconds, f"{size >> 20} MiB read here, {how}"


def as_streamed(tensors: Sequence[Stored], most: int, *, straight: bool) -> list[tuple[list[Part], Image | None]]:
    """Reads of SAMPLE bytes as streamed layers are read: what lies together in a file, `most` bytes at a time, to SLOTS places in turns."""
    most = max(most // PAGE, 2) * PAGE
    places = [huge_pages.empty((most,), torch.uint8) for _ in range(SLOTS)]
    found: list[tuple[int, list[Part]]] = []
    size = 0
    for one, first, count in _pieces(tensors, most - PAGE):
        at = one.offset + first
        if not found or found[-1][1][0].stored.path != one.path or at + count > found[-1][0] + most:
            if size >= SAMPLE:
                break
            found.append((at // PAGE * PAGE, []))
        low, parts = found[-1]
        parts.append(Part(one, first, places[(len(found) - 1) % SLOTS][at - low : at - low + count]))
        size += count
    straight = straight and not any(place.data_ptr() % PAGE for place in places)
    return [(parts, Image(low, places[turn % SLOTS]) if straight else None) for turn, (low, parts) in enumerate(found)]


def _pieces(tensors: Sequence[Stored], most: int) -> Iterator[tuple[Stored, int, int]]:
    """(tensor, first byte, bytes) of at most so many, in the files' order."""
    for one in sorted(tensors, key=lambda one: (str(one.path), one.offset)):
        for first in range(0, one.size, most):
            yield one, first, min(most, one.size - first)


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
