"""Reading a checkpoint: is it what was written, is it of this model, and each rank its own part of
it, whatever layout wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.checkpoint.content import ContentHash, pieces
from plait.checkpoint.folder import Found, candidates
from plait.checkpoint.manifest import RankManifest, parsed, rank_file
from plait.checkpoint.model_content import START, content, put_values, shapes
from plait.checkpoint.places import Place, place_of
from plait.checkpoint.save import OWN
from plait.checkpoint.shard_file import ShardReader, check_entry, check_size, verify_shards
from plait.checkpoint.windows import (
    TensorRecord,
    Window,
    dtype_of,
    inside,
    merged,
    overlap,
    record_of,
    window_of,
)
from plait.errors import CheckpointError, InputError, warn

Verify = Literal["full", "sample", "off"]
"""full: every byte is compared with its hash. sample: of every file the header and one tensor in
eight. off: only that files are there, whole, and that lists are what was written.
"""


@dataclass(frozen=True)
class _Part:
    """Of a tensor, what one file gives to this rank."""

    name: str
    record: TensorRecord
    held: Window
    """By the file."""
    local: torch.Tensor
    there: tuple[slice, ...]
    here: tuple[slice, ...]


class Reader:
    """One checkpoint."""

    def __init__(self, found: Found) -> None:
        """Raises CheckpointError where the lists of its tensors are not what was written."""
        self.path = found.path
        self.manifest = found.manifest
        self.layout = found.manifest.layout
        if len(self.manifest.ranks) != self.layout.world_size:
            raise CheckpointError(
                f"{self.path}: its manifest names {len(self.manifest.ranks)} ranks and a layout of"
                f" {self.layout.world_size}"
            )
        self._last: tuple[int, RankManifest] | None = None
        leaders = [self._of(rank) for rank in self.manifest.leaders]
        self.tensors = merged((stage, leader.tensors) for stage, leader in enumerate(leaders))
        """By name."""
        self.values = {name: value for leader in leaders for name, value in leader.values.items()}
        """What modules keep besides tensors."""

    def _of(self, rank: int) -> RankManifest:
        if self._last is None or self._last[0] != rank:
            self._last = (
                rank,
                parsed(
                    RankManifest,
                    self.path / rank_file(rank, "json"),
                    sha256=self.manifest.ranks[rank],
                ),
            )
        return self._last[1]

    def _file(self, rank: int) -> Place:
        return self.path / rank_file(rank, "safetensors")

    def verify(self, how: Verify, *, rank: int = 0, world: int = 1) -> None:
        """Raise CheckpointError, naming file and tensor, for what is not what was written. `rank`
        of `world` looks at its share of files; of `how` see `Verify`.
        """
        for other in range(rank, len(self.manifest.ranks), world):
            shards = self._of(other).shards
            if how == "off":
                check_size(self._file(other), shards)
                continue
            chosen = set(list(shards.entries)[:: 1 if how == "full" else 8])
            verify_shards(self._file(other), shards, entries=chosen.__contains__)

    def content(self) -> tuple[str, str]:
        """The content hashes of what the files hold (see `Manifest`). Raises CheckpointError."""
        content = ContentHash()
        own = ContentHash()
        for rank in range(len(self.manifest.ranks)):
            shards = self._of(rank).shards
            at = self.layout.coordinates(rank)
            with ShardReader(self._file(rank), shards) as file:
                for name in shards.entries:
                    record = self.tensors.get(name)
                    if name.startswith(OWN):
                        mine = file.read(name)
                        observe = own.observer(
                            f"{rank}.{name}", record_of(mine), window_of(mine), begins=True
                        )
                    elif record is None:
                        raise CheckpointError(
                            f"{self._file(rank)} holds {name}, which the list of the checkpoint's"
                            " tensors does not have"
                        )
                    elif record.stages[0] != at["pp"]:
                        continue
                    else:
                        window = record.window(at, self.layout.all_degrees)
                        mine = file.read(name, record, window)
                        observe = content.observer(
                            name, record, window, begins=record.begins_at(at)
                        )
                    for piece in pieces(name, mine):
                        observe(piece)
        return str(content), str(own)

    def read(self, name: str) -> torch.Tensor:
        """A full tensor. Raises CheckpointError."""
        record = self.tensors[name]
        dtype = dtype_of(record)
        for rank, held in record.parts(self.layout, tuple((0, size) for size in record.shape)):
            check_size(self._file(rank), self._of(rank).shards)
            check_entry(self._file(rank), self._of(rank).shards, name, record, held)
        found = torch.empty(record.shape, dtype=dtype)
        self.fill({name: found})
        return found

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's parts into tensors of the same global shapes, sharded or not, in their
        own dtypes. Raises CheckpointError.
        """
        by_rank: dict[int, list[_Part]] = {}
        for name, target in targets.items():
            record = self.tensors[name]
            if record.shape != tuple(target.shape):
                raise CheckpointError(
                    f"{self.path}: {name} has shape {record.shape} there and {tuple(target.shape)}"
                    " here"
                )
            wanted = window_of(target)
            local = local_tensor(target)
            if not local.numel():
                continue
            for rank, held in record.parts(self.layout, wanted):
                part = overlap(held, wanted)
                assert part is not None
                by_rank.setdefault(rank, []).append(
                    _Part(name, record, held, local, inside(part, held), inside(part, wanted))
                )
        with torch.no_grad():
            for rank in sorted(by_rank):
                with ShardReader(self._file(rank), self._of(rank).shards) as file:
                    for one in by_rank[rank]:
                        one.local[one.here].copy_(
                            file.read(one.name, one.record, one.held, one.there)
                        )

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """What a rank saved for itself."""
        shards = self._of(rank).shards
        with ShardReader(self._file(rank), shards) as file:
            return {
                name.removeprefix(OWN): file.read(name)
                for name in shards.entries
                if name.startswith(OWN)
            }

    def under(self, start: str) -> Iterator[tuple[str, TensorRecord]]:
        """The tensors whose names begin so, without the beginning."""
        return (
            (name.removeprefix(start), record)
            for name, record in self.tensors.items()
            if name.startswith(start)
        )


