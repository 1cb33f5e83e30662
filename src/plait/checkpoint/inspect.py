"""Inspection and pruning of checkpoints in one process, without a model.

These functions implement the commands `plait checkpoint ls`, `verify`, `diff` and `prune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.checkpoint.commit import is_unfinished
from plait.checkpoint.folder import (
    CheckpointFolder,
    find_checkpoint,
    list_complete,
    remove_old,
)
from plait.checkpoint.format import MANIFEST, read_manifest
from plait.checkpoint.load import Reader
from plait.checkpoint.places import (
    Place,
    entries,
    is_temporary,
    reading,
    remove,
    size_of_folder,
)
from plait.errors import CheckpointError, InputError
from plait.files import RUN_LOCK, try_lock

Progress = Callable[[int, int], None]
"""Progress callback. Receives the number of files that are done and the number of all files."""


@dataclass(frozen=True)
class CheckpointRow:
    """Summary of one checkpoint, as `plait checkpoint ls --json` prints it."""

    tag: str
    step: int | None
    size: int
    """Size of its files in bytes."""
    ranks: int
    layout: str
    content: str
    """Hash of its tensors, equal on every layout; empty if the manifest cannot be read."""
    latest: bool
    """True if a run resumes from it: LATEST names it, or it replaces a damaged one."""
    problem: str = ""
    """Reason why it cannot be loaded."""


def summarize(folder: Place) -> list[CheckpointRow]:
    """Return a summary of every checkpoint in a folder, newest first and damaged ones last.

    Raises:
        InputError: The folder does not exist.
        CheckpointError: The folder cannot be read.
    """
    with reading(folder):
        _require_folder(folder)
        try:
            latest = find_checkpoint(folder)
        except CheckpointError:
            # No checkpoint can be loaded. Their own problems follow.
            latest = None
        checkpoints = list_complete(folder)
        summaries = []
        for checkpoint in checkpoints:
            manifest = checkpoint.manifest
            step = manifest.metadata.get("global_steps")
            summaries.append(
                CheckpointRow(
                    manifest.tag,
                    step if isinstance(step, int) else None,
                    size_of_folder(checkpoint.path),
                    len(manifest.ranks),
                    str(manifest.layout),
                    manifest.content,
                    latest is not None and checkpoint.path == latest.path,
                )
            )

        valid = {checkpoint.path.name for checkpoint in checkpoints}
        for path in entries(folder):
            name = path.name
            if name in valid or not path.is_dir() or is_temporary(path):
                continue
            if not (path / MANIFEST).exists():
                continue
            try:
                read_manifest(path)
            except CheckpointError as error:
                size = size_of_folder(path)
                summaries.append(CheckpointRow(name, None, size, 0, "", "", False, str(error)))
        return summaries


def _require_folder(folder: Place) -> None:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name one that holds checkpoints")


def open_checkpoint(place: Place) -> CheckpointFolder:
    """Return a checkpoint by its folder, or the one to resume from in a folder of checkpoints.

    Args:
        place: Folder of a checkpoint, of checkpoints, or of a run.

    Raises:
        InputError: The folder does not exist.
        CheckpointError: The folder has no complete checkpoint.
    """
    with reading(place):
        if not place.is_dir():
            raise InputError(
                f"{place}: no such folder; name a checkpoint, or a folder of checkpoints"
            )
        if (place / MANIFEST).exists():
            return CheckpointFolder(place, read_manifest(place))
        folder = checkpoints_of(place)
        checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: contains no complete checkpoint; name another folder")
    return checkpoint


def checkpoints_of(place: Place) -> Place:
    """Return the folder of checkpoints in a run's folder, or the folder itself."""
    with reading(place):
        return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def verify(checkpoint: CheckpointFolder, progress: Progress) -> None:
    """Compare all files with their hashes, and all tensors with the content hash.

    Args:
        checkpoint: The checkpoint.
        progress: Called after each file.

    Raises:
        CheckpointError: A tensor was changed after it was written. The error names the first such
            file and tensor.
    """
    reader = Reader(checkpoint)
    count = len(checkpoint.manifest.ranks)
    for rank in range(count):
        reader.verify("full", rank=rank, world=count)
        progress(rank + 1, count)

    # The hashes of files do not cover the placement of shards in their tensors; this one does.
    content, rank_content = reader.content()
    for kind, expected, actual in (
        ("model and optimizer", checkpoint.manifest.content, content),
        ("single ranks", checkpoint.manifest.own_content, rank_content),
    ):
        if expected != actual:
            raise CheckpointError(
                f"{checkpoint.path}: its tensors of {kind} have the content hash {actual} instead"
                f" of {expected}, which its manifest lists; load another checkpoint"
            )


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor, as `plait checkpoint diff --json` prints it."""

    name: str
    what: str
    """Difference as text: `only in the first`, both shapes, or the largest absolute difference."""
    elements: int = 0
    """Number of elements that differ."""


def differences(
    first_checkpoint: CheckpointFolder, second_checkpoint: CheckpointFolder
) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, in the order of the first checkpoint.

    The comparison is bitwise, so that NaN is equal to itself.
    """
    first = Reader(first_checkpoint)
    second = Reader(second_checkpoint)
    for name, record in first.tensors.items():
        other_record = second.tensors.get(name)
        if other_record is None:
            yield TensorDifference(name, "only in the first")
        elif (other_record.shape, other_record.dtype) != (record.shape, record.dtype):
            yield TensorDifference(
                name,
                f"{record.dtype} {list(record.shape)} in the first, {other_record.dtype}"
                f" {list(other_record.shape)} in the second",
            )
        else:
            a = first.read(name)
            b = second.read(name)
            count = _count_different(a, b)
            if count:
                yield TensorDifference(
                    name, f"{(a.double() - b.double()).abs().max().item():.3g}", count
                )
    for name in second.tensors:
        if name not in first.tensors:
            yield TensorDifference(name, "only in the second")


