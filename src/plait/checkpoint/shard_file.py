"""One rank's tensors in a safetensors file, hashed while they are written, and the list of what is in it.

The format is written here, so that the bytes are hashed and written in one pass; files are read by the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.durable import Writing, write_file
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


class FileEntry(Policy):
    """A tensor in a file."""

    offset: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes."""
    sha256: str


class FileManifest(Policy):
    """What a rank wrote."""

    file: str
    size: int
    """Bytes."""
    header_sha256: str
    """Of the file's bytes before the first tensor."""
    entries: dict[str, FileEntry]


def write_shards(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileManifest:
    """Write plain tensors, durably. Raises CheckpointError for a dtype that safetensors does not know, and OSError."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(f"{name} is a {type(tensor).__name__} of {tensor.dtype}, which a checkpoint does not keep")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    entries: dict[str, FileEntry] = {}

    def content(stream: Writing) -> None:
        stream.write(head)
        at = len(head)
        for name, tensor in tensors.items():
            digest, size = hashlib.sha256(), 0
            for part in _bytes_of(tensor):
                digest.update(part)
                stream.write(part)
                size += len(part)
            entries[name] = FileEntry(offset=at, size=size, sha256=digest.hexdigest())
            at += size

    write_file(path, content)
    return FileManifest(file=path.name, size=len(head) + offset, header_sha256=hashlib.sha256(head).hexdigest(), entries=entries)


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """In chunks, from wherever the tensor is."""
    flat = tensor.detach().contiguous().reshape(-1)
    count = max(1, _CHUNK // max(1, tensor.element_size()))
    for part in flat.split(count) if flat.numel() else ():
        yield memoryview(part.cpu().view(torch.uint8).numpy())


def verify_shards(path: Path, manifest: FileManifest, *, entries: Callable[[str], bool] = lambda _: True) -> None:
    """Raise CheckpointError, naming the file and the tensor, where the file is not what was written. `entries` chooses by name."""
    try:
        size = path.stat().st_size
        if size != manifest.size:
            raise CheckpointError(f"{path} has {size:,} bytes, and {manifest.size:,} were written; it was cut, or it is another file")
        with open(path, "rb") as stream:
            first = min((entry.offset for entry in manifest.entries.values()), default=manifest.size)
            if hashlib.sha256(stream.read(first)).hexdigest() != manifest.header_sha256:
                raise CheckpointError(f"{path}: its header is not what was written")
            for name, entry in manifest.entries.items():
                if entries(name) and _digest(stream, entry) != entry.sha256:
                    raise CheckpointError(f"{path}: the bytes of {name} are not what was written")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _digest(stream: Any, entry: FileEntry) -> str:
    digest, left = hashlib.sha256(), entry.size
    stream.seek(entry.offset)
    while left and (part := stream.read(min(left, _CHUNK))):
        digest.update(part)
        left -= len(part)
    return digest.hexdigest()
