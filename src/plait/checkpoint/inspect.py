"""What a folder of checkpoints holds, and how two checkpoints differ: for commands, in one process, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.checkpoint.durable import is_temporary, remove
from plait.checkpoint.folder import Found, complete, find, remove_old
from plait.checkpoint.load import Reader
from plait.checkpoint.manifest import LATEST, MANIFEST, Pointer, parsed, read_manifest
from plait.checkpoint.windows import dtype_of
from plait.errors import CheckpointError, InputError

Progress = Callable[[int, int], None]
"""(files done, files in all)."""


@dataclass(frozen=True)
class Row:
    """A checkpoint of a folder."""

    tag: str
    step: int | None
    size: int
    """Bytes of its files."""
    ranks: int
    layout: str
    latest: bool
    """LATEST names it."""
    problem: str = ""
    """Why it cannot be loaded."""


def rows(folder: Path) -> list[Row]:
    """Every checkpoint of a folder, also a damaged one, the newest first. Raises InputError where it is no folder."""
    _require(folder)
    try:
        named = parsed(Pointer, folder / LATEST).tag
    except CheckpointError:
        named = ""
    found = complete(folder)
    listed = [
        Row(
            one.manifest.tag,
            one.manifest.metadata.get("global_steps"),
            _size(one.path),
            len(one.manifest.ranks),
            str(one.manifest.layout),
            one.manifest.tag == named,
        )
        for one in found
    ]
    good = {one.path.name for one in found}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in good and not is_temporary(path) and (path / MANIFEST).exists():
            try:
                read_manifest(path)
            except CheckpointError as error:
                size = _size(path)
                listed.append(Row(path.name, None, size, 0, "", path.name == named, str(error)))
    return listed


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name one that holds checkpoints")


def _size(path: Path) -> int:
    """Bytes of what is there; a run may be deleting it."""
    try:
        return sum(file.stat(follow_symlinks=False).st_size for file in path.iterdir())
    except FileNotFoundError:
        return 0


def open_one(place: Path) -> Found:
    """A checkpoint by its own folder, or the one to go on from of a folder of them. Raises CheckpointError or InputError."""
    if not place.is_dir():
        raise InputError(f"{place}: there is no such folder; name a checkpoint, or a folder of them")
    if (place / MANIFEST).exists():
        return Found(place, read_manifest(place))
    inner = checkpoints_of(place)
    found = find(inner)
    if found is None:
        raise CheckpointError(f"{inner}: no complete checkpoint is there")
    return found


def checkpoints_of(place: Path) -> Path:
    """The folder of checkpoints, of a run's folder or itself."""
    return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def verify(found: Found, progress: Progress) -> None:
    """Compare every byte with its hash. Raises CheckpointError with the first file and tensor that is not what was written."""
    reader, count = Reader(found), len(found.manifest.ranks)
    for rank in range(count):
        reader.verify("full", rank=rank, world=count)
        progress(rank + 1, count)


@dataclass(frozen=True)
class Difference:
    """A tensor that two checkpoints do not have alike."""

    name: str
    what: str
    """`only in the first`, `shape ...`, or the largest absolute difference."""
    elements: int = 0
    """How many differ."""


def differences(one: Found, other: Found) -> Iterator[Difference]:
    """What differs, tensor by tensor, in the order of the first; bitwise, so that NaN is equal to itself."""
    first, second = Reader(one), Reader(other)
    for name, record in first.tensors.items():
        there = second.tensors.get(name)
        if there is None:
            yield Difference(name, "only in the first")
        elif (there.shape, there.dtype) != (record.shape, record.dtype):
            yield Difference(name, f"{record.dtype} {list(record.shape)} in the first, {there.dtype} {list(there.shape)} in the second")
        else:
            a, b = (torch.empty(record.shape, dtype=dtype_of(record)) for _ in range(2))
            first.fill({name: a})
            second.fill({name: b})
            count = _differing(a, b)
            if count:
                yield Difference(name, f"{(a.double() - b.double()).abs().max().item():.3g}", count)
    yield from (Difference(name, "only in the second") for name in second.tensors if name not in first.tensors)


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    one, other = (tensor.reshape(-1).view(torch.uint8).reshape(max(1, tensor.numel()), -1) for tensor in (a, b))
    return int((one != other).any(dim=1).sum()) if a.numel() else 0


def prune(folder: Path, *, keep: int) -> list[str]:
    """Delete all but the `keep` newest good checkpoints, and what unfinished saves have left; never what LATEST names. Returns their
    names. No run may be saving there."""
    _require(folder)
    before = {path.name for path in folder.iterdir()}
    remove_old(folder, keep=keep)
    remove_unfinished(folder)
    return sorted(before - {path.name for path in folder.iterdir()})


def remove_unfinished(folder: Path) -> None:
    """What a save that was killed has left, where what it was to replace is there."""
    for path in folder.iterdir():
        if is_temporary(path) and (not path.name.endswith(".replaced") or (folder / path.name[1:].removesuffix(".replaced")).exists()):
            remove(path)
