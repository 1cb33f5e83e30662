"""Publish a checkpoint atomically in a file system or an object store.

Note [Commit]
    In a file system the files are written to `.TAG.tmp`, and a rename publishes the folder. An
    older checkpoint of the tag is renamed to `.TAG.replaced` first.

    A store has no rename. The files are written to their final folder, which is the first unused
    one of TAG, TAG.2, TAG.3 ... The manifest is written last and makes them a checkpoint. An object
    `begun` marks a folder whose save or deletion has not ended. An older checkpoint of the tag has
    another folder.

    In both cases, the older checkpoint is deleted after LATEST names the new one.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

from plait.checkpoint import places
from plait.checkpoint.format import LATEST, MANIFEST, MANIFEST_HASH, Pointer, read_manifest
from plait.checkpoint.places import (
    Place,
    StorePath,
    publish,
    remove,
    remove_if_possible,
    replace_text,
    sync_folder,
    write_text,
)
from plait.errors import CheckpointError
from plait.hashing import sha256_of

BEGUN = "begun"
_LATEST_TEMPORARY = re.compile(rf"\.{LATEST}\.[0-9a-f]+\.tmp")
_ABANDONED_SECONDS = 600
"""Age at which a temporary file of LATEST belongs to a save that was killed.

Another save may run at the same time, but it renames this small file as soon as it is on disk.
"""
_SAVED_FILE = re.compile(r"\d{5,}\.(json|safetensors)|manifest\.(json|sha256)|begun")


class Commit(ABC):
    """Commit of one checkpoint, on one rank. The caller writes the files of this rank to `files`.

    Attributes:
        folder: Folder of checkpoints.
        tag: Name of the checkpoint.
        files: Folder that all ranks write to.
    """

    def __init__(self, folder: Place, tag: str, files: Place) -> None:
        self.folder = folder
        self.tag = tag
        self.files = files

    @property
    @abstractmethod
    def target(self) -> Place:
        """Folder of the published checkpoint."""

    def finish(self, manifest: str) -> None:
        """Publish the checkpoint and point LATEST to it.

        Called by rank 0 after all ranks have written their files.

        Args:
            manifest: JSON text of the manifest.

        Raises:
            OSError: A write or rename failed.
        """
        # Before the manifest: whoever sees a manifest can verify it.
        write_text(self.files / MANIFEST_HASH, sha256_of(manifest))
        self._publish(manifest)
        pointer = Pointer(tag=self.tag, manifest_sha256=sha256_of(manifest))
        replace_text(self.folder / LATEST, pointer.model_dump_json())
        self._delete_replaced()

    @abstractmethod
    def _publish(self, manifest: str) -> None: ...

    @abstractmethod
    def _delete_replaced(self) -> None:
        """Delete the older checkpoint of the same tag."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete the unpublished files. Called by rank 0. Raises nothing."""


class FileSystemCommit(Commit):
    """Commit by renaming a folder of a file system."""

    folder: Path
    files: Path

    @property
    def target(self) -> Path:
        return self.folder / self.tag

    @property
    def _replaced(self) -> Path:
        return self.folder / f".{self.tag}.replaced"

    def _publish(self, manifest: str) -> None:
        write_text(self.files / MANIFEST, manifest)
        remove(self.files / BEGUN)
        # A rename cannot replace a folder that has files. The older checkpoint stays loadable under
        # its temporary name.
        if self.target.exists():
            remove(self._replaced)
            places.FILES.rename(self.target, self._replaced)
        try:
            publish(self.files, self.target)
        except OSError:
            if self._replaced.exists() and not self.target.exists():
                # The older checkpoint can be loaded under that name too, and the first error is
                # the one that the user needs.
                with suppress(OSError):
                    places.FILES.rename(self._replaced, self.target)
            raise

    def _delete_replaced(self) -> None:
        remove_if_possible(self._replaced)
        # Remains only take up space, so no error here fails a save that is published.
        with suppress(OSError):
            # LATEST was just written. Both times are those of the file system.
            newest = (self.folder / LATEST).stat().st_mtime
            for path in self.folder.iterdir():
                # The save of a tag may use a folder with such a name.
                if not _LATEST_TEMPORARY.fullmatch(path.name) or not path.is_file():
                    continue
                if path.stat().st_mtime < newest - _ABANDONED_SECONDS:
                    remove_if_possible(path)

    def abandon(self) -> None:
        remove_if_possible(self.files)


