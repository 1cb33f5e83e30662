"""Writing a checkpoint: every rank its part, one rename, and then LATEST. Nothing that was saved
before is touched until it is in place.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.dtensor import local_tensor
from plait.checkpoint.agreement import together
from plait.checkpoint.commit import Commit, begin, joined
from plait.checkpoint.content import ContentHash, Observer
from plait.checkpoint.durable import write_text
from plait.checkpoint.folder import complete
from plait.checkpoint.manifest import FORMAT, LATEST, Manifest, RankManifest, digest, rank_file
from plait.checkpoint.places import Place
from plait.checkpoint.shard_file import write_shards
from plait.checkpoint.windows import TensorRecord, record_of, window_of
from plait.cluster.mesh import Mesh
from plait.comm.failures import naming
from plait.comm.watch import WATCH
from plait.errors import CheckpointError, CommunicationError

SEEN_WITHIN = 5.0
"""Seconds after which all ranks see what rank 0 has made: file systems between machines keep lists
of names for a while.
"""
OWN = "rank."
"""Begins the names of tensors that only one rank has."""


@dataclass(frozen=True)
class Snapshot:
    """What this rank writes of a checkpoint. Nothing of it follows what the model becomes later, if
    its tensors were staged.
    """

    folder: Place
    tag: str
    mesh: Mesh
    tensors: Mapping[str, torch.Tensor]
    """Plain: this rank's parts of what it writes, and its own."""
    written: Mapping[str, TensorRecord]
    """Of those that are no rank's own."""
    records: Mapping[str, TensorRecord]
    """Of the first rank of a pipeline stage: all tensors of the stage."""
    values: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def snapshot(
    folder: Place,
    tag: str,
    *,
    mesh: Mesh,
    tensors: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Snapshot:
    """This rank's part of a checkpoint; no tensor is copied. Raises CheckpointError for a tag that
    names no folder.

    `tensors`: sharded or replicated, by names that every rank of a pipeline stage has. `own`: this
    rank's. `values` (of a pipeline stage) and `metadata` (rank 0's) must be JSON.
    """
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise CheckpointError(
            f"tag = {tag!r}: it names a folder, without '/' and no '.' at its beginning"
        )
    at = mesh.coordinates
    records = {
        name: record_of(tensor).model_copy(update={"stages": (at["pp"],)})
        for name, tensor in tensors.items()
    }
    written = {name: record for name, record in records.items() if record.is_written_by(at)}
    mine = {name: local_tensor(tensors[name]) for name in written}
    mine |= {f"{OWN}{name}": tensor for name, tensor in own.items()}
    leads = all(at[axis] == 0 for axis in at if axis != "pp")
    return Snapshot(
        folder,
        tag,
        mesh,
        mine,
        written,
        records if leads else {},
        values if leads else {},
        metadata,
    )


def write(taken: Snapshot, group: dist.ProcessGroup | None = None) -> Place:
    """Write a checkpoint. Collective over `group`, the default one for None, whose backend takes
    tensors of the mesh's device, or of the CPU where it is given; returns where it is when it is on
    the disk and named in LATEST. Raises CheckpointError on every rank where one could not write its
    part: what was there before stays.
    """
    folder = taken.folder
    tag = taken.tag
    mesh = taken.mesh
    device = mesh.device if group is None else torch.device("cpu")
    commit: Commit | None = None
    WATCH.name_group(group, f"all ranks, for checkpoint {folder / tag}")

    def agreed(work: Any, brings: Any = lambda _: b"") -> tuple[Any, list[bytes]]:
        try:
            with naming(f"checkpoint {folder / tag}"):
                return together(
                    work, brings, device=device, doing=f"checkpoint {folder / tag}", group=group
                )
        except CommunicationError as error:
            missing = _unwritten(commit, mesh.layout.world_size)
            if not missing:
                raise
            raise CommunicationError(
                f"{error}; not written yet: {', '.join(missing[:4])}; is a disk slow or full?"
            ) from error

    def make() -> bytes:
        nonlocal commit
        if mesh.rank:
            return b""
        token = secrets.token_hex(16)
        commit = begin(folder, tag, token)
        return token.encode()

    def write_mine() -> tuple[str, ContentHash, ContentHash]:
        nonlocal commit
        commit = commit or _joined(folder, tag, token)
        content = ContentHash()
        own = ContentHash()
        shards = write_shards(
            commit.files / rank_file(mesh.rank, "safetensors"),
            taken.tensors,
            _observers(taken, earlier, content, own),
        )
        text = RankManifest(
            shards=shards, tensors=dict(taken.records), values=dict(taken.values)
        ).model_dump_json()
        write_text(commit.files / rank_file(mesh.rank, "json"), text)
        return digest(text), content, own

    def finish() -> None:
        if mesh.rank:
            return
        assert commit is not None
        content = ContentHash()
        own = ContentHash()
        for one in found:
            content.add(one[32:48])
            own.add(one[48:64])
        manifest = Manifest(
            format=FORMAT,
            tag=tag,
            sequence=max((one.manifest.sequence for one in complete(folder)), default=0) + 1,
            degrees=mesh.layout.all_degrees,
            ranks=tuple(one[:32].hex() for one in found),
            content=str(content),
            own_content=str(own),
            metadata=dict(taken.metadata),
        )
        commit.finish(manifest.model_dump_json())

    try:
        _, tokens = agreed(make, lambda token: token)
        token = tokens[0].rstrip(b"\0").decode()
        earlier = _of_earlier_stages(taken, device, group)
        _, found = agreed(
            write_mine, lambda mine: bytes.fromhex(mine[0]) + bytes(mine[1]) + bytes(mine[2])
        )
        agreed(finish)
    except CheckpointError:
        if mesh.rank == 0 and commit is not None:
            commit.abandon()
        raise
    assert commit is not None
    return commit.target


def _unwritten(commit: Commit | None, ranks: int) -> list[str]:
    """Return the shard files that ranks have not finished. A rank writes its list last."""
    if commit is None:
        return []
    listed = [commit.files / rank_file(rank, "json") for rank in range(ranks)]
    return [
        str(commit.files / rank_file(rank, "safetensors"))
        for rank in range(ranks)
        if not listed[rank].exists()
    ]


def _joined(folder: Place, tag: str, token: str) -> Commit:
    until = time.monotonic() + SEEN_WITHIN
    while (found := joined(folder, tag, token)) is None:
        if time.monotonic() > until:
            raise CheckpointError(
                f"this machine does not see the folder that rank 0 has made for {tag} in {folder};"
                " name one on a file system that all machines share, or a store's URL"
            )
        time.sleep(0.05)
    return found


def _observers(
    taken: Snapshot, earlier: set[str], content: ContentHash, own: ContentHash
) -> dict[str, Observer]:
    """By tensor, what adds it to a hash: everything once, whichever ranks hold it."""
    at = taken.mesh.coordinates
    degrees = taken.mesh.layout.all_degrees
    found = {}
    for name, tensor in taken.tensors.items():
        record = taken.written.get(name)
        if record is None:
            found[name] = own.observer(
                f"{taken.mesh.rank}.{name}", record_of(tensor), window_of(tensor), begins=True
            )
        elif name not in earlier:
            found[name] = content.observer(
                name, record, record.window(at, degrees), begins=record.begins_at(at)
            )
    return found


def _of_earlier_stages(
    taken: Snapshot, device: torch.device, group: dist.ProcessGroup | None
) -> set[str]:
    """What an earlier stage of a pipeline holds too, such as tied weights, and counts.
    Collective.
    """
    mesh = taken.mesh
    numbers = {_number(name): name for name in taken.written}
    found: set[str] = set()
    for stage in range(mesh.layout.pp - 1):
        leader = mesh.layout.rank(pp=stage)
        count = torch.tensor([len(taken.records)], device=device)
        dist.broadcast(count, leader, group=group)
        names = (
            torch.tensor([_number(name) for name in taken.records], device=device)
            if mesh.rank == leader
            else count.new_empty(int(count))
        )
        dist.broadcast(names, leader, group=group)
        if mesh.coordinates["pp"] > stage:
            found |= {numbers[number] for number in names.tolist() if number in numbers}
    return found


def _number(name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )
