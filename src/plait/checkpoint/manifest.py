"""JSON files of a checkpoint and the chain of hashes that protects them.

Note [Chain of hashes]
    LATEST and `manifest.sha256` contain the hash of `manifest.json`. The manifest contains the
    hashes of the ranks' manifests, and these contain the hashes of all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, PositiveInt, ValidationError, field_validator

from plait.checkpoint.durable import IS_NO_FILE, read_bytes
from plait.checkpoint.places import Place
from plait.checkpoint.shard_file import FileManifest
from plait.checkpoint.windows import TensorRecord
from plait.cluster.layout import AXES, EXPERT_AXES, Layout
from plait.errors import CheckpointError, ConfigError
from plait.hashing import sha256_of
from plait.policy import Policy

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
LATEST = "LATEST"
_MAX_BYTES = 1 << 30
"""Largest JSON file that is read. A model with a million tensors needs a quarter of it."""
M = TypeVar("M", bound=Policy)


class RankManifest(Policy):
    """Content of `00000.json`, the manifest of one rank."""

    shards: FileManifest
    tensors: dict[str, TensorRecord] = Field(default_factory=dict)
    """All tensors of the pipeline stage. Only the stage's first rank lists them."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Other state of the stage's modules (`get_extra_state`) in the encoding of `exact`."""


class Manifest(Policy):
    """Content of `manifest.json`, the manifest of a checkpoint."""

    format: int
    tag: str
    sequence: int
    """Number of the checkpoint in its folder, increasing with every save."""
    degrees: dict[str, PositiveInt]
    """Degrees of the layout that wrote it, by mesh axis."""
    ranks: tuple[str, ...]
    """sha256 of every rank's manifest."""
    content: str
    """Hash of all tensors of model and optimizer, equal on every layout (`ContentHash`)."""
    own_content: str
    """Hash of tensors of single ranks (generators, residuals), equal on the same layout only."""
    metadata: dict[str, Any]
    """JSON values: counters, records of optimizer and scheduler, the client's state."""

    @field_validator("degrees")
    @classmethod
    def _names_axes(cls, degrees: dict[str, int]) -> dict[str, int]:
        unknown = degrees.keys() - {*AXES, *EXPERT_AXES}
        if unknown:
            raise ValueError(f"{min(unknown)} is not an axis of a layout")
        try:
            layout = _layout(degrees)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        edp = degrees.get("edp", 1)
        derived_edp = layout.all_degrees.get("edp", 1)
        if derived_edp != edp:
            raise ValueError(f"edp is {edp}, but follows from the other degrees as {derived_edp}")
        return degrees

    @property
    def layout(self) -> Layout:
        """Layout that wrote the checkpoint."""
        return _layout(self.degrees)

    @property
    def leaders(self) -> list[int]:
        """First rank of each pipeline stage."""
        return [self.layout.rank(pp=stage) for stage in range(self.layout.pp)]


def _layout(degrees: Mapping[str, int]) -> Layout:
    # edp follows from the other degrees, so Layout does not accept it.
    return Layout(**{axis: degree for axis, degree in degrees.items() if axis != "edp"})


class Pointer(Policy):
    """Content of `LATEST`, which names the checkpoint to resume from."""

    tag: str
    manifest_sha256: str


def rank_file(rank: int, ending: str) -> str:
    """Return the name of a rank's file, such as `00000.json` or `00000.safetensors`."""
    return f"{rank:05d}.{ending}"


def read_json(kind: type[M], path: Place, *, sha256: str | None = None) -> M:
    """Read and validate a JSON file.

    Args:
        kind: Model of the content.
        path: The file.
        sha256: Expected hash of the file. None does not compare it.

    Raises:
        CheckpointError: The file is missing, damaged, or of another form. The error names it.
    """
    try:
        text = read_bytes(path, most=_MAX_BYTES).decode()
    except FileNotFoundError as error:
        problem = IS_NO_FILE if error.strerror == IS_NO_FILE else "is missing"
        raise CheckpointError(f"{path} {problem}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error

    if sha256 is not None and sha256_of(text) != sha256:
        raise CheckpointError(
            f"{path} was changed after it was written: its sha256 is"
            f" {sha256_of(text)[:12]}... and not {sha256[:12]}..."
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{path} is not a valid {kind.__name__} of Plait: {field}: {first['msg']}"
        ) from None


def manifest_hash(path: Place) -> str:
    """Return the expected hash of the manifest of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: The file of the hash cannot be read.
    """
    try:
        return read_bytes(path / MANIFEST_HASH, most=1000).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST_HASH} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def read_manifest(path: Place) -> Manifest:
    """Read the manifest of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: The manifest is missing, damaged, or of another format version.
    """
    manifest = read_json(Manifest, path / MANIFEST, sha256=manifest_hash(path))
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST} has format {manifest.format}, but this version of Plait reads"
            f" format {FORMAT}"
        )
    return manifest
