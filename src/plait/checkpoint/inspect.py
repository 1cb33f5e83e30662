"""What a folder of checkpoints holds, and how two checkpoints differ: for commands, in one process,
without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.checkpoint.commit import is_unfinished
from plait.checkpoint.durable import is_temporary, remove, size_of_folder
from plait.checkpoint.folder import Found, complete, find, reading, remove_old
from plait.checkpoint.load import Reader
from plait.checkpoint.manifest import LATEST, MANIFEST, Pointer, parsed, read_manifest
from plait.checkpoint.places import Place, entries
from plait.errors import CheckpointError, InputError
from plait.files import RUN_LOCK, is_only_writer

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
    content: str
    """Hash of its tensors, equal on every layout; empty where it cannot be read."""
    latest: bool
    """LATEST names it."""
    problem: str = ""
    """Why it cannot be loaded."""


def rows(folder: Place) -> list[Row]:
    """Every checkpoint of a folder, also a damaged one, the newest first. Raises InputError where
    it is no folder, and CheckpointError where it cannot be read.
    """
    with reading(folder):
        return _rows(folder)


def _rows(folder: Place) -> list[Row]:
    _require(folder)
    try:
        named = parsed(Pointer, folder / LATEST).tag
    except CheckpointError:
        named = ""
    found = complete(folder)
    newest = {one.manifest.tag: one.path for one in reversed(found)}
    listed = [
        Row(
            one.manifest.tag,
            step if isinstance(step := one.manifest.metadata.get("global_steps"), int) else None,
            size_of_folder(one.path),
            len(one.manifest.ranks),
            str(one.manifest.layout),
            one.manifest.content,
            one.manifest.tag == named and one.path == newest[named],
        )
        for one in found
    ]
    good = {one.path.name for one in found}
    for path in entries(folder):
        if (
            path.is_dir()
            and path.name not in good
            and not is_temporary(path)
            and (path / MANIFEST).exists()
        ):
            try:
                read_manifest(path)
            except CheckpointError as error:
                size = size_of_folder(path)
                listed.append(Row(path.name, None, size, 0, "", "", path.name == named, str(error)))
    return listed


def _require(folder: Place) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name one that holds checkpoints")


def open_one(place: Place) -> Found:
    """A checkpoint by its own folder, or the one to go on from of a folder of them. Raises
    CheckpointError or InputError.
    """
    with reading(place):
        if not place.is_dir():
            raise InputError(
                f"{place}: there is no such folder; name a checkpoint, or a folder of them"
            )
        if (place / MANIFEST).exists():
            return Found(place, read_manifest(place))
        inner = checkpoints_of(place)
        found = find(inner)
    if found is None:
        raise CheckpointError(f"{inner}: no complete checkpoint is there")
    return found


def checkpoints_of(place: Place) -> Place:
    """The folder of checkpoints, of a run's folder or itself."""
    with reading(place):
        return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def verify(found: Found, progress: Progress) -> None:
    """Compare every byte with its hash, and the tensors with the content hash. Raises
    CheckpointError with the first file and tensor that is not what was written.
    """
    reader = Reader(found)
    count = len(found.manifest.ranks)
    for rank in range(count):
        reader.verify("full", rank=rank, world=count)
        progress(rank + 1, count)
    content, own = reader.content()
    for kind, was, now in (
        ("model and optimizer", found.manifest.content, content),
        ("the ranks' own", found.manifest.own_content, own),
    ):
        if was != now:
            raise CheckpointError(
                f"{found.path}: its tensors of {kind} have the content hash {now}, and its manifest"
                f" says {was}"
            )


@dataclass(frozen=True)
class Difference:
    """A tensor that two checkpoints do not have alike."""

    name: str
    what: str
    """`only in the first`, `shape ...`, or the largest absolute difference."""
    elements: int = 0
    """How many differ."""


def differences(one: Found, other: Found) -> Iterator[Difference]:
    """What differs, tensor by tensor, in the order of the first; bitwise, so that NaN is equal to
    itself.
    """
    first = Reader(one)
    second = Reader(other)
    for name, record in first.tensors.items():
        there = second.tensors.get(name)
        if there is None:
            yield Difference(name, "only in the first")
        elif (there.shape, there.dtype) != (record.shape, record.dtype):
            yield Difference(
                name,
                f"{record.dtype} {list(record.shape)} in the first, {there.dtype}"
                f" {list(there.shape)} in the second",
            )
        else:
            a = first.read(name)
            b = second.read(name)
            count = _differing(a, b)
            if count:
                yield Difference(name, f"{(a.double() - b.double()).abs().max().item():.3g}", count)
    yield from (
        Difference(name, "only in the second")
        for name in second.tensors
        if name not in first.tensors
    )


def content_difference(one: Found, other: Found) -> list[Difference]:
    """Whether they differ, by their content hashes: no tensor is read."""
    a = one.manifest.content
    b = other.manifest.content
    return (
        []
        if a == b
        else [
            Difference(
                "model and optimizer", f"content {a[:12]} in the first, {b[:12]} in the second"
            )
        ]
    )


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    one, other = (
        tensor.reshape(-1).view(torch.uint8).reshape(max(1, tensor.numel()), -1)
        for tensor in (a, b)
    )
    return int((one != other).any(dim=1).sum()) if a.numel() else 0


def prune(folder: Place, *, keep: int) -> list[str]:
    """Delete all but the `keep` newest good checkpoints, and what unfinished saves have left; never
    what LATEST names. Returns their names. Raises CheckpointError where `plait train` is running in
    the folder.
    """
    with reading(folder), _claimed(folder):
        _require(folder)
        before = {path.name for path in folder.iterdir()}
        remove_old(folder, keep=keep)
        remove_unfinished(folder)
        return sorted(before - {path.name for path in folder.iterdir()})


@contextmanager
def _claimed(folder: Place) -> Iterator[None]:
    """Hold the lock of the run that owns the checkpoints of a folder, so that it cannot be saving.

    A folder outside of a run has no lock.
    """
    lock = folder.parent / RUN_LOCK if isinstance(folder, Path) else None
    if lock is None or not lock.is_file():
        yield
        return
    with open(lock, "ab") as stream:
        if not is_only_writer(stream):
            raise CheckpointError(
                f"{folder}: plait train is running in {folder.parent}; wait for its end, or set"
                " run.keep"
            )
        yield


def remove_unfinished(folder: Place) -> None:
    """What a save that was killed has left, where what it was to replace is there."""
    for path in entries(folder):
        kept = (
            path.name.endswith(".replaced")
            and not (folder / path.name[1:].removesuffix(".replaced")).exists()
        )
        if is_unfinished(path) or (is_temporary(path) and not kept):
            remove(path)
