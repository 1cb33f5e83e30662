"""Files of a checkpoint: safetensors of each rank, JSON manifests, and a chain of hashes.

Note [Chain of hashes]
    LATEST and `manifest.sha256` contain the hash of `manifest.json`. The manifest contains the
    hashes of the ranks' manifests, and these contain the hashes of all tensors.

The safetensors library reads the files but does not write them: writing the format here allows
hashing the bytes in the same pass.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self, TypeVar

import torch
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from safetensors import SafetensorError, safe_open

from plait.checkpoint.places import (
    IS_NO_FILE,
    ByteSink,
    Place,
    StorePath,
    open_to_read,
    read_bytes,
    reading,
    size_of,
    write_file,
)
from plait.checkpoint.windows import Observer, TensorRecord, Window, dtype_of, tensor_blocks
from plait.cluster.layout import AXES, EXPERT_AXES, Layout
from plait.errors import CheckpointError, ConfigError
from plait.hashing import sha256_of
from plait.policy import Policy

RESTORE = "restore the file from a copy, or load another checkpoint"
"""Remedy of the errors of damaged files."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""
_READ_BYTES = 16 << 20
FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
LATEST = "LATEST"
_MAX_BYTES = 1 << 30
"""Size of the largest JSON file that is read. A million tensors need a quarter of it."""
M = TypeVar("M", bound=Policy)


def is_supported_dtype(dtype: object) -> bool:
    """Return True if tensors of the dtype can be written."""
    return dtype in _DTYPES


class FileEntry(Policy):
    """Position and hash of a tensor in a file."""

    offset: NonNegativeInt
    """Offset from the beginning of the file in bytes."""
    size: NonNegativeInt
    """Size in bytes."""
    sha256: str


class FileManifest(Policy):
    """Manifest of a rank's file: the position and hash of each tensor."""

    file: str
    size: NonNegativeInt
    """Size of the file in bytes."""
    header_sha256: str
    """Hash of the bytes before the first tensor."""
    entries: dict[str, FileEntry]

    @model_validator(mode="after")
    def _entries_do_not_overlap(self) -> Self:
        end = 0
        # Empty tensors share the offset of the next one, so the size is part of the order.
        by_offset = sorted(self.entries.items(), key=lambda item: (item[1].offset, item[1].size))
        for name, entry in by_offset:
            if entry.offset < end or entry.offset + entry.size > self.size:
                raise ValueError(
                    f"{name} at {entry.offset:,} overlaps another tensor, or does not end within"
                    f" {self.size:,} bytes"
                )
            end = entry.offset + entry.size
        return self


def write_shards(
    path: Place,
    tensors: Mapping[str, torch.Tensor],
    observers: Mapping[str, Observer] | None = None,
) -> FileManifest:
    """Write tensors to a new safetensors file, and wait until the file is on disk.

    Args:
        path: The file.
        tensors: Local tensors by name. DTensors and other subclasses are not supported.
        observers: Functions by tensor name. Each receives the blocks of its tensor when they are
            written.

    Raises:
        CheckpointError: A tensor is of a subclass or a dtype that the format does not support.
        OSError: The file cannot be written.
    """
    head = _encode_header(tensors)
    entries: dict[str, FileEntry] = {}

    def content(stream: ByteSink) -> None:
        stream.write(head)
        offset = len(head)
        for name, tensor in tensors.items():
            digest = hashlib.sha256()
            size = 0
            observe = (observers or {}).get(name)
            for block in tensor_blocks(name, tensor):
                observed = pool.submit(observe, block) if observe is not None else None
                digest.update(block.raw)
                stream.write(block.raw)
                size += len(block.raw)
                if observed is not None:
                    # Raises its error, and keeps at most one block in memory.
                    observed.result()
            entries[name] = FileEntry(offset=offset, size=size, sha256=digest.hexdigest())
            offset += size

    # The content hash runs on another core than sha256 and the writes.
    with ThreadPoolExecutor(1, thread_name_prefix="plait-content") as pool:
        write_file(path, content)
    return FileManifest(
        file=path.name,
        size=len(head) + sum(entry.size for entry in entries.values()),
        header_sha256=hashlib.sha256(head).hexdigest(),
        entries=entries,
    )


