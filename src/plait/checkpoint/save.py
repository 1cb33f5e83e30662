"""Writing a checkpoint: every rank its part, one rename, and then LATEST. Nothing that was saved before is touched until it is in place."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.dtensor import local_tensor
from plait.checkpoint.agreement import together
from plait.checkpoint.durable import publish, replace_text, write_text
from plait.checkpoint.folder import complete
from plait.checkpoint.manifest import FORMAT, LATEST, MANIFEST, MANIFEST_HASH, Manifest, Pointer, RankManifest, digest, rank_file
from plait.checkpoint.shard_file import write_shards
from plait.checkpoint.windows import TensorRecord, record_of
from plait.cluster.mesh import Mesh
from plait.errors import CheckpointError

_BEGUN = "begun"
_OWN_FILE = re.compile(r"\d{5,}\.(json|safetensors)|manifest\.(json|sha256)")
OWN = "rank."
"""Begins the names of tensors that only one rank has."""


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint. Nothing of it follows what the model becomes later, if its tensors were staged."""

    folder: Path
    tag: str
    mesh: Mesh
    tensors: Mapping[str, torch.Tensor]
    """Plain: this rank's parts of what it writes, and its own."""
    records: Mapping[str, TensorRecord]
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def snapshot(
    folder: Path,
    tag: str,
    *,
    mesh: Mesh,
    tensors: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Snapshot:
    """This rank's part of a checkpoint; no tensor is copied. Raises CheckpointError for a tag that names no folder.

    `tensors`: sharded or replicated, by names that every rank of a pipeline stage has. `own`: this rank's. `values` (of a pipeline stage)
    and `metadata` (rank 0's) must be JSON.
    """
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise CheckpointError(f"tag = {tag!r}: it names a folder, without '/' and no '.' at its beginning")
    at = mesh.coordinates
    records = {name: record_of(tensor).model_copy(update={"stages": (at["pp"],)}) for name, tensor in tensors.items()}
    mine = {name: local_tensor(tensor) for name, tensor in tensors.items() if records[name].is_written_by(at)}
    mine |= {f"{OWN}{name}": tensor for name, tensor in own.items()}
    leads = all(at[axis] == 0 for axis in at if axis != "pp")
    return Snapshot(folder, tag, mesh, mine, records if leads else {}, values if leads else {}, metadata)


def write(taken: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint. Collective over `group`, the default one for None, whose backend takes tensors of the mesh's device, or of the
    CPU where it is given; returns when it is on the disk and named in LATEST. Raises CheckpointError on every rank where one could not
    write its part: what was there before stays."""
    folder, tag, mesh = taken.folder, taken.tag, taken.mesh
    rank, target, temporary = mesh.rank, folder / tag, folder / f".{tag}.tmp"

    def agreed(work: Any, brings: Any = lambda _: b"") -> tuple[Any, list[bytes]]:
        device = mesh.device if group is None else torch.device("cpu")
        return together(work, brings, device=device, doing=f"checkpoint {target}", group=group)

    def begin() -> bytes:
        if rank:
            return b""
        _refuse_others_files(target)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        token = secrets.token_hex(16)
        (temporary / _BEGUN).write_text(token)
        return token.encode()

    def write_mine() -> str:
        seen = (temporary / _BEGUN).read_text() if (temporary / _BEGUN).exists() else ""
        if seen != token.decode():
            raise CheckpointError(
                f"this machine does not see the folder that rank 0 has made, {temporary}; name one on a file system that all machines share"
            )
        shards = write_shards(temporary / rank_file(rank, "safetensors"), taken.tensors)
        text = RankManifest(shards=shards, tensors=dict(taken.records), values=dict(taken.values)).model_dump_json()
        write_text(temporary / rank_file(rank, "json"), text)
        return digest(text)

    def commit() -> None:
        if rank:
            return
        sequence = max((one.manifest.sequence for one in complete(folder)), default=0) + 1
        text = Manifest(
            format=FORMAT, tag=tag, sequence=sequence, degrees=mesh.layout.degrees, ranks=tuple(hashes), metadata=dict(taken.metadata)
        ).model_dump_json()
        write_text(temporary / MANIFEST, text)
        write_text(temporary / MANIFEST_HASH, digest(text))
        (temporary / _BEGUN).unlink()
        replaced = folder / f".{tag}.replaced"
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        try:
            publish(temporary, target)
        except OSError:
            if replaced.exists() and not target.exists():
                replaced.rename(target)
            raise
        replace_text(folder / LATEST, Pointer(tag=tag, manifest_sha256=digest(text)).model_dump_json())
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        _, tokens = agreed(begin, lambda token: token)
        token = tokens[0]
        _, found = agreed(write_mine, bytes.fromhex)
        hashes = [one.hex() for one in found]
        agreed(commit)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _refuse_others_files(target: Path) -> None:
    """A checkpoint takes the place of an older one of its name, damaged or not, and of nothing else."""
    kept = target.is_dir() and all(_OWN_FILE.fullmatch(path.name) for path in target.iterdir())
    if os.path.lexists(target) and not kept:
        raise CheckpointError("something is there that is no checkpoint, and would be deleted; give another tag, or remove it first")
