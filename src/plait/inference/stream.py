"""Blocks of a model whose weights do not stay in memory: each is read from the model's safetensors files just before it runs.

A thread reads ahead, in the order in which blocks run and from the last one to the first of the next token. There are `SLOTS` places for
the weights of a block; when a block has run, its place is read into for the next block that has none. The parameters of a block are views
into its place while it runs, and empty otherwise. Numbers are those of the model in memory, bit for bit: only where weights lie differs.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait._torch.modules import own_parameters
from plait.errors import CheckpointError

SLOTS = 2
"""The weights that a block computes with, and those that are read meanwhile."""
CHUNK = 16 << 20
"""Bytes of one read."""
PATIENCE_SECONDS = 60.0
"""A read that takes longer is an error."""
_ALIGNED = 64
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


@dataclass
class _Streamed:
    """A parameter of a block."""

    owner: nn.Module = field(repr=False)
    leaf: str
    stored: Stored
    start: int
    """Bytes from the beginning of its place."""


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What is in a safetensors file, from its header. Raises CheckpointError where it is not one."""
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if begin > size:
                raise ValueError(f"its header would end at byte {begin:,} of {size:,}")
            header: dict[str, Any] = json.loads(file.read(begin - 8))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file: {error}") from None
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        low, high = entry["data_offsets"]
        if begin + high > size:
            raise CheckpointError(f"{path}: {name} would end at byte {begin + high:,} of {size:,}; the file is cut off")
        found[name] = Stored(path, begin + low, high - low, _DTYPES.get(entry["dtype"]), tuple(entry["shape"]))
    return found


class WeightStream:
    """Of one process. Owns a thread and the files; `close` ends them."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], stored: Mapping[str, Stored]) -> None:
        """`blocks` are streamed, in the order in which they run; the parameters of each are in `stored` by their names."""
        self.blocks = tuple(blocks)
        self._parts = [_parts(model, block, stored) for block in self.blocks]
        self.slot_bytes = max(max((one.start + one.stored.size for one in parts), default=0) for parts in self._parts)
        self._slots = [torch.empty(self.slot_bytes, dtype=torch.uint8) for _ in range(min(SLOTS, len(self.blocks)))]
        self._free = list(range(len(self._slots)))
        self._files = {path: os.open(path, os.O_RDONLY) for path in {one.stored.path for parts in self._parts for one in parts}}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="plait-weights")
        self._reading: dict[int, tuple[Future[None], int]] = {}
        self._ended = threading.Event()
        self.bytes_read = 0
        self.handles = []
        for index, name in enumerate(self.blocks):
            block = model.get_submodule(name)
            self._unbind(index)
            self.handles.append(block.register_forward_pre_hook(lambda *_, index=index: self._before(index)))
            self.handles.append(block.register_forward_hook(lambda *_, index=index: self._after(index), always_call=True))
        self._ahead(0)

    @property
    def memory_bytes(self) -> int:
        """Of the places for weights."""
        return len(self._slots) * self.slot_bytes

    def close(self) -> None:
        """End the thread; the model cannot run afterwards."""
        self._ended.set()
        self._reader.shutdown(wait=True, cancel_futures=True)
        for handle in self.handles:
            handle.remove()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    # ---- a block runs -----------------------------------------------------------------------------------------------------------------

    def _before(self, index: int) -> None:
        if index not in self._reading:  # another order than the one that was read ahead in
            for other in list(self._reading):
                self._wait(other)
                self._release(other)
            self._ahead(index)
        self._bind(index, self._wait(index))

    def _after(self, index: int) -> None:
        self._unbind(index)
        if self._release(index):
            self._ahead(index + 1)

    def _release(self, index: int) -> bool:
        """Give the place of a block free, also of one that could not be read; not while it is being written to."""
        future, slot = self._reading[index]
        if not future.done():
            return False
        del self._reading[index]
        self._free.append(slot)
        return future.exception() is None

    def _wait(self, index: int) -> int:
        """The place that a block's weights are in."""
        future, slot = self._reading[index]
        try:
            future.result(timeout=PATIENCE_SECONDS)
            return slot
        except Late:
            where = next(iter(self._parts[index])).stored.path
            raise CheckpointError(
                f"{where}: reading the weights of {self.blocks[index]} has not ended in {PATIENCE_SECONDS:.0f} s; look at the disk"
            ) from None

    def _ahead(self, first: int) -> None:
        """Read the blocks from `first` on, as many as there are places for."""
        for step in range(len(self.blocks)):
            if not self._free:
                return
            index = (first + step) % len(self.blocks)
            if index not in self._reading:
                slot = self._free.pop()
                self._reading[index] = self._reader.submit(self._read, index, slot), slot

    def _bind(self, index: int, slot: int) -> None:
        buffer = self._slots[slot]
        for one in self._parts[index]:
            stored = one.stored
            assert stored.dtype is not None
            whole = buffer[one.start : one.start + stored.size].view(stored.dtype).view(stored.shape)
            parameter = own_parameters(one.owner)[one.leaf]
            assert parameter is not None
            parameter.data = whole

    def _unbind(self, index: int) -> None:
        for one in self._parts[index]:
            parameter = own_parameters(one.owner)[one.leaf]
            assert parameter is not None
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    # ---- the thread -------------------------------------------------------------------------------------------------------------------

    def _read(self, index: int, slot: int) -> None:
        view = memoryview(self._slots[slot].numpy().data)
        for one in self._parts[index]:
            read_into(self._files[one.stored.path], view[one.start : one.start + one.stored.size], one.stored, self._ended)
            self.bytes_read += one.stored.size


def read_into(file: int, view: memoryview, stored: Stored, ended: threading.Event) -> None:
    """All bytes of a tensor. Raises CheckpointError where they cannot be read."""
    done = 0
    while done < stored.size and not ended.is_set():
        try:
            count = os.preadv(file, [view[done : min(done + CHUNK, stored.size)]], stored.offset + done)
        except OSError as error:
            raise CheckpointError(f"{stored.path} cannot be read at byte {stored.offset + done:,}: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{stored.path} ends at byte {stored.offset + done:,}, and a tensor goes on: the file was cut off")
        done += count


def block_bytes(model: nn.Module, block: str, stored: Mapping[str, Stored]) -> int:
    """What the place of a block takes."""
    return max((one.start + one.stored.size for one in _parts(model, block, stored)), default=0)


def _parts(model: nn.Module, block: str, stored: Mapping[str, Stored]) -> list[_Streamed]:
    found, start = [], 0
    for name, _ in model.get_submodule(block).named_parameters():
        owner, _, leaf = f"{block}.{name}".rpartition(".")
        one = stored[f"{block}.{name}"]
        found.append(_Streamed(model.get_submodule(owner), leaf, one, start))
        start += -(-one.size // _ALIGNED) * _ALIGNED
    return found
