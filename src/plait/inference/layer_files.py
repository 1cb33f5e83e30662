"""Temporary files of streamed layers.

They are needed if the model's own files do not contain the layers in the form in which they
compute. They are written at the start and removed with the process.

Note [Unused scratch folders]
    A process holds a lock on its folder as long as it lives. A folder without a lock belongs to a
    process that was killed, and the next command removes it.
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
from plait.inference.stored import StoredTensor, stored_tensors
from plait.inference.stream import WEIGHT_ALIGNMENT, streamed_parameters
from plait.units import format_bytes

_PREFIX = "plait-layers-"
_MOUNTS = Path("/proc/self/mounts")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def write_layers(
    weights: Weights, model: nn.Module, blocks: Sequence[str], folder: Path
) -> dict[str, StoredTensor]:
    """Write the weights of some blocks, one file per block.

    The weights of one block are in memory at a time.

    Args:
        weights: Source of the weights.
        model: The model, on the meta device.
        blocks: Names of the blocks.
        folder: Folder of the new files.

    Returns:
        Locations of the tensors, by their names in the model.

    Raises:
        InputError: A file cannot be written.
    """
    copied = copy.deepcopy(model)
    locations: dict[str, StoredTensor] = {}
    shift = 0
    for number, name in enumerate(blocks):
        block = copied.get_submodule(name)
        block.to_empty(device=torch.device("cpu"))
        parameters = streamed_parameters(copied, name)
        # One at a time: parts of files that are read together are in memory together.
        for leaf, parameter in parameters.items():
            weights.fill({f"{name}.{leaf}": parameter.data}, whole=model)
        written, shift = _save_aligned(
            {f"{name}.{leaf}": p.data.contiguous() for leaf, p in parameters.items()},
            folder / f"{number}.safetensors",
            shift,
        )
        locations |= written
        # The parameters are on the meta device again, so the block's memory is free.
        block.to_empty(device=torch.device("meta"))
        trim_heap()
    return locations


def _save_aligned(
    tensors: dict[str, torch.Tensor], path: Path, shift: int
) -> tuple[dict[str, StoredTensor], int]:
    """Save tensors so that the first one is aligned in the file.

    It can then be read directly to the memory in which it computes, see `WEIGHT_ALIGNMENT`.

    Args:
        tensors: The tensors, by name.
        path: Path of the new file.
        shift: Padding of the header that is tried first. Files of similar blocks need the same.

    Returns:
        Locations of the tensors, and the padding of the header in bytes.
    """
    # A header ends at a multiple of 8, so one of two paddings is right.
    for padding in (shift, 8 - shift):
        try:
            save_file(tensors, path, {"header": "." * padding})
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--scratch {path.parents[1]}: {getattr(error, 'strerror', None) or error}; name a"
                " folder with room"
            ) from None
        written = stored_tensors(path)
        if min(tensor.offset for tensor in written.values()) % WEIGHT_ALIGNMENT == 0:
            break
    return written, padding


@contextmanager
def scratch_folder(folder: Path | None, size: int) -> Iterator[Path]:
    """Create a temporary folder, which is removed at the end.

    Files that are open at the end can still be read. See Note [Unused scratch folders].

    Args:
        folder: Parent folder. None stands for the system's folder for temporary files.
        size: Number of bytes that it must have room for.

    Raises:
        InputError: There is too little room, the folder cannot be written to, or its files would be
            in memory.
    """
    parent = folder or Path(tempfile.gettempdir())
    try:
        free = shutil.disk_usage(parent).free
        file_system = _file_system(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name a folder that exists, on a disk"
        ) from None
    if file_system in _MEMORY_FILE_SYSTEMS:
        raise InputError(
            f"--scratch {parent}: its files are in memory ({file_system}), which the budget is to"
            " spare; name a folder on a disk"
        )
    if free < size:
        raise InputError(
            f"--scratch {parent}: {format_bytes(free)} are free, and the layers that are streamed"
            f" take {format_bytes(size)}; name a folder with more room"
        )
    # See Note [Unused scratch folders].
    for other in parent.glob(f"{_PREFIX}*"):
        _remove_if_unused(other)
    try:
        scratch, lock = _create_locked(parent)
    except OSError as error:
        raise InputError(
            f"--scratch {parent}: {error.strerror}; name a folder that can be written to"
        ) from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Create a folder, and return it with a descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        with suppress(OSError):  # without locks, nothing is removed on this file system
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_unused(folder: Path) -> None:
    """Remove a folder that no process has locked. See Note [Unused scratch folders]."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it belongs to another user, or has been removed
        return
    with suppress(OSError):  # it is in use, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, or an empty string if it is unknown."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    resolved = folder.resolve()
    mounts = []
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and resolved.is_relative_to(fields[1]):
            mounts.append((len(fields[1]), fields[2]))
    # The longest mount point is the innermost.
    return max(mounts, default=(0, ""))[1]
