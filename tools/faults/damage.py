"""Files of a checkpoint that are damaged, and a file system that fails in a save: what is noticed, in one process, without ranks."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.folder import candidates
from plait.checkpoint.format import RankManifest, read_json
from plait.checkpoint.load import Reader
from plait.checkpoint.save import Snapshot, write
from plait.checkpoint.windows import record_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.errors import CheckpointError
from tests.faulty_files import Planted, failing, planted, slow

Damage = Callable[[random.Random, Path, Path], str]
SAVE_ERRORS = {
    "no space left (ENOSPC)": errno.ENOSPC,
    "input/output error (EIO)": errno.EIO,
    "read-only (EROFS)": errno.EROFS,
}


@dataclass
class Found:
    """Of one kind of damage."""

    kind: str
    count: int = 0
    noticed: int = 0
    named: int = 0
    """With the file in the message, and the tensor where one was hit."""
    wrong: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def put(folder: Path, value: int, tag: str) -> None:
    """A checkpoint of one process."""
    chance = torch.Generator().manual_seed(value)
    names = [f"model.layers.{index}.weight" for index in range(6)] + ["model.norm.bias"]
    tensors = {name: torch.randn(16, 24, generator=chance) for name in names}
    records = {name: record_of(tensor) for name, tensor in tensors.items()}
    write(
        Snapshot(
            folder,
            tag,
            build_mesh(Layout()),
            tensors,
            records,
            records,
            {},
            {"global_steps": value, "client_state": {}},
        )
    )


def _flip(chance: random.Random, path: Path, other: Path) -> str:
    raw = bytearray(path.read_bytes())
    at = chance.randrange(len(raw))
    raw[at] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    return _tensor_at(path, at)


def _cut(chance: random.Random, path: Path, other: Path) -> str:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])
    return ""


def _zeros(chance: random.Random, path: Path, other: Path) -> str:
    raw = bytearray(path.read_bytes())
    start = chance.randrange(len(raw))
    raw[start : start + 512] = bytes(len(raw[start : start + 512]))
    path.write_bytes(raw)
    return ""


def _delete(chance: random.Random, path: Path, other: Path) -> str:
    path.unlink()
    return ""


def _swap(chance: random.Random, path: Path, other: Path) -> str:
    path.write_bytes(other.read_bytes())
    return ""


DAMAGES: dict[str, Damage] = {
    "bit flip": _flip,
    "truncation": _cut,
    "512 zeros": _zeros,
    "deletion": _delete,
    "swap with an older one's file": _swap,
}


def _tensor_at(path: Path, at: int) -> str:
    """The tensor that a byte of a shard file belongs to."""
    if path.suffix != ".safetensors":
        return ""
    entries = read_json(RankManifest, path.with_suffix(".json")).shards.entries
    return next(
        (name for name, entry in entries.items() if entry.offset <= at < entry.offset + entry.size),
        "",
    )


def damages(folder: Path, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`count` in all. The checkpoint before must be what is loaded instead."""
    chance = random.Random(seed)
    for value, tag in ((1, "old"), (2, "new")):
        put(folder, value, tag)
    older = Reader(candidates(folder, "old")[0])
    older.verify("full")
    files = sorted((folder / "new").iterdir())
    found = {kind: Found(kind) for kind in DAMAGES}
    for number in range(count):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        # Most bytes are in the shards; every file has its turn.
        path = chance.choice(files)
        before = path.read_bytes()
        tensor = DAMAGES[kind](chance, path, folder / "old" / path.name)
        if path.exists() and path.read_bytes() == before:
            continue
        _look(found[kind], folder, path, tensor)
        path.write_bytes(before)
    Reader(candidates(folder)[0]).verify("full")
    return [one.plain() for one in found.values()]


def _look(one: Found, folder: Path, path: Path, tensor: str) -> None:
    one.count += 1
    said, taken = "", ""
    try:
        Reader(candidates(folder, "new")[0]).verify("full")
    except CheckpointError as error:
        said = str(error)
    for candidate in candidates(folder):
        try:
            Reader(candidate).verify("full")
            taken = candidate.manifest.tag
            break
        except CheckpointError:
            continue
    one.noticed += bool(said) and taken == "old"
    names = path.stem in said and (not tensor or tensor in said)
    one.named += names
    if not said or taken != "old" or not names:
        one.wrong.append(
            f"{one.kind} of {path.name} {tensor}: said {said[:200]!r}, loaded {taken!r}"
        )


def failing_saves(folder: Path) -> list[dict[str, Any]]:
    """Every call of a save fails once, and from then on, under a tag that is there and a new one: an error, or a complete
    checkpoint."""
    found = []
    for kind, code in SAVE_ERRORS.items():
        one = Found(f"save, {kind}")
        for tag in ("old", "new"):
            counted = Planted()
            _anew(folder)
            with planted(counted):
                put(folder, 2, tag)
            for call, name in enumerate(counted.calls):
                for once in (True, False):
                    _anew(folder)
                    _fail(one, folder, tag, name, failing(call, code, once=once))
        found.append(one)
    one = Found("save, slow disk")
    _anew(folder)
    _fail(one, folder, "new", "", slow(0.02))
    return [one.plain() for one in (*found, one)]


def _anew(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    put(folder, 1, "old")


def _fail(one: Found, folder: Path, tag: str, name: str, happens: Callable[[int], None]) -> None:
    one.count += 1
    said = ""
    began = time.monotonic()
    with planted(Planted(happens)):
        try:
            put(folder, 2, tag)
        except CheckpointError as error:
            said = str(error)
    steps = []
    for candidate in candidates(folder):
        try:
            Reader(candidate).verify("full")
            steps.append(candidate.manifest.metadata["global_steps"])
            break
        except CheckpointError:
            continue
    right = steps in ([1], [2]) if said else steps == [2]
    one.noticed += right
    one.named += right and (not said or str(folder) in said)
    if not right:
        one.wrong.append(
            f"{tag}, {name}: said {said[:200]!r}, loaded {steps} after {time.monotonic() - began:.1f} s"
        )