def content_difference(first: CheckpointFolder, second: CheckpointFolder) -> list[TensorDifference]:
    """Compare the content hashes of two checkpoints without reading tensors."""
    a = first.manifest.content
    b = second.manifest.content
    if a == b:
        return []
    description = f"content {a[:12]} in the first, {b[:12]} in the second"
    return [TensorDifference("model and optimizer", description)]


def _count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    if not a.numel():
        return 0
    # Bytes of each element: [elements, itemsize]
    a_bytes = a.reshape(-1).view(torch.uint8).reshape(a.numel(), -1)
    b_bytes = b.reshape(-1).view(torch.uint8).reshape(b.numel(), -1)
    return int((a_bytes != b_bytes).any(dim=1).sum())


def prune(folder: Place, *, keep: int) -> list[str]:
    """Delete remains of interrupted saves, and all valid checkpoints but the `keep` newest.

    A checkpoint with missing or truncated files is neither counted nor deleted. The checkpoint that
    LATEST names is never deleted.

    Returns:
        Names of the deleted folders.

    Raises:
        CheckpointError: `plait train` is running in the folder.
    """
    with reading(folder), _run_lock(folder):
        _require_folder(folder)
        before = {path.name for path in folder.iterdir()}
        remove_old(folder, keep=keep, checks_files=True)
        remove_unfinished(folder)
        return sorted(before - {path.name for path in folder.iterdir()})


@contextmanager
def _run_lock(folder: Place) -> Iterator[None]:
    """Lock the run that owns a folder's checkpoints, so that it cannot save inside the context.

    A folder outside a run has no lock.
    """
    lock = folder.parent / RUN_LOCK if isinstance(folder, Path) else None
    if lock is None or not lock.is_file():
        yield
        return
    with open(lock, "ab") as stream:
        if not try_lock(stream):
            raise CheckpointError(
                f"{folder}: plait train is running in {folder.parent}; wait until it ends, or set"
                " run.keep"
            )
        yield


def remove_unfinished(folder: Place) -> None:
    """Delete remains of killed saves, but keep an older checkpoint whose replacement is missing."""
    for path in entries(folder):
        successor = folder / path.name[1:].removesuffix(".replaced")
        # Without its manifest the successor is incomplete, and the replaced one is still loaded.
        is_needed = path.name.endswith(".replaced") and not (successor / MANIFEST).exists()
        if is_unfinished(path) or (is_temporary(path) and not is_needed):
            remove(path)
