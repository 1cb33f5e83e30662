"""A folder of checkpoints: which are complete, which one to go on from, and deleting old ones.

step-00000100/          manifest.json, and for every rank 00000.json and 00000.safetensors LATEST
the name of the newest, and the hash of its manifest .step-00000200.tmp/     is being written
.step-00000100.replaced/   was written before under the same name, until the new one is
                                                                         in place
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from plait.checkpoint.commit import (
    delete_checkpoint,
    has_its_own_name,
    holds_own_files_only,
    is_unfinished,
)
from plait.checkpoint.durable import is_temporary, remove
from plait.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_HASH,
    Manifest,
    Pointer,
    manifest_hash,
    parsed,
    rank_file,
    read_manifest,
)
from plait.checkpoint.places import Place, entries
from plait.errors import CheckpointError, warn


@dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest is good; its tensors were not read."""

    path: Place
    manifest: Manifest
    notes: tuple[str, ...] = ()
    """Why it is another one than LATEST names, if it is."""


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Raise CheckpointError for what the file system or the store refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or place} cannot be read: {error.strerror or error}"
        ) from error


def complete(folder: Place) -> list[Found]:
    """Every checkpoint with a readable manifest, the newest first. Raises CheckpointError where the
    folder cannot be read.
    """
    with reading(folder):
        return _complete(folder)


def _complete(folder: Place) -> list[Found]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        shown = (
            path.name[1:].removesuffix(".replaced")
            if path.name.startswith(".") and path.name.endswith(".replaced")
            else path.name
        )
        if (
            shown.startswith(".")
            or (shown != path.name and _has(folder / shown, MANIFEST))
            or not _has(path, MANIFEST)
        ):
            continue
        with suppress(CheckpointError):
            found.append(Found(path, read_manifest(path)))
    return sorted(found, key=lambda one: (-one.manifest.sequence, one.path.name))


def _has(path: Place, name: str) -> bool:
    """Return whether a folder has a file. Another user's folder (`lost+found`) has none that can be
    used.
    """
    try:
        return (path / name).exists()
    except PermissionError:
        return False


def candidates(folder: Place, tag: str | None = None) -> list[Found]:
    """What to load, the best first: `tag` alone, or what LATEST names and then all older ones;
    empty where there is no checkpoint. Raises CheckpointError for a tag that is not there, and
    where nothing that was written can be read.
    """
    with reading(folder):
        return _candidates(folder, tag)


def _candidates(folder: Place, tag: str | None) -> list[Found]:
    have = _complete(folder)
    if tag is not None:
        named = [one for one in have if one.manifest.tag == tag]
        if not named:
            if (folder / tag).is_dir():
                read_manifest(folder / tag)  # says what is wrong with it
            raise CheckpointError(
                f"{folder / tag}: no complete checkpoint there; {folder} holds {_list(have)}"
            )
        return named[:1]
    pointer, why = _pointer(folder)
    if pointer is None:
        if not have:
            damaged = _damaged(folder)
            if why or damaged:
                why = why or f"{folder / LATEST} is missing"
                left = f"; {', '.join(damaged[:3])} cannot be read" if damaged else ""
                raise CheckpointError(
                    f"{why}, and no checkpoint there is complete{left}; restore one, or name"
                    " another folder"
                )
            return []
        return _noted(
            have,
            f"{folder / LATEST}: {why or 'is missing'}, so the newest complete checkpoint is taken,"
            f" {have[0].manifest.tag}",
        )
    named = [one for one in have if one.manifest.tag == pointer.tag]
    if named:
        older = [
            named[0],
            *(one for one in have if one.manifest.sequence < named[0].manifest.sequence),
        ]
        if manifest_hash(named[0].path) == pointer.manifest_sha256:
            newer = [
                one.manifest.tag
                for one in have
                if one.manifest.sequence > named[0].manifest.sequence
            ]
            if newer:
                return _noted(
                    older,
                    f"{folder / LATEST} names {pointer.tag}, which is taken, although {newer[0]} is"
                    " newer and complete",
                )
            return older
        return _noted(
            older,
            f"{folder / LATEST} is of an older checkpoint of the name {pointer.tag} than the one"
            " there, which is taken",
        )
    why = f"{folder / pointer.tag} is not there, not complete, or damaged"
    rest = [one for one in have if one.manifest.tag != pointer.tag]
    if not rest:
        raise CheckpointError(
            f"{folder / LATEST} names {pointer.tag}, but {why}; no other checkpoint is there"
        )
    return _noted(
        rest,
        f"{folder / LATEST} names {pointer.tag}, but {why}, so {rest[0].manifest.tag} is taken",
    )


def find(folder: Place, tag: str | None = None) -> Found | None:
    """The checkpoint `tag`, or the one to go on from; None where there is none. See
    `candidates`.
    """
    return next(iter(candidates(folder, tag)), None)


def remove_old(folder: Place, *, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints, and what an interrupted deletion has
    left.

    Never deletes the checkpoint that LATEST names, a copy under another name, or a folder that
    holds files besides those that a save writes: they are the user's, and do not count as
    checkpoints to keep. One rank calls this after a save.
    """
    try:
        for path in entries(folder):
            if path.name.startswith(".") and path.name.endswith(".deleted"):
                remove(path)
        pointer, _ = _pointer(folder)
        have = [
            one
            for one in _complete(folder)
            if has_its_own_name(one.path.name, one.manifest.tag) and holds_own_files_only(one.path)
        ]
        named = next(
            (one.path for one in have if pointer is not None and one.manifest.tag == pointer.tag),
            None,
        )
        for old in have[keep:]:
            if old.path == named:
                continue
            delete_checkpoint(old.path)
    except OSError as error:
        warn(
            f"{folder}: old checkpoints could not be deleted ({error.strerror or error}); they take"
            " room, nothing else"
        )


def _damaged(folder: Place) -> list[str]:
    """What was a checkpoint once."""
    ours = (MANIFEST, MANIFEST_HASH, rank_file(0, "json"), rank_file(0, "safetensors"))
    paths = entries(folder) if folder.is_dir() else []
    there = [path for path in paths if not is_temporary(path) and not is_unfinished(path)]
    return [path.name for path in there if any(_has(path, name) for name in ours)]


def _pointer(folder: Place) -> tuple[Pointer | None, str]:
    """(what LATEST says, why it says nothing)."""
    if not (folder / LATEST).exists():
        return None, ""
    try:
        return parsed(Pointer, folder / LATEST), ""
    except CheckpointError as error:
        return None, str(error)


def _noted(found: list[Found], note: str) -> list[Found]:
    return [Found(found[0].path, found[0].manifest, (note,)), *found[1:]]


def _list(found: list[Found]) -> str:
    return ", ".join(one.manifest.tag for one in found) or "none"
