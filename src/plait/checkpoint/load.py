"""Reading of checkpoints: verification, comparison with a model, and loading of tensors.

The layout of the reading ranks is independent of the layout that wrote the checkpoint: each rank
reads the parts of files that overlap with its shards (see Note [Windows] in
`plait.checkpoint.windows`).

`build_described_model` builds the model that a checkpoint of `plait train` describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from plait import exact
from plait._torch.tensors import local_tensor
from plait.checkpoint.folder import CheckpointFolder, candidates
from plait.checkpoint.format import (
    RankManifest,
    ShardReader,
    check_entry,
    check_size,
    rank_file,
    verify_shards,
)
from plait.checkpoint.places import Place, place_of
from plait.checkpoint.save import RANK_START
from plait.checkpoint.states import MODEL_START, model_content, model_shapes, put_values
from plait.checkpoint.windows import (
    ContentHash,
    TensorRecord,
    Window,
    dtype_of,
    merge_stages,
    overlap,
    record_of,
    slices_within,
    tensor_blocks,
    window_of,
)
from plait.errors import CheckpointError, InputError, warn
from plait.model.float32 import keep_in_float32

Verify = Literal["full", "sample", "off"]
"""Extent of the verification.

full: every byte is compared with its hash. sample: the header and every eighth tensor of each file.
off: only sizes of files and hashes of manifests.
"""
_SAMPLE_STRIDE = 8
_REMEDY = "use the model that was saved, or load another checkpoint"


class Reader:
    """Reader of the tensors and values of one checkpoint.

    Attributes:
        path: Folder of the checkpoint.
        manifest: Its manifest.
        layout: Layout that wrote it.
        tensors: Records of all tensors by name.
        values: JSON values of modules by name (`get_extra_state`).
    """

    def __init__(self, checkpoint: CheckpointFolder) -> None:
        """Open a checkpoint.

        Raises:
            CheckpointError: The manifest of a rank is missing or damaged.
        """
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.manifest = checkpoint.manifest
        self.layout = checkpoint.manifest.layout
        if len(self.manifest.ranks) != self.layout.world_size:
            raise CheckpointError(
                f"{self.path}: its manifest lists files of {len(self.manifest.ranks)} ranks, but"
                f" its layout has {self.layout.world_size} ranks; load another checkpoint"
            )
        self._last_read: tuple[int, RankManifest] | None = None
        leaders = [self._rank_manifest(rank) for rank in self.manifest.leaders]
        self.tensors = merge_stages((stage, leader.tensors) for stage, leader in enumerate(leaders))
        self.values: dict[str, Any] = {}
        for leader in leaders:
            self.values |= leader.values

    def _rank_manifest(self, rank: int) -> RankManifest:
        # Only the last one is kept in memory, because callers read them rank by rank.
        if self._last_read is None or self._last_read[0] != rank:
            self._last_read = (rank, self._checkpoint.rank_manifest(rank))
        return self._last_read[1]

    def _file(self, rank: int) -> Place:
        return self.path / rank_file(rank, "safetensors")

    def verify(self, extent: Verify, *, rank: int = 0, world: int = 1) -> None:
        """Compare this rank's share of the files with their hashes.

        Args:
            extent: Extent, see `Verify`.
            rank: This rank, which verifies every `world`-th file.
            world: Number of ranks that verify the checkpoint together.

        Raises:
            CheckpointError: A file was changed after it was written. The error names the file and
                the tensor.
        """
        file_ranks = range(rank, len(self.manifest.ranks), world)
        if extent == "off":
            self._checkpoint.check_sizes(file_ranks)
            return
        stride = 1 if extent == "full" else _SAMPLE_STRIDE
        for file_rank in file_ranks:
            shards = self._rank_manifest(file_rank).shards
            names = set(list(shards.entries)[::stride])
            verify_shards(self._file(file_rank), shards, names=names)

    def content(self) -> tuple[str, str]:
        """Return (content hash of model and optimizer, content hash of the ranks' own tensors).

        Raises:
            CheckpointError: A file cannot be read.
        """
        model_content = ContentHash()
        rank_content = ContentHash()
        for rank in range(len(self.manifest.ranks)):
            shards = self._rank_manifest(rank).shards
            coordinates = self.layout.coordinates(rank)
            with ShardReader(self._file(rank), shards) as file:
                for name in shards.entries:
                    record = self.tensors.get(name)
                    if name.startswith(RANK_START):
                        tensor = file.read(name)
                        # Several ranks have tensors of this name, so the rank is hashed with it.
                        observe = rank_content.observer(
                            f"{rank}.{name}", record_of(tensor), window_of(tensor), is_first=True
                        )
                    elif record is None:
                        raise CheckpointError(
                            f"{self._file(rank)} contains {name}, which the checkpoint's manifests"
                            " do not list; load another checkpoint"
                        )
                    elif record.stages[0] != coordinates["pp"]:
                        # Tied weights are counted on their first stage only.
                        continue
                    else:
                        window = record.window(coordinates, self.layout.all_degrees)
                        tensor = file.read(name, record, window)
                        observe = model_content.observer(
                            name, record, window, is_first=record.begins_at(coordinates)
                        )
                    for block in tensor_blocks(name, tensor):
                        observe(block)
        return str(model_content), str(rank_content)

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor on the CPU.

        Raises:
            CheckpointError: A file cannot be read, or lacks a part of the tensor.
        """
        record = self.tensors[name]
        full = tuple((0, size) for size in record.shape)
        # Sizes are checked before the memory is allocated: a damaged list could ask for any amount.
        for rank, window in record.parts(self.layout, full):
            shards = self._rank_manifest(rank).shards
            check_size(self._file(rank), shards)
            check_entry(self._file(rank), shards, name, record, window)
        tensor = torch.empty(record.shape, dtype=dtype_of(record))
        self.fill({name: tensor})
        return tensor

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read the values of tensors from the files.

        Args:
            targets: Tensors by name, sharded or not. Only this rank's shards of sharded tensors are
                read. Values are cast to the dtypes of these tensors.

        Raises:
            CheckpointError: A global shape differs, or a file cannot be read.
        """
        copies: dict[int, list[_ShardCopy]] = {}
        for name, target in targets.items():
            record = self.tensors[name]
            if record.shape != tuple(target.shape):
                raise CheckpointError(
                    f"{self.path}: {name} has shape {record.shape} in the checkpoint and"
                    f" {tuple(target.shape)} in this model; {_REMEDY}"
                )
            target_window = window_of(target)
            local = local_tensor(target)
            if not local.numel():
                # Shards of small tensors are empty on the last ranks.
                continue
            for rank, file_window in record.parts(self.layout, target_window):
                shared = overlap(file_window, target_window)
                assert shared is not None
                copy = _ShardCopy(
                    name,
                    record,
                    file_window,
                    local,
                    source=slices_within(shared, file_window),
                    target=slices_within(shared, target_window),
                )
                copies.setdefault(rank, []).append(copy)

        # Each file is opened once.
        # Targets may be parameters, which autograd does not allow to write in place.
        with torch.no_grad():
            for rank in sorted(copies):
                with ShardReader(self._file(rank), self._rank_manifest(rank).shards) as file:
                    for copy in copies[rank]:
                        shard = file.read(copy.name, copy.record, copy.window, copy.source)
                        copy.local[copy.target].copy_(shard)

    def rank_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that only one rank has, such as states of random generators."""
        shards = self._rank_manifest(rank).shards
        with ShardReader(self._file(rank), shards) as file:
            tensors: dict[str, torch.Tensor] = {}
            for name in shards.entries:
                if name.startswith(RANK_START):
                    tensors[name.removeprefix(RANK_START)] = file.read(name)
            return tensors

    def under(self, start: str) -> Iterator[tuple[str, TensorRecord]]:
        """Yield (name without prefix, record) for tensors whose name begins with `start`."""
        for name, record in self.tensors.items():
            if name.startswith(start):
                yield name.removeprefix(start), record


@dataclass(frozen=True)
class _ShardCopy:
    """Part of a tensor that is copied from one file to this rank."""

    name: str
    record: TensorRecord
    window: Window
    """Window of the file's shard."""
    local: torch.Tensor
    source: tuple[slice, ...]
    """Part of the file's shard."""
    target: tuple[slice, ...]
    """Part of `local`."""


def load_trained(
    model: nn.Module, folder: str | Place, *, tag: str | None = None, verify: Verify = "full"
) -> Place:
    """Load the weights of a checkpoint into an unsharded model, in one process.

    Args:
        model: Model with allocated parameters. The weights are cast to the dtypes of the
            parameters.
        folder: Folder of checkpoints, or its URL in an object store.
        tag: Name of the checkpoint. None takes the newest one that is not damaged.
        verify: Extent of the verification before loading: full, sample, or off.

    Returns:
        Folder of the checkpoint that was loaded.

    Raises:
        CheckpointError: No checkpoint is readable, or the checkpoint is that of another model.
        InputError: The model is on the meta device.
    """
    checkpoints = candidates(place_of(folder), tag)
    if not checkpoints:
        raise CheckpointError(f"{folder}: contains no checkpoint; name a folder of checkpoints")
    for checkpoint in checkpoints:
        try:
            reader = Reader(checkpoint)
            reader.verify(verify)
            break
        except CheckpointError as error:
            if checkpoint is checkpoints[-1]:
                raise
            warn(f"{checkpoint.path.name} is damaged, so an older checkpoint is loaded: {error}")

    tensors, _ = model_content(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InputError(
            "plait.load_trained fills a model that has memory, but this one is on the meta device;"
            " build it outside the meta device"
        )
    # Nothing is written before the comparison, so a refused model keeps its weights.
    compare_model(reader, model_shapes(tensors))
    reader.fill(tensors)
    put_values(model, reader.values)
    return reader.path


def compare_model(reader: Reader, model_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint with the tensors of a model.

    Args:
        reader: The checkpoint.
        model_shapes: Global shapes of the model's tensors by name.

    Raises:
        CheckpointError: Names or shapes differ. The error names the first difference.
    """
    saved = {name: record.shape for name, record in reader.under(MODEL_START)}
    for verb, names, difference in (
        ("lacks", [name for name in model_shapes if name not in saved], "this model has"),
        ("has", [name for name in saved if name not in model_shapes], "this model lacks"),
    ):
        if names:
            listed = ", ".join(names[:3])
            if len(names) > 3:
                listed += ", ..."
            raise CheckpointError(
                f"{reader.path} is of another model: it {verb} {len(names)} tensors that"
                f" {difference}: {listed}; {_REMEDY}"
            )
    for name, shape in model_shapes.items():
        if saved[name] != shape:
            raise CheckpointError(
                f"{reader.path} is of another model: {name} has shape {saved[name]} in the"
                f" checkpoint and {shape} in this model; {_REMEDY}"
            )


def build_described_model(
    checkpoint: CheckpointFolder, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the model of a checkpoint on the meta device.

    Args:
        checkpoint: Checkpoint that `plait train` wrote.
        dtype: dtype of the parameters, except those that the model's class keeps in float32. None
            uses that of the saved configuration.

    Raises:
        CheckpointError: `plait train` did not write the checkpoint.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    client = exact.decode(checkpoint.manifest.metadata.get("client_state"), where="client_state")
    identity = client.get("identity") if isinstance(client, dict) else None
    if not isinstance(identity, dict):
        raise CheckpointError(
            f"{checkpoint.path} was not written by plait train, so it does not record its model;"
            " build the model yourself, and load its weights with plait.load_trained(model, folder)"
        )
    fields = {}
    for name, value in identity.items():
        if name.startswith("model.") and name != "model.dtype":
            fields[name.removeprefix("model.")] = value
    model_type = fields.pop("model_type")
    settings = {name: value for name, value in fields.items() if value is not None}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        # A checkpoint may come from somebody else, whose code must not run.
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    keep_in_float32(model, dtype or config.dtype)
    return model
