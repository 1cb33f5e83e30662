"""Folders of checkpoints: the complete checkpoints, the one to resume from, and pruning.

Note [Layout of a folder]
    step-00000100/             manifest.json, manifest.sha256, and per rank 00000.json and
                               00000.safetensors
    LATEST                     tag of the newest checkpoint and hash of its manifest
    .step-00000200.tmp/        checkpoint that is being written
    .step-00000100.replaced/   older checkpoint of the same tag, until the new one is published
    .step-00000050.deleted/    checkpoint that is being deleted
    .LATEST.<hex>.tmp          LATEST that is being written. After a kill it remains, and a save
                               removes it when it is ten minutes old
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from plait.checkpoint.commit import (
    delete_checkpoint,
    has_only_saved_files,
    is_name_of_tag,
    is_unfinished,
)
from plait.checkpoint.format import (
    LATEST,
    MANIFEST,
    MANIFEST_HASH,
    Manifest,
    Pointer,
    RankManifest,
    check_size,
    manifest_hash,
    rank_file,
    read_json,
    read_manifest,
)
from plait.checkpoint.places import Place, entries, is_temporary, reading, remove
from plait.errors import CheckpointError, warn


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoint with a valid manifest. Its tensors have not been read."""

    path: Place
    manifest: Manifest
    notes: tuple[str, ...] = ()
    """Reasons for choosing it, if it is not simply the checkpoint that LATEST names."""

    def rank_manifest(self, rank: int) -> RankManifest:
        """Read the manifest of a rank.

        Raises:
            CheckpointError: The manifest is missing or damaged.
        """
        return read_json(
            RankManifest, self.path / rank_file(rank, "json"), sha256=self.manifest.ranks[rank]
        )

    def check_sizes(self, ranks: Iterable[int]) -> None:
        """Compare the file sizes of some ranks with their manifests.

        Raises:
            CheckpointError: A file is missing, or has another size than when it was written.
        """
        for rank in ranks:
            check_size(self.path / rank_file(rank, "safetensors"), self.rank_manifest(rank).shards)


