"""Damaged files of a checkpoint, and a file system that fails in a save, in one process."""

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.folder import CheckpointFolder, candidates
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
DAMAGES = ("bit flip", "truncation", "512 zeros", "deletion", "swap with an older one's file")


def newest(folder: Path) -> tuple[CheckpointFolder | None, str]:
    """Return the newest checkpoint that can be loaded, and why a newer one cannot be."""
    reason = ""
    for candidate in candidates(folder):
        try:
            Reader(candidate).verify("full")
            return candidate, reason
        except CheckpointError as error:
            reason = str(error)
    return None, reason


def damaged_files(folder: Path, count: int) -> list[Row]:
    """Damage a file `count` times. The previous checkpoint must be loaded instead."""
    chance = random.Random(0)
    save(folder, 1, "old")
    save(folder, 2, "new")
    files = sorted((folder / "new").iterdir())
    rows = {kind: _row(kind) for kind in DAMAGES}
    for number in range(count):
        kind = DAMAGES[number % len(DAMAGES)]
        path = chance.choice(files)
        content = path.read_bytes()
        tensor = _damage(kind, chance, path, folder / "old" / path.name)
        if not path.exists() or path.read_bytes() != content:
            message = ""
            try:
                Reader(candidates(folder, "new")[0]).verify("full")
            except CheckpointError as error:
                message = str(error)
            loaded, _ = newest(folder)
            tag = loaded and loaded.manifest.tag
            is_named = path.stem in message and tensor in message
            where = f"{kind} of {path.name} {tensor}"
            _count(rows[kind], bool(message) and tag == "old", is_named, where, message, tag)
        path.write_bytes(content)
    Reader(candidates(folder)[0]).verify("full")
    return list(rows.values())


def _damage(kind: str, chance: random.Random, path: Path, older: Path) -> str:
    """Damage a file, and return the name of the tensor that is hit, if it is known."""
    content = bytearray(path.read_bytes())
    position = chance.randrange(len(content))
    tensor = ""
    if kind == "bit flip":
        content[position] ^= 1 << chance.randrange(8)
        if path.suffix == ".safetensors":
            entries = read_json(RankManifest, path.with_suffix(".json")).shards.entries
            for name, entry in entries.items():
                if entry.offset <= position < entry.offset + entry.size:
                    tensor = name
    elif kind == "truncation":
        del content[position:]
    elif kind == "512 zeros":
        content[position : position + 512] = bytes(len(content[position : position + 512]))
    elif kind != "deletion":
        content[:] = older.read_bytes()
    path.write_bytes(content)
    if kind == "deletion":
        path.unlink()
    return tensor


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
    loaded, _ = newest(folder)
    step = loaded and loaded.manifest.metadata["global_steps"]
    is_right = step == 2 or (step == 1 and bool(message))
    is_named = is_right and (not message or str(folder) in message)
    _count(row, is_right, is_named, f"{tag}, {where}", message, step)


def save(folder: Path, step: int, tag: str) -> None:
    chance = torch.Generator().manual_seed(step)
    tensors = {}
    records = {}
    for name in (*(f"model.layers.{index}.weight" for index in range(6)), "model.norm.bias"):
        tensors[name] = torch.randn(16, 24, generator=chance)
        records[name] = record_of(tensors[name])
    metadata = {"global_steps": step, "client_state": {}}
    mesh = build_mesh(Layout())
    write(Snapshot(folder, tag, mesh, tensors, records, records, {}, metadata))


def _row(kind: str) -> Row:
    return {"kind": kind, "count": 0, "noticed": 0, "named": 0, "wrong": []}


def _count(
    row: Row, is_right: bool, is_named: bool, where: str, message: str, loaded: object
) -> None:
    row["count"] += 1
    row["noticed"] += is_right
    row["named"] += is_named
    if not is_right or not is_named:
        row["wrong"].append(f"{where}: message {message[:200]!r}, loaded {loaded!r}")


def _start_again(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, 1, "old")
