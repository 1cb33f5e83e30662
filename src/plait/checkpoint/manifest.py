"""What a checkpoint's JSON files say, and the chain of hashes: LATEST and a file beside it hold
that of the checkpoint's manifest, the manifest those of the ranks' manifests, and these those of
every tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, PositiveInt, ValidationError, field_validator

from plait.checkpoint.durable import IS_NO_FILE, read_bytes
from plait.checkpoint.places import Place
from plait.checkpoint.shard_file import FileManifest
from plait.checkpoint.windows import TensorRecord
from plait.cluster.layout import AXES, EXPERT_AXES, Layout
from plait.errors import CheckpointError, ConfigError
from plait.policy import Policy

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
LATEST = "LATEST"
_MOST = 1 << 30
"""Bytes of a JSON file; those of a model with a million tensors have a quarter of it."""
M = TypeVar("M", bound=Policy)


class RankManifest(Policy):
    """`00000.json`: of one rank."""

    shards: FileManifest
    tensors: dict[str, TensorRecord] = Field(default_factory=dict)
    """The first rank of a pipeline stage lists the stage's tensors, its own or not."""
    values: dict[str, Any] = Field(default_factory=dict)
    """And what else modules of the stage keep (`get_extra_state`), as `exact` writes it."""


class Manifest(Policy):
    """`manifest.json`: of a checkpoint."""

    format: int
    tag: str
    sequence: int
    """Counts the checkpoints of a folder."""
    degrees: dict[str, PositiveInt]
    """Of the layout that wrote it."""
    ranks: tuple[str, ...]
    """sha256 of every rank's manifest."""
    content: str
    """Hash of all tensors of model and optimizer, equal on every layout (`ContentHash`)."""
    own_content: str
    """Of what every rank keeps for itself (generators, residuals): equal on the same layout only.
    """
    metadata: dict[str, Any]
    """What is no tensor."""

    @field_validator("degrees")
    @classmethod
    def _names_axes(cls, degrees: dict[str, int]) -> dict[str, int]:
        if unknown := degrees.keys() - {*AXES, *EXPERT_AXES}:
            raise ValueError(f"{min(unknown)} is no axis of a layout")
        try:
            layout = _layout(degrees)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if layout.all_degrees.get("edp", 1) != degrees.get("edp", 1):
            raise ValueError(
                f"edp is {degrees.get('edp', 1)}, and the other degrees make it"
                f" {layout.all_degrees.get('edp', 1)}"
            )
        return degrees

    @property
    def layout(self) -> Layout:
        """The layout that wrote it."""
        return _layout(self.degrees)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each pipeline stage."""
        return [self.layout.rank(pp=stage) for stage in range(self.layout.pp)]


def _layout(degrees: Mapping[str, int]) -> Layout:
    """`edp` follows from the others."""
    return Layout(**{axis: degree for axis, degree in degrees.items() if axis != "edp"})


class Pointer(Policy):
    """`LATEST`: which checkpoint to go on from."""

    tag: str
    manifest_sha256: str


def rank_file(rank: int, ending: str) -> str:
    """`00000.json`, `00000.safetensors`."""
    return f"{rank:05d}.{ending}"


def digest(text: str) -> str:
    """sha256."""
    return hashlib.sha256(text.encode()).hexdigest()


def parsed(kind: type[M], path: Place, *, sha256: str | None = None) -> M:
    """Read a JSON file, which is what was written if it has the hash. Raises CheckpointError,
    naming it.
    """
    try:
        text = read_bytes(path, most=_MOST).decode()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} {'is missing' if error.strerror != IS_NO_FILE else IS_NO_FILE}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if sha256 is not None and digest(text) != sha256:
        raise CheckpointError(
            f"{path} is not what was written: its sha256 is {digest(text)[:12]}... and not"
            f" {sha256[:12]}..."
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{path} is no {kind.__name__} of Plait: {where}: {first['msg']}"
        ) from None


def manifest_hash(path: Place) -> str:
    """What the manifest of the checkpoint in the folder `path` must have. Raises
    CheckpointError.
    """
    try:
        return read_bytes(path / MANIFEST_HASH, most=1000).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST_HASH} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def read_manifest(path: Place) -> Manifest:
    """Of the checkpoint in the folder `path`. Raises CheckpointError where it is not what was
    written, or of another format.
    """
    manifest = parsed(Manifest, path / MANIFEST, sha256=manifest_hash(path))
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST} has format {manifest.format}, and this version of Plait reads"
            f" {FORMAT}"
        )
    return manifest
