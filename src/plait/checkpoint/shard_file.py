"""One rank's tensors in a safetensors file, hashed while they are written, and the list of what is
in it.

The format is written here, so that the bytes are hashed and written in one pass; files are read by
the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from pydantic import NonNegativeInt, model_validator
from safetensors import SafetensorError, safe_open

from plait.checkpoint.content import Observer, pieces
from plait.checkpoint.durable import Writing, open_to_read, size_of, write_file
from plait.checkpoint.places import Place, StorePath
from plait.checkpoint.windows import TensorRecord, Window, dtype_of
from plait.errors import CheckpointError
from plait.policy import Policy

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
_CHUNK = 16 << 20


def is_kept(dtype: object) -> bool:
    """Whether tensors of the dtype can be written."""
    return dtype in _DTYPES


class FileEntry(Policy):
    """A tensor in a file."""

    offset: NonNegativeInt
    """Bytes from the beginning of the file."""
    size: NonNegativeInt
    """Bytes."""
    sha256: str


class FileManifest(Policy):
    """What a rank wrote."""

    file: str
    size: NonNegativeInt
    """Bytes."""
    header_sha256: str
    """Of the file's bytes before the first tensor."""
    entries: dict[str, FileEntry]

    @model_validator(mode="after")
    def _has_room_for_each(self) -> Self:
        end = 0
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].offset, item[1].size)
        ):
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
    """Write plain tensors, durably. `observers` get by name the pieces that are written. Raises
    CheckpointError for a dtype that safetensors does not know, and OSError.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__} of {tensor.dtype}, which a checkpoint does"
                " not keep"
            )
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    entries: dict[str, FileEntry] = {}

    def content(stream: Writing) -> None:
        stream.write(head)
        at = len(head)
        for name, tensor in tensors.items():
            digest = hashlib.sha256()
            size = 0
            observe = (observers or {}).get(name)
            for piece in pieces(name, tensor):
                observed = beside.submit(observe, piece) if observe is not None else None
                digest.update(piece.raw)
                stream.write(piece.raw)
                size += len(piece.raw)
                if observed is not None:
                    observed.result()
            entries[name] = FileEntry(offset=at, size=size, sha256=digest.hexdigest())
            at += size

    with ThreadPoolExecutor(
        1, thread_name_prefix="plait-content"
    ) as beside:  # on another core than the hash of bytes and the disk
        write_file(path, content)
    return FileManifest(
        file=path.name,
        size=len(head) + offset,
        header_sha256=hashlib.sha256(head).hexdigest(),
        entries=entries,
    )


class ShardReader:
    """Reads tensors of one file: the parts that are asked for of a local one, of one in a store the
    bytes of the tensor. Raises CheckpointError, also where the file and its list do not agree; it
    does not compare hashes.
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
        with self._naming():
            check_size(self._path, self._manifest)
            if self._store is None:
                self._file = self._open.enter_context(safe_open(self._path, framework="pt"))
                with open_to_read(self._path) as stream:
                    length = int.from_bytes(stream.read(8), "little")
                    self._check_places(json.loads(stream.read(length)), 8 + length)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(
        self,
        name: str,
        record: TensorRecord | None = None,
        held: Window | None = None,
        there: tuple[slice, ...] = (),
    ) -> torch.Tensor:
        """The part `there` of a tensor; all of it for (). The file holds the part `held` of a
        tensor like `record`; without it, whatever it says.
        """
        with self._naming():
            if record is not None and held is not None:
                entry = check_entry(self._path, self._manifest, name, record, held)
                if self._store is not None:
                    return _tensor(
                        self._store, entry, dtype_of(record), [length for _, length in held]
                    )[there]
                view = self._file.get_slice(name)
                kind = view.get_dtype()
                shape = tuple(view.get_shape())
                if (kind, shape) != (
                    _DTYPES[dtype_of(record)],
                    tuple(length for _, length in held),
                ):
                    raise CheckpointError(
                        f"{self._path}: {name} is {kind} {list(shape)} in the file, and its list"
                        " says otherwise"
                    )
                return view[there] if there else self._file.get_tensor(name)
            if self._store is None:
                return self._file.get_tensor(name)
            if self._header is None:
                self._header = self._header_of(self._store)
            said = self._header[name]
            dtype = next(dtype for dtype, word in _DTYPES.items() if word == said["dtype"])
            return _tensor(self._store, self._manifest.entries[name], dtype, said["shape"])

    def _header_of(self, store: StorePath) -> dict[str, Any]:
        """Return the header of a file in a store, if it agrees with the list."""
        length = int.from_bytes(store.read_bytes(0, 8), "little")
        if length > self._manifest.size:
            raise CheckpointError(
                f"{self._path}: its header has {length:,} bytes, and the file"
                f" {self._manifest.size:,}"
            )
        header: dict[str, Any] = json.loads(store.read_bytes(8, 8 + length))
        self._check_places(header, 8 + length)
        return header

    def _check_places(self, header: dict[str, Any], begin: int) -> None:
        """Raise CheckpointError unless the header and the list place every tensor equally.

        Hashes cover the ranges of the list, but tensors are read from the ranges of the header.

        Args:
            header: The file's header of safetensors.
            begin: Offset of the first tensor in the file, in bytes.
        """
        entries = self._manifest.entries
        places = {
            name: tuple(said["data_offsets"])
            for name, said in header.items()
            if name != "__metadata__"
        }
        for name in sorted(places.keys() | entries.keys()):
            entry = entries.get(name)
            listed = (
                None if entry is None else (entry.offset - begin, entry.offset + entry.size - begin)
            )
            if places.get(name) != listed:
                raise CheckpointError(
                    f"{self._path}: its header and its list do not agree where {name} lies in the"
                    " file"
                )

    @contextmanager
    def _naming(self) -> Iterator[None]:
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
                f"{self._path} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error


