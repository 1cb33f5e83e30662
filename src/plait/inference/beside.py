"""How much a generation and the reading of its weights slow each other down, on the cores that both need: measured on a few layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from torch import nn

from plait.inference.copy_rates import SAMPLE, into, sample
from plait.inference.pass_times import NEW, lengths_of, sample_model, sampled, timeline
from plait.inference.prediction import Beside
from plait.inference.reading import FileReader
from plait.inference.stored import Stored

TURNS = 3
"""How often a generation is measured, alone and beside reads."""
_ALONE_SECONDS = 0.2
"""Of reads without a generation."""


def measure_beside(
    model: nn.Module, tensors: Sequence[Stored], *, places: int, prompt: int, new: int, requests: int, quant: str | None, memory_bytes: int
) -> tuple[Beside, Beside]:
    """(over the prompts, for a token) of `model`, unquantised and on meta: a few of its layers compute, while `tensors` are read from the
    kernel's cache into `places` bytes as fast as they can be."""
    blocks, count = sampled(model, memory_bytes)
    length = lengths_of(model, count, len(blocks), prompt=prompt, new=new, requests=requests)[0]
    sharded, reads = sample_model(model, blocks, count, quant), _Reads(tensors, places)

    def passes() -> tuple[list[float], list[float]]:
        """Seconds and bytes that were read, of the prompts and of a token."""
        began, first, *more = timeline(sharded, length, requests, NEW, lambda: (time.perf_counter(), reads.bytes_read))
        (last, many), tokens = more[-1], len(more)
        return [first[0] - began[0], (last - first[0]) / tokens], [first[1] - began[1], (many - first[1]) / tokens]

    try:
        with reads.going_on():
            passes()  # the memory's own pages are new
            while not reads.bytes_read:
                time.sleep(0.001)
        rate = reads.rate_alone()
        alone = [passes()[0] for _ in range(TURNS)]
        with reads.going_on():
            both = [passes() for _ in range(TURNS)]
    finally:
        reads.close()
        sharded.close()
    found = []
    for at in range(2):
        seconds = median(one[0][at] for one in both)
        read = median(one[1][at] for one in both)
        found.append(Beside(max(1.0, seconds / median(one[at] for one in alone)), max(1.0, rate * seconds / read) if read else 1.0))
    return found[0], found[1]


class _Reads:
    """Reads the same tensors again and again, one after another as a stream of weights does."""

    def __init__(self, tensors: Sequence[Stored], places: int) -> None:
        chosen = sample(tensors, SAMPLE)
        self._parts = into(chosen, places)
        self._reader = FileReader({one.path for one in chosen}, largest=places, keeps=True)
        self.bytes_read = 0

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            for part in self._parts:
                self._reader.read([part])
                self.bytes_read += part.memory.numel()
                if ended.is_set():
                    return

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """In a thread."""
        ended = threading.Event()
        thread = threading.Thread(target=self._run, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def rate_alone(self) -> float:
        """Bytes/s."""
        before, began = self.bytes_read, time.perf_counter()
        with self.going_on():
            time.sleep(_ALONE_SECONDS)
        return (self.bytes_read - before) / (time.perf_counter() - began)

    def close(self) -> None:
        """End the reader."""
        self._reader.close()