def _encode_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a safetensors file before its first tensor."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__} of {tensor.dtype}, which a checkpoint cannot"
                " contain; convert it to a plain tensor of another dtype"
            )
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns the first tensor to 8 bytes with spaces.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ShardReader:
    """Reader of the tensors of one file.

    From a local file, only the requested part of a tensor is read; from a store, all of its bytes.
    Hashes are not compared. Entering the context and reading raise CheckpointError if the file
    cannot be read, or does not agree with its manifest.

    Args:
        path: The file.
        manifest: Manifest of the file.
    """

    def __init__(self, path: Place, manifest: FileManifest) -> None:
        self._path = path
        self._manifest = manifest
        self._store = path if isinstance(path, StorePath) else None
        self._open = ExitStack()
        self._file: Any = None
        self._header: dict[str, Any] | None = None
        """Header of a file in a store, once it was read."""

    def __enter__(self) -> ShardReader:
        with self._checkpoint_errors():
            check_size(self._path, self._manifest)
            if self._store is None:
                self._file = self._open.enter_context(safe_open(self._path, framework="pt"))
                with open_to_read(self._path) as stream:
                    length = int.from_bytes(stream.read(8), "little")
                    self._check_offsets(json.loads(stream.read(length)), 8 + length)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(
        self,
        name: str,
        record: TensorRecord | None = None,
        window: Window | None = None,
        part: tuple[slice, ...] = (),
    ) -> torch.Tensor:
        """Return a tensor of the file, or a part of it.

        Args:
            name: Name of the tensor.
            record: Expected record of the full tensor. None accepts dtype and shape of the file.
            window: Expected window of the shard in the file. See Note [Windows].
            part: Slices of the shard. () reads all of it.

        Raises:
            CheckpointError: The file cannot be read, or differs from its manifest, `record` or
                `window`.
        """
        with self._checkpoint_errors():
            if record is None or window is None:
                return self._read_unchecked(name)

            entry = check_entry(self._path, self._manifest, name, record, window)
            expected_shape = [length for _, length in window]
            if self._store is not None:
                tensor = _read_from_store(self._store, entry, dtype_of(record), expected_shape)
                return tensor[part]

            view = self._file.get_slice(name)
            dtype_name = view.get_dtype()
            shape = list(view.get_shape())
            if (dtype_name, shape) != (_DTYPES[dtype_of(record)], expected_shape):
                raise CheckpointError(
                    f"{self._path}: {name} is {dtype_name} {shape} in the file, but its manifest"
                    f" lists {record.dtype} {expected_shape}; {RESTORE}"
                )
            return view[part] if part else self._file.get_tensor(name)

    def _read_unchecked(self, name: str) -> torch.Tensor:
        """Return a complete tensor with the dtype and shape in the file's header."""
        if self._store is None:
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor
        if self._header is None:
            self._header = self._read_header(self._store)
        entry = self._header[name]
        dtype = next(dtype for dtype, label in _DTYPES.items() if label == entry["dtype"])
        return _read_from_store(self._store, self._manifest.entries[name], dtype, entry["shape"])

    def _read_header(self, store: StorePath) -> dict[str, Any]:
        """Return the safetensors header of a file in a store.

        Raises:
            CheckpointError: The header does not agree with the manifest of the file.
        """
        length = int.from_bytes(store.read_bytes(0, 8), "little")
        if length > self._manifest.size:
            raise CheckpointError(
                f"{self._path}: its header would have {length:,} bytes, but the file has"
                f" {self._manifest.size:,}; {RESTORE}"
            )
        header: dict[str, Any] = json.loads(store.read_bytes(8, 8 + length))
        self._check_offsets(header, 8 + length)
        return header

    def _check_offsets(self, header: dict[str, Any], start: int) -> None:
        """Raise CheckpointError unless header and manifest agree on the position of every tensor.

        Hashes cover the ranges that the manifest lists, but tensors are read from the ranges that
        the header lists.

        Args:
            header: Header of the safetensors file.
            start: Offset of the first tensor in the file, in bytes.
        """
        header_ranges = {
            name: tuple(entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        listed_ranges = {
            name: (entry.offset - start, entry.offset + entry.size - start)
            for name, entry in self._manifest.entries.items()
        }
        for name in sorted(header_ranges.keys() | listed_ranges.keys()):
            if header_ranges.get(name) != listed_ranges.get(name):
                raise CheckpointError(
                    f"{self._path}: its header and its manifest give {name} different positions in"
                    f" the file; {RESTORE}"
                )

    @contextmanager
    def _checkpoint_errors(self) -> Iterator[None]:
        """Turn the errors of damaged files into CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except (
            SafetensorError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            StopIteration,
            RuntimeError,
        ) as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {getattr(error, 'strerror', None) or error};"
                f" {RESTORE}"
            ) from error


def _read_from_store(
    path: StorePath, entry: FileEntry, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    raw = bytearray()
    if entry.size:
        raw = bytearray(path.read_bytes(entry.offset, entry.offset + entry.size))
    if len(raw) != entry.size:
        raise CheckpointError(
            f"{path} ends within a tensor: it was truncated while it was read; {RESTORE}"
        )
    # torch.frombuffer refuses empty buffers.
    tensor = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return tensor.reshape(shape)


def check_size(path: Place, manifest: FileManifest) -> None:
    """Compare the size of a file with its manifest.

    Raises:
        CheckpointError: The file is missing or has another size.
    """
    size = None
    with reading(path), suppress(FileNotFoundError):
        if isinstance(path, StorePath) or path.is_file():
            size = size_of(path)
    if size is None:
        raise CheckpointError(
            f"{path} is missing or not a file, but {manifest.size:,} bytes were written; {RESTORE}"
        )
    if size != manifest.size:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but {manifest.size:,} were written; it was truncated or"
            f" replaced; {RESTORE}"
        )


def check_entry(
    path: Place, manifest: FileManifest, name: str, record: TensorRecord, window: Window
) -> FileEntry:
    """Check the size of a tensor's entry in a file's manifest, and return the entry.

    Args:
        path: The file.
        manifest: Manifest of the file.
        name: Name of the tensor.
        record: Record of the full tensor.
        window: Part of the full tensor that the file should contain. See Note [Windows].

    Raises:
        CheckpointError: The manifest does not list the tensor, or lists it with another size.
    """
    entry = manifest.entries.get(name)
    dtype = dtype_of(record)
    if entry is None:
        raise CheckpointError(
            f"{path}: its manifest does not list {name}, of which the file should contain a part;"
            f" {RESTORE}"
        )
    size = math.prod(length for _, length in window) * dtype.itemsize
    if dtype not in _DTYPES or entry.size != size:
        raise CheckpointError(
            f"{path}: {name} has {entry.size:,} bytes in the file, but its shape and dtype"
            f" ({record.dtype}) take {size:,}; {RESTORE}"
        )
    return entry


def verify_shards(
    path: Place, manifest: FileManifest, *, names: Collection[str] | None = None
) -> None:
    """Compare the header and tensors of a file with their hashes.

    Args:
        path: The file.
        manifest: Manifest of the file.
        names: Names of the tensors to compare. None compares all.

    Raises:
        CheckpointError: A tensor or the header was changed after it was written. The error names
            the file and the first such tensor.
    """
    check_size(path, manifest)
    with reading(path), open_to_read(path) as stream:
        offsets = (entry.offset for entry in manifest.entries.values())
        header_size = min(offsets, default=manifest.size)
        if _digest(stream, 0, header_size) != manifest.header_sha256:
            raise CheckpointError(f"{path}: its header was changed after it was written; {RESTORE}")
        for name, entry in manifest.entries.items():
            if names is not None and name not in names:
                continue
            if _digest(stream, entry.offset, entry.size) != entry.sha256:
                raise CheckpointError(f"{path}: {name} was changed after it was written; {RESTORE}")


def _digest(stream: Any, offset: int, size: int) -> str:
    digest = hashlib.sha256()
    stream.seek(offset)
    remaining = size
    while part := stream.read(min(remaining, _READ_BYTES)):
        digest.update(part)
        remaining -= len(part)
    return digest.hexdigest()


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
    """Hash of all tensors of model and optimizer (`ContentHash`). It is equal on every layout."""
    own_content: str
    """Hash of the ranks' own tensors (generators, residuals). It is equal on one layout only."""
    metadata: dict[str, Any]
    """JSON values: counters, records of optimizer and scheduler, the client's state."""

    @field_validator("degrees")
    @classmethod
    def _names_axes(cls, degrees: dict[str, int]) -> dict[str, int]:
        unknown = degrees.keys() - {*AXES, *EXPERT_AXES}
        if unknown:
            raise ValueError(f"{min(unknown)} is not a mesh dimension")
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
        kind: Pydantic model of the content.
        path: The file.
        sha256: Expected hash of the file. None does not compare it.

    Raises:
        CheckpointError: The file is missing, damaged, or of another form. The error names it.
    """
    # An error of LATEST is part of a message with a remedy.
    remedy = "" if kind is Pointer else f"; {RESTORE}"
    try:
        text = read_bytes(path, most=_MAX_BYTES).decode()
    except FileNotFoundError as error:
        problem = IS_NO_FILE if error.strerror == IS_NO_FILE else "is missing"
        raise CheckpointError(f"{path} {problem}{remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}{remedy}"
        ) from error

    if sha256 is not None and sha256_of(text) != sha256:
        raise CheckpointError(
            f"{path} was changed after it was written: its sha256 is"
            f" {sha256_of(text)[:12]}... and not {sha256[:12]}...{remedy}"
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise CheckpointError(
            f"{path} is not a valid {kind.__name__} of Plait: {field}: {first['msg']}{remedy}"
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
            f"{path / MANIFEST_HASH} cannot be read: {getattr(error, 'strerror', None) or error};"
            f" {RESTORE}"
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
            f" format {FORMAT}; use the version of Plait that wrote the checkpoint"
        )
    return manifest