class StoreCommit(Commit):
    """Commit by writing the manifest last, in an object store."""

    folder: StorePath
    files: StorePath

    @property
    def target(self) -> StorePath:
        return self.files

    def _publish(self, manifest: str) -> None:
        write_text(self.files / MANIFEST, manifest)

    def _delete_replaced(self) -> None:
        remove(self.files / BEGUN)
        for name in self.folder.sizes():
            if name == self.files.name or not is_name_of_tag(name, self.tag):
                continue
            # A user may have named another tag like the second folder of this one.
            if self._has_tag(self.folder / name):
                delete_checkpoint(self.folder / name)

    def _has_tag(self, path: StorePath) -> bool:
        try:
            return read_manifest(path).tag == self.tag
        except CheckpointError:
            return False

    def abandon(self) -> None:
        with suppress(OSError):
            if not (self.files / MANIFEST).exists():
                remove(self.files)


def begin(folder: Place, tag: str, token: str) -> Commit:
    """Create the folder that the ranks write to. Called by rank 0.

    Args:
        folder: Folder of checkpoints. It is created if necessary.
        tag: Name of the checkpoint.
        token: Text by which the other ranks recognise the folder in `join`.

    Raises:
        OSError: The folder cannot be created.
        CheckpointError: Something other than a checkpoint has the name `tag`.
    """
    if isinstance(folder, StorePath):
        existing = folder.sizes()
        numbered = (f"{tag}.{number}" for number in count(2))
        name = tag
        while name in existing:
            name = next(numbered)
        files = folder / name
        write_text(files / BEGUN, token)
        return StoreCommit(folder, tag, files)

    _refuse_foreign_files(folder / tag)
    places.FILES.make_folder(folder, parents=True)
    commit = FileSystemCommit(folder, tag, folder / f".{tag}.tmp")
    try:
        # A killed save of the same tag may have left it.
        remove(commit.files)
        places.FILES.make_folder(commit.files)
        write_text(commit.files / BEGUN, token)
    except OSError:
        commit.abandon()
        raise
    return commit


def join(folder: Place, tag: str, token: str) -> Commit | None:
    """Open the folder that rank 0 created with `begin`, or return None if it is not visible yet."""
    if isinstance(folder, StorePath):
        for name in folder.sizes():
            if is_name_of_tag(name, tag) and _read_token(folder / name) == token:
                return StoreCommit(folder, tag, folder / name)
        return None

    temporary = folder / f".{tag}.tmp"
    if _read_token(temporary) == token:
        return FileSystemCommit(folder, tag, temporary)
    return None


def is_unfinished(path: Place) -> bool:
    """Return True for a store's folder whose save or deletion was interrupted."""
    if not isinstance(path, StorePath):
        return False
    names = path.sizes()
    return BEGUN in names and MANIFEST not in names and _are_saved_files(names)


def has_only_saved_files(path: Place) -> bool:
    """Return True if every file in a folder has a name that a save would use."""
    if isinstance(path, StorePath):
        return _are_saved_files(path.sizes())
    return _are_saved_files(entry.name for entry in path.iterdir())


def _are_saved_files(names: Iterable[str]) -> bool:
    return all(map(_SAVED_FILE.fullmatch, names))


def delete_checkpoint(path: Place) -> None:
    """Delete a checkpoint.

    An interrupted call leaves either a complete checkpoint or an unfinished folder.

    Raises:
        OSError: A file cannot be deleted.
    """
    if isinstance(path, StorePath):
        # `begun` is deleted last, so that `is_unfinished` recognizes an interrupted deletion.
        write_text(path / BEGUN, "")
        remove(path / MANIFEST)
        for name in path.sizes():
            if name != BEGUN:
                remove(path / name)
        remove(path / BEGUN)
        return

    # Renamed first: readers ignore the new name, and the next save finishes the deletion.
    deleted = path.with_name(f".{path.name.lstrip('.')}.deleted")
    remove(deleted)
    places.FILES.rename(path, deleted)
    # The rename must reach the disk before the first file is deleted.
    sync_folder(path.parent)
    remove(deleted)


def is_name_of_tag(name: str, tag: str) -> bool:
    """Return True if `name` is a folder name that a save uses for checkpoints of the tag."""
    return name == tag or re.fullmatch(rf"{re.escape(tag)}\.\d+", name) is not None


def _read_token(files: Place) -> str:
    try:
        return (files / BEGUN).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _refuse_foreign_files(target: Path) -> None:
    """Raise CheckpointError if `target` exists and is not a (possibly damaged) checkpoint."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir() or not has_only_saved_files(target):
        raise CheckpointError(
            "it exists, is not a checkpoint, and would be deleted; choose another tag or remove it"
            " first"
        )