def list_complete(folder: Place) -> list[CheckpointFolder]:
    """Return all checkpoints with a valid manifest, newest first.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    with reading(folder):
        return _complete(folder)


def _complete(folder: Place) -> list[CheckpointFolder]:
    if not folder.is_dir():
        return []
    checkpoints = []
    for path in folder.iterdir():
        name = path.name
        if name.startswith(".") and name.endswith(".replaced"):
            # It counts until the checkpoint that replaces it is published.
            name = name[1:].removesuffix(".replaced")
            if _has(folder / name, MANIFEST):
                continue
        if name.startswith(".") or not _has(path, MANIFEST):
            continue
        with suppress(CheckpointError):
            checkpoints.append(CheckpointFolder(path, read_manifest(path)))
    return sorted(
        checkpoints, key=lambda checkpoint: (-checkpoint.manifest.sequence, checkpoint.path.name)
    )


def _has(path: Place, name: str) -> bool:
    try:
        return (path / name).exists()
    except PermissionError:
        # A folder of another user, such as lost+found.
        return False


def candidates(folder: Place, tag: str | None = None) -> list[CheckpointFolder]:
    """Return the checkpoints to load from, in the order in which to try them.

    Args:
        folder: Folder of checkpoints.
        tag: Name of the only checkpoint to consider. None considers the one that LATEST names and
            all older ones.

    Returns:
        Checkpoints with valid manifests, or an empty list if none was ever written.

    Raises:
        CheckpointError: The tag does not exist, or there are checkpoints but none is readable.
    """
    with reading(folder):
        checkpoints = _complete(folder)
        if tag is not None:
            return [_checkpoint_of_tag(folder, tag, checkpoints)]
        pointer, problem = _pointer(folder)
        if pointer is None:
            return _candidates_without_pointer(folder, checkpoints, problem)
        return _candidates_from_pointer(folder, checkpoints, pointer)


def _checkpoint_of_tag(
    folder: Place, tag: str, checkpoints: list[CheckpointFolder]
) -> CheckpointFolder:
    checkpoint = _newest_of_tag(checkpoints, tag)
    if checkpoint is not None:
        return checkpoint
    if (folder / tag).is_dir():
        read_manifest(folder / tag)  # its error is more specific
    raise CheckpointError(
        f"{folder / tag}: is not a complete checkpoint; {folder} holds {_list(checkpoints)}"
    )


def _newest_of_tag(checkpoints: list[CheckpointFolder], tag: str) -> CheckpointFolder | None:
    # `checkpoints` begins with the newest.
    return next((checkpoint for checkpoint in checkpoints if checkpoint.manifest.tag == tag), None)


def _candidates_without_pointer(
    folder: Place, checkpoints: list[CheckpointFolder], problem: str
) -> list[CheckpointFolder]:
    if checkpoints:
        return _with_note(
            checkpoints,
            f"{folder / LATEST}: {problem or 'is missing'}, so the newest complete checkpoint is"
            f" loaded, {checkpoints[0].manifest.tag}",
        )
    damaged = _damaged(folder)
    if not problem and not damaged:
        return []
    # Training must not silently restart in a folder whose checkpoints were lost.
    problem = problem or f"{folder / LATEST} is missing"
    unreadable = f"; {', '.join(damaged[:3])} cannot be read" if damaged else ""
    raise CheckpointError(
        f"{problem}, and no checkpoint there is complete{unreadable}; restore one, or name another"
        " folder"
    )


def _candidates_from_pointer(
    folder: Place, checkpoints: list[CheckpointFolder], pointer: Pointer
) -> list[CheckpointFolder]:
    latest = _newest_of_tag(checkpoints, pointer.tag)
    if latest is None:
        reason = f"{folder / pointer.tag} is missing, incomplete, or damaged"
        if not checkpoints:
            raise CheckpointError(
                f"{folder / LATEST} names {pointer.tag}, but {reason}, and no other one is"
                " complete; restore one, or name another folder"
            )
        return _with_note(
            checkpoints,
            f"{folder / LATEST} names {pointer.tag}, but {reason}, so"
            f" {checkpoints[0].manifest.tag} is loaded",
        )

    sequence = latest.manifest.sequence
    older = []
    newer = []
    for checkpoint in checkpoints:
        if checkpoint.manifest.sequence < sequence:
            older.append(checkpoint)
        elif checkpoint.manifest.sequence > sequence:
            newer.append(checkpoint.manifest.tag)
    if manifest_hash(latest.path) != pointer.manifest_sha256:
        return _with_note(
            [latest, *older],
            f"{folder / LATEST} was written for an older checkpoint with the name {pointer.tag};"
            " the one that has the name now is loaded",
        )
    if newer:
        return _with_note(
            [latest, *older],
            f"{folder / LATEST} names {pointer.tag}, which is loaded, although {newer[0]} is newer"
            " and complete",
        )
    return [latest, *older]


def find_checkpoint(folder: Place, tag: str | None = None) -> CheckpointFolder | None:
    """Return the first of `candidates`, or None if there are none."""
    return next(iter(candidates(folder, tag)), None)


def remove_old(folder: Place, *, keep: int, checks_files: bool = False) -> None:
    """Delete remains of interrupted deletions, and all complete checkpoints but the `keep` newest.

    The checkpoint that LATEST names is never deleted. Copies under other names, and folders with
    files that a save does not write, belong to the user: they are not deleted, and are not among
    the `keep` checkpoints. One rank calls this after a save. A failure only causes a warning.

    Args:
        folder: Folder of checkpoints.
        keep: Number of checkpoints to keep.
        checks_files: Whether to ignore checkpoints with missing or truncated files, which are then
            neither counted nor deleted. This reads the manifests of all ranks.
    """
    try:
        for path in entries(folder):
            if path.name.startswith(".") and path.name.endswith(".deleted"):
                remove(path)
        pointer, _ = _pointer(folder)
        checkpoints = []
        for checkpoint in _complete(folder):
            if (
                is_name_of_tag(checkpoint.path.name, checkpoint.manifest.tag)
                and has_only_saved_files(checkpoint.path)
                and not (checks_files and _is_truncated(checkpoint))
            ):
                checkpoints.append(checkpoint)
        latest = _newest_of_tag(checkpoints, pointer.tag) if pointer is not None else None
        for old in checkpoints[keep:]:
            if old is not latest:
                delete_checkpoint(old.path)
    except OSError as error:
        warn(
            f"{folder}: old checkpoints could not be deleted ({error.strerror or error}); they only"
            " take up space, and the next save tries again"
        )


def _is_truncated(checkpoint: CheckpointFolder) -> bool:
    """Return True if a file is missing or has another size than when it was written."""
    try:
        checkpoint.check_sizes(range(len(checkpoint.manifest.ranks)))
    except CheckpointError:
        return True
    return False


def _damaged(folder: Place) -> list[str]:
    """Return the names of folders with files of a checkpoint, all of which are incomplete."""
    if not folder.is_dir():
        return []
    saved_files = (MANIFEST, MANIFEST_HASH, rank_file(0, "json"), rank_file(0, "safetensors"))
    damaged = []
    for path in entries(folder):
        if is_temporary(path) or is_unfinished(path):
            continue
        if any(_has(path, name) for name in saved_files):
            damaged.append(path.name)
    return damaged


def _pointer(folder: Place) -> tuple[Pointer | None, str]:
    """Return (content of LATEST, ""), or (None, reason).

    The reason is empty if LATEST does not exist.
    """
    if not (folder / LATEST).exists():
        return None, ""
    try:
        return read_json(Pointer, folder / LATEST), ""
    except CheckpointError as error:
        return None, str(error)


def _with_note(checkpoints: list[CheckpointFolder], note: str) -> list[CheckpointFolder]:
    first = checkpoints[0]
    return [CheckpointFolder(first.path, first.manifest, (note,)), *checkpoints[1:]]


def _list(checkpoints: list[CheckpointFolder]) -> str:
    return ", ".join(checkpoint.manifest.tag for checkpoint in checkpoints) or "none"