def _tensor(
    place: StorePath, entry: FileEntry, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    raw = (
        bytearray(place.read_bytes(entry.offset, entry.offset + entry.size))
        if entry.size
        else bytearray()
    )
    if len(raw) != entry.size:
        raise CheckpointError(f"{place} ends within a tensor; it was cut while it was read")
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(
        shape
    )


def check_size(path: Place, manifest: FileManifest) -> None:
    """Raise CheckpointError for a file that is missing or of another length than what was
    written.
    """
    try:
        size = size_of(path) if isinstance(path, StorePath) or path.is_file() else None
    except FileNotFoundError:
        size = None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if size is None:
        raise CheckpointError(
            f"{path} is missing, or no file; {manifest.size:,} bytes were written"
        )
    if size != manifest.size:
        raise CheckpointError(
            f"{path} has {size:,} bytes, and {manifest.size:,} were written; it was cut, or it is"
            " another file"
        )


def check_entry(
    path: Place, manifest: FileManifest, name: str, record: TensorRecord, held: Window
) -> FileEntry:
    """Where a file has the part `held` of a tensor. Raises CheckpointError where its list says that
    it cannot be that.
    """
    entry = manifest.entries.get(name)
    dtype = dtype_of(record)
    if entry is None:
        raise CheckpointError(
            f"{path}: its list lacks {name}, a part of which the layout says is there"
        )
    size = math.prod(length for _, length in held) * dtype.itemsize
    if dtype not in _DTYPES or entry.size != size:
        raise CheckpointError(
            f"{path}: {name} has {entry.size:,} bytes there, and its shape and dtype"
            f" ({record.dtype}) take {size:,}"
        )
    return entry


def verify_shards(
    path: Place, manifest: FileManifest, *, entries: Callable[[str], bool] = lambda _: True
) -> None:
    """Raise CheckpointError, naming the file and the tensor, where the file is not what was
    written. `entries` chooses by name.
    """
    check_size(path, manifest)
    try:
        with open_to_read(path) as stream:
            first = min(
                (entry.offset for entry in manifest.entries.values()), default=manifest.size
            )
            if (
                _digest(stream, FileEntry(offset=0, size=first, sha256=""))
                != manifest.header_sha256
            ):
                raise CheckpointError(f"{path}: its header is not what was written")
            for name, entry in manifest.entries.items():
                if entries(name) and _digest(stream, entry) != entry.sha256:
                    raise CheckpointError(f"{path}: the bytes of {name} are not what was written")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _digest(stream: Any, entry: FileEntry) -> str:
    digest = hashlib.sha256()
    left = entry.size
    stream.seek(entry.offset)
    while left and (part := stream.read(min(left, _CHUNK))):
        digest.update(part)
        left -= len(part)
    return digest.hexdigest()
