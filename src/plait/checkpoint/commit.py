"""How a checkpoint appears whole or not at all, in a file system and in an object store.

In a file system it is written as `.TAG.tmp`, and a rename publishes it. A store has no rename: the
files are written where they stay, in a folder that is empty before (TAG, else TAG.2, TAG.3 ...),
and the manifest, written last, is what makes them a checkpoint. Until then `begun` is in it. One of
the same tag that was there before is deleted when LATEST names the new one.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from plait.checkpoint.durable import (
    make_folder,
    publish,
    remove,
    remove_if_possible,
    rename,
    replace_text,
    sync_folder,
    write_text,
)
from plait.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_HASH,
    Pointer,
    digest,
    read_manifest,
)
from plait.checkpoint.places import Place, StorePath
from plait.errors import CheckpointError

BEGUN = "begun"
_OWN_FILE = re.compile(r"\d{5,}\.(json|safetensors)|manifest\.(json|sha256)|begun")


class Commit(ABC):
    """Of one checkpoint, for one rank; the files are written in between."""

    def __init__(self, folder: Place, tag: str, files: Place) -> None:
        self.folder = folder
        self.tag = tag
        self.files = files

    @property
    @abstractmethod
    def target(self) -> Place:
        """Where the checkpoint is afterwards."""

    def finish(self, manifest: str) -> None:
        """Make the files a checkpoint, and the one to go on from. For rank 0. Raises OSError."""
        write_text(self.files / MANIFEST_HASH, digest(manifest))
        self._publish(manifest)
        replace_text(
            self.folder / LATEST,
            Pointer(tag=self.tag, manifest_sha256=digest(manifest)).model_dump_json(),
        )
        self._clean()

    @abstractmethod
    def _publish(self, manifest: str) -> None: ...

    @abstractmethod
    def _clean(self) -> None:
        """Delete what it takes the place of."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete the files. For rank 0; raises nothing."""


class Renamed(Commit):
    """In a file system."""

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
        if self.target.exists():
            remove(self._replaced)
            rename(self.target, self._replaced)
        try:
            publish(self.files, self.target)
        except OSError:
            if self._replaced.exists() and not self.target.exists():
                # it is found under that name too, and the first failure is what a user looks
                # for
                with suppress(OSError):
                    rename(self._replaced, self.target)
            raise

    def _clean(self) -> None:
        remove_if_possible(self._replaced)

    def abandon(self) -> None:
        remove_if_possible(self.files)


class Named(Commit):
    """In an object store."""

    folder: StorePath
    files: StorePath

    @property
    def target(self) -> StorePath:
        return self.files

    def _publish(self, manifest: str) -> None:
        write_text(self.files / MANIFEST, manifest)

    def _clean(self) -> None:
        remove(self.files / BEGUN)
        for name in self.folder.sizes():
            if (
                has_its_own_name(name, self.tag)
                and name != self.files.name
                and self._is_of_tag(self.folder / name)
            ):
                delete_checkpoint(self.folder / name)

    def _is_of_tag(self, path: StorePath) -> bool:
        """By its manifest: a user may name a tag as another one's second folder is."""
        try:
            return read_manifest(path).tag == self.tag
        except CheckpointError:
            return False

    def abandon(self) -> None:
        with suppress(OSError):
            if not (self.files / MANIFEST).exists():
                remove(self.files)


def begin(folder: Place, tag: str, token: str) -> Commit:
    """Make the folder that the ranks write to, and put `token` there, by which they know it. For
    rank 0. Raises OSError, and CheckpointError where something else than a checkpoint has the name.
    """
    if isinstance(folder, StorePath):
        taken = folder.sizes()
        files = folder / next(name for name in _names(tag) if name not in taken)
        write_text(files / BEGUN, token)
        return Named(folder, tag, files)
    _refuse_others_files(folder / tag)
    make_folder(folder, parents=True)
    made = Renamed(folder, tag, folder / f".{tag}.tmp")
    try:
        remove(made.files)
        make_folder(made.files)
        write_text(made.files / BEGUN, token)
    except OSError:
        made.abandon()
        raise
    return made


def joined(folder: Place, tag: str, token: str) -> Commit | None:
    """The same for the other ranks; None where they do not see what rank 0 has made."""
    if isinstance(folder, StorePath):
        files = [folder / name for name in folder.sizes() if has_its_own_name(name, tag)]
        return next((Named(folder, tag, place) for place in files if _begun(place) == token), None)
    temporary = folder / f".{tag}.tmp"
    return Renamed(folder, tag, temporary) if _begun(temporary) == token else None


def is_unfinished(path: Place) -> bool:
    """Whether it is a folder of a store that a save or a deletion has not ended."""
    if not isinstance(path, StorePath):
        return False
    names = path.sizes()
    return BEGUN in names and MANIFEST not in names and all(map(_OWN_FILE.fullmatch, names))


def holds_own_files_only(path: Place) -> bool:
    """Return whether a folder holds no file that a save does not write."""
    names = (
        path.sizes() if isinstance(path, StorePath) else [entry.name for entry in path.iterdir()]
    )
    return all(map(_OWN_FILE.fullmatch, names))


def delete_checkpoint(path: Place) -> None:
    """So that it is no checkpoint at any time, or a complete one. Raises OSError."""
    if isinstance(path, StorePath):
        write_text(path / BEGUN, "")  # left with the rest, it shows what that is
        remove(path / MANIFEST)
        for name in path.sizes():
            if name != BEGUN:
                remove(path / name)
        remove(path / BEGUN)
        return
    gone = path.with_name(f".{path.name.lstrip('.')}.deleted")
    remove(gone)
    rename(path, gone)
    sync_folder(path.parent)
    remove(gone)


def _names(tag: str) -> Iterator[str]:
    return (tag if number == 1 else f"{tag}.{number}" for number in count(1))


def has_its_own_name(name: str, tag: str) -> bool:
    """Return whether a folder has a name that a save gives to a checkpoint of a tag."""
    return name == tag or re.fullmatch(rf"{re.escape(tag)}\.\d+", name) is not None


def _begun(files: Place) -> str:
    try:
        return (files / BEGUN).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _refuse_others_files(target: Path) -> None:
    """A checkpoint takes the place of an older one of its name, damaged or not, and of nothing
    else.
    """
    kept = target.is_dir() and not target.is_symlink() and holds_own_files_only(target)
    if os.path.lexists(target) and not kept:
        raise CheckpointError(
            "something is there that is no checkpoint, and would be deleted; give another tag, or"
            " remove it first"
        )