def load_trained(
    model: nn.Module, folder: str | Place, *, tag: str | None = None, verify: Verify = "full"
) -> Place:
    """Fill an unsharded model in one process with the weights of `folder/tag`, or of the newest
    undamaged checkpoint; they take its parameters' dtypes. Returns the checkpoint's folder. Raises
    CheckpointError where there is none, or it is of another model.
    """
    found = candidates(place_of(folder), tag)
    if not found:
        raise CheckpointError(f"{folder}: no checkpoint is there")
    for one in found:
        try:
            reader = Reader(one)
            reader.verify(verify)
            break
        except CheckpointError as error:
            if one is found[-1]:
                raise
            warn(f"{one.path.name} is damaged, so an older checkpoint is taken: {error}")
    tensors, _ = content(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError(
            "plait.load_trained fills a model that has memory, and this one is on the meta device;"
            " build it outside of it"
        )
    compare_model(reader, shapes(tensors))
    reader.fill(tensors)
    put_values(model, reader.values)
    return reader.path


def compare_model(reader: Reader, here: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError where the checkpoint's model does not have exactly the tensors `here`
    (name to global shape), naming the first.
    """
    there = {name: record.shape for name, record in reader.under(START)}
    _refuse_other_names(
        reader.path, "lacks", [name for name in here if name not in there], "this model has"
    )
    _refuse_other_names(
        reader.path, "has", [name for name in there if name not in here], "this model lacks"
    )
    for name, shape in here.items():
        if there[name] != shape:
            raise CheckpointError(
                f"{reader.path} is of another model: {name} has shape {there[name]} there and"
                f" {shape} here"
            )


def _refuse_other_names(checkpoint: Place, verb: str, names: list[str], what: str) -> None:
    if names:
        first = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise CheckpointError(
            f"{checkpoint} is of another model: it {verb} {len(names)} tensors that {what}: {first}"
        )
