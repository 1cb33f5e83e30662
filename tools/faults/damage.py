"""Damaged files of a checkpoint, and a file system that fails in a save, in one process."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
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

Row = dict[str, Any]
SAVE_ERRORS = {
    "no space left (ENOSPC)": errno.ENOSPC,
    "input/output error (EIO)": errno.EIO,
    "read-only (EROFS)": errno.EROFS,
}


def damaged_files(folder: Path, count: int) -> list[Row]:
    """Damage a file `count` times. The previous checkpoint must be loaded instead."""
    chance = random.Random(0)
    for step, tag in ((1, "old"), (2, "new")):
        save(folder, step, tag)
    files = sorted((folder / "new").iterdir())
    rows = {kind: _row(kind) for kind in DAMAGES}
    for number in range(count):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        path = chance.choice(files)
        before = path.read_bytes()
        tensor = DAMAGES[kind](chance, path, folder / "old" / path.name)
        if not path.exists() or path.read_bytes() != before:
            _check_damage(rows[kind], folder, path, tensor)
        path.write_bytes(before)
    Reader(candidates(folder)[0]).verify("full")
    return list(rows.values())


def _check_damage(row: Row, folder: Path, path: Path, tensor: str) -> None:
    message = ""
    try:
        Reader(candidates(folder, "new")[0]).verify("full")
    except CheckpointError as error:
        message = str(error)
    loaded = next(iter(_usable(folder)), None)
    tag = loaded.manifest.tag if loaded else ""
    is_named = path.stem in message and (not tensor or tensor in message)
    row["count"] += 1
    row["noticed"] += bool(message) and tag == "old"
    row["named"] += is_named
    if not message or tag != "old" or not is_named:
        row["wrong"].append(
            f"{row['kind']} of {path.name} {tensor}: message {message[:200]!r}, loaded {tag!r}"
        )


def failing_saves(folder: Path) -> list[Row]:
    """Let every call of a save fail, once or from then on, with a tag that exists and a new one.

    Each save must end with an error, or leave a complete checkpoint.
    """
    rows = []
    for name, code in SAVE_ERRORS.items():
        row = _row(f"save, {name}")
        for tag in ("old", "new"):
            layer = Planted()
            _start_again(folder)
            with planted(layer):
                save(folder, 2, tag)
            for call, where in enumerate(layer.calls):
                for once in (True, False):
                    _check_save(row, folder, tag, where, failing(call, code, once=once))
        rows.append(row)
    row = _row("save, slow disk")
    _check_save(row, folder, "new", "", slow(0.02))
    return [*rows, row]


def _check_save(
    row: Row, folder: Path, tag: str, where: str, happens: Callable[[int], None]
) -> None:
    _start_again(folder)
    message = ""
    with planted(Planted(happens)):
        try:
            save(folder, 2, tag)
        except CheckpointError as error:
            message = str(error)
    steps = [one.manifest.metadata["global_steps"] for one in _usable(folder)[:1]]
    is_right = steps in ([1], [2]) if message else steps == [2]
    row["count"] += 1
    row["noticed"] += is_right
    row["named"] += is_right and (not message or str(folder) in message)
    if not is_right:
        row["wrong"].append(f"{tag}, {where}: message {message[:200]!r}, loaded {steps}")


def save(folder: Path, step: int, tag: str) -> None:
    """Write a checkpoint of one process."""
    chance = torch.Generator().manual_seed(step)
    names = [f"model.layers.{index}.weight" for index in range(6)] + ["model.norm.bias"]
    tensors = {name: torch.randn(16, 24, generator=chance) for name in names}
    records = {name: record_of(tensor) for name, tensor in tensors.items()}
    metadata = {"global_steps": step, "client_state": {}}
    mesh = build_mesh(Layout())
    write(Snapshot(folder, tag, mesh, tensors, records, records, {}, metadata))


def _row(kind: str) -> Row:
    return {"kind": kind, "count": 0, "noticed": 0, "named": 0, "wrong": []}


def _usable(folder: Path) -> list[Any]:
    """Return the first checkpoint of a folder that can be loaded, if there is one."""
    for candidate in candidates(folder):
        try:
            Reader(candidate).verify("full")
        except CheckpointError:
            continue
        return [candidate]
    return []


def _start_again(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, 1, "old")


def _flip(chance: random.Random, path: Path, other: Path) -> str:
    raw = bytearray(path.read_bytes())
    at = chance.randrange(len(raw))
    raw[at] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    if path.suffix != ".safetensors":
        return ""
    entries = read_json(RankManifest, path.with_suffix(".json")).shards.entries
    hit = [name for name, one in entries.items() if one.offset <= at < one.offset + one.size]
    return hit[0] if hit else ""


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


DAMAGES: dict[str, Callable[[random.Random, Path, Path], str]] = {
    "bit flip": _flip,
    "truncation": _cut,
    "512 zeros": _zeros,
    "deletion": _delete,
    "swap with an older one's file": _swap,
}
"""Each damages a file, and returns the name of the tensor that was hit, if it is known."""
