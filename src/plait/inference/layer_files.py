"""Temporary files with layers to stream, for layers that the model's own files do not hold as they
compute.

They are written at the start, and removed with the process.
"""

from __future__ import annotations

import copy
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from plait.cluster.host_memory import trim_heap
from plait.errors import InputError
from plait.inference.load import Weights
from plait.inference.stored import Stored, stored_tensors
from plait.inference.stream import SAME_BITS, brought
from plait.units import format_bytes

_PREFIX = "plait-layers-"
_MOUNTS = Path("/proc/self/mounts")
_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""


def write_layers(
    weights: Weights, model: nn.Module, blocks: Sequence[str], folder: Path
) -> dict[str, Stored]:
    """Write the weights of `blocks` of `model`, on meta, one file per block, and return where its
    tensors lie.

    The weights of one block are in memory at a time. Raises InputError if a file cannot be written.
    """
    made = copy.deepcopy(model)
    found: dict[str, Stored] = {}
    cpu = torch.device("cpu")
    shift = 0
    for number, block in enumerate(blocks):
        one = made.get_submodule(block)
        one.to_empty(device=cpu)
        own = {f"{block}.{name}": tensor for name, tensor in brought(made, block).items()}
        for (
            name,
            tensor,
            # one by one: the parts of files that are read together are in memory at once
        ) in own.items():
            weights.fill({name: tensor.data}, whole=model)
        written, shift = _saved(
            {name: tensor.data.contiguous() for name, tensor in own.items()},
            folder / f"{number}.safetensors",
            shift,
        )
        found |= written
        one.to_empty(device=torch.device("meta"))
        trim_heap()
    return found


def _saved(
    tensors: dict[str, torch.Tensor], path: Path, shift: int
) -> tuple[dict[str, Stored], int]:
    """Where the tensors of a new file lie, and the bytes that its header was made longer for that:
    so that the first begins at a multiple of SAME_BITS, to be read straight to where it computes.
    `shift`: those of a file with as long names, most likely.
    """
    for more in (shift, 8 - shift):  # a header ends at a multiple of 8
        try:
            save_file(tensors, path, {"header": "." * more})
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--scratch {path.parents[1]}: {getattr(error, 'strerror', None) or error}; name a"
                " folder with room"
            ) from None
        written = stored_tensors(path)
        if min(one.offset for one in written.values()) % SAME_BITS == 0:
            break
    return written, more


@contextmanager
def scratch_folder(folder: Path | None, size: int) -> Iterator[Path]:
    """A new folder in `folder` (the system's for temporary files) for `size` bytes; removed at the
    end, when files that stay open have no name any more. Raises InputError where there is too
    little room, or where its files would be in memory.
    """
    parent = folder or Path(tempfile.gettempdir())
    try:
        free = shutil.disk_usage(parent).free
        kind = _file_system(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name a folder that exists, on a disk"
        ) from None
    if kind in _MEMORY:
        raise InputError(
            f"--scratch {parent}: its files are in memory ({kind}), which the budget is to spare;"
            " name a folder on a disk"
        )
    if free < size:
        raise InputError(
            f"--scratch {parent}: {format_bytes(free)} are free, and the layers that are streamed"
            f" take {format_bytes(size)}; name a folder with more room"
        )
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_unused(left)
    try:
        made, lock = _locked(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name a folder that can be written to"
        ) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _locked(parent: Path) -> tuple[Path, int]:
    """A new folder, and an open descriptor that holds its lock as long as this process lives."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(made, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return made, lock
        os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove what a process that was killed left: nobody holds its lock."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return
    with suppress(OSError):  # it is in use, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _file_system(folder: Path) -> str:
    """The kind of the mount that a folder is on; "" where nothing says it."""
    try:
        lines = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    resolved = folder.resolve()
    on = [
        (len(fields[1]), fields[2])
        for fields in lines
        if len(fields) > 2 and resolved.is_relative_to(fields[1])
    ]
    return max(on, default=(0, ""))[1]
