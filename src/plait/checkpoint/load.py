"""Reading a checkpoint: is it what was written, is it of this model, and each rank its own part of it, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.checkpoint.folder import Found, candidates
from plait.checkpoint.manifest import RankManifest, parsed, rank_file
from plait.checkpoint.model_content import START, content, put_values, shapes
from plait.checkpoint.save import OWN
from plait.checkpoint.shard_file import verify_shards
from plait.checkpoint.windows import TensorRecord, inside, merged, overlap, window_of
from plait.errors import CheckpointError, InputError, warn

Verify = Literal["full", "sample", "off"]
"""full: every byte is compared with its hash. sample: of every file the header and one tensor in eight. off: only that files are there,
whole, and that lists are what was written."""


class Reader:
    """One checkpoint."""

    def __init__(self, found: Found) -> None:
        """Raises CheckpointError where the lists of its tensors are not what was written."""
        self.path, self.manifest = found.path, found.manifest
        self.layout = found.manifest.layout
        if len(self.manifest.ranks) != self.layout.world_size:
            raise CheckpointError(
                f"{self.path}: its manifest names {len(self.manifest.ranks)} ranks and a layout of {self.layout.world_size}"
            )
        leaders = [self._of(rank) for rank in self.manifest.leaders]
        self.tensors = merged((stage, leader.tensors) for stage, leader in enumerate(leaders))
        """By name."""
        self.values = {name: value for leader in leaders for name, value in leader.values.items()}
        """What modules keep besides tensors."""

    def _of(self, rank: int) -> RankManifest:
        return parsed(RankManifest, self.path / rank_file(rank, "json"), sha256=self.manifest.ranks[rank])

    def _file(self, rank: int) -> Path:
        return self.path / rank_file(rank, "safetensors")

    def verify(self, how: Verify, *, rank: int = 0, world: int = 1) -> None:
        """Raise CheckpointError, naming file and tensor, for what is not what was written. `rank` of `world` looks at its share of files;
        of `how` see `Verify`."""
        ours = range(rank, len(self.manifest.ranks), world)
        for other in ours:
            shards = self._of(other).shards
            if how == "off":
                if not self._file(other).is_file() or self._file(other).stat().st_size != shards.size:
                    raise CheckpointError(f"{self._file(other)} is missing, or its size is not {shards.size:,} bytes")
                continue
            chosen = set(list(shards.entries)[:: 1 if how == "full" else 8])
            verify_shards(self._file(other), shards, entries=chosen.__contains__)

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's parts into tensors of the same global shapes, sharded or not, in their own dtypes. Raises CheckpointError."""
        by_rank: dict[int, list[tuple[str, torch.Tensor, tuple[slice, ...], tuple[slice, ...]]]] = {}
        for name, target in targets.items():
            record = self.tensors[name]
            if record.shape != tuple(target.shape):
                raise CheckpointError(f"{self.path}: {name} has shape {record.shape} there and {tuple(target.shape)} here")
            wanted, local = window_of(target), local_tensor(target)
            if not local.numel():
                continue
            for rank, held in record.parts(self.layout, wanted):
                part = overlap(held, wanted)
                assert part is not None
                by_rank.setdefault(rank, []).append((name, local, inside(part, held), inside(part, wanted)))
        with torch.no_grad():
            for rank in sorted(by_rank):
                self._copy(self._file(rank), by_rank[rank])

    def _copy(self, path: Path, parts: list[tuple[str, torch.Tensor, tuple[slice, ...], tuple[slice, ...]]]) -> None:
        with ExitStack() as stack:
            try:
                file: Any = stack.enter_context(safe_open(path, framework="pt"))
                for name, local, there, here in parts:
                    stored = file.get_slice(name)
                    if here:
                        local[here].copy_(stored[there])
                    else:
                        local.copy_(stored[...].reshape(()))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def own(self, rank: int) -> dict[str, torch.Tensor]:
        """What a rank saved for itself."""
        names = [name for name in self._of(rank).shards.entries if name.startswith(OWN)]
        try:
            with safe_open(self._file(rank), framework="pt") as file:
                return {name.removeprefix(OWN): file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._file(rank)} cannot be read: {error}") from error

    def under(self, start: str) -> Iterator[tuple[str, TensorRecord]]:
        """The tensors whose names begin so, without the beginning."""
        return ((name.removeprefix(start), record) for name, record in self.tensors.items() if name.startswith(start))


def load_trained(model: nn.Module, folder: str | Path, *, tag: str | None = None, verify: Verify = "full") -> Path:
    """Fill an unsharded model in one process with the weights of `folder/tag`, or of the newest undamaged checkpoint; they take its
    parameters' dtypes. Returns the checkpoint's folder. Raises CheckpointError where there is none, or it is of another model."""
    found = candidates(Path(folder), tag)
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
        raise InputError("plait.load_trained fills a model that has memory, and this one is on the meta device; build it outside of it")
    compare_model(reader, shapes(tensors))
    reader.fill(tensors)
    put_values(model, reader.values)
    return reader.path


def compare_model(reader: Reader, here: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError where the checkpoint's model does not have exactly the tensors `here` (name to global shape), naming the
    first."""
    there = {name: record.shape for name, record in reader.under(START)}
    _refuse_other_names(reader.path, "lacks", [name for name in here if name not in there], "this model has")
    _refuse_other_names(reader.path, "has", [name for name in there if name not in here], "this model lacks")
    for name, shape in here.items():
        if there[name] != shape:
            raise CheckpointError(f"{reader.path} is of another model: {name} has shape {there[name]} there and {shape} here")


def _refuse_other_names(checkpoint: Path, verb: str, names: list[str], what: str) -> None:
    if names:
        first = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise CheckpointError(f"{checkpoint} is of another model: it {verb} {len(names)} tensors that {what}: {first}")
