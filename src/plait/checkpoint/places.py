"""Locations of checkpoints, in a file system or an object store, and durable writes to them.

Stores are those that fsspec supports (`s3://bucket/run`, `gs://`, `memory://` ...). `StorePath` has
the methods of `pathlib.Path` that checkpoints need. Listings are never cached, because other
processes write to the same folders. Errors of a store's library become OSError. Credentials,
regions and endpoints are configured as that library documents.

All calls of the file system go through `FILES`. Tests replace it with a file system that is full,
slow or read-only, that fails, or that ends the process at one of the calls. No other module of
`plait.checkpoint` changes files. A power loss leaves complete checkpoints intact, because calls are
in the order of Note [Order of syncs].

Note [Order of syncs]
    In a file system, every file and its folder are on the disk before a rename publishes them, and
    the rename is on the disk before anything older is deleted. Objects that a store has accepted
    are durable, and they are replaced as a whole or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, Protocol, TypeVar

import fsspec

from plait.errors import CheckpointError, InputError

P = ParamSpec("P")
T = TypeVar("T")
IS_NO_FILE = "is not a file"
_TEMPORARY_SUFFIXES = (".tmp", ".replaced", ".deleted")


def _access_store(
    method: Callable[Concatenate[StorePath, P], T],
) -> Callable[Concatenate[StorePath, P], T]:
    """Decorate a method that accesses a store: nothing is cached, and errors become OSError."""

    @wraps(method)
    def call(self: StorePath, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            self._store.invalidate_cache()
            return method(self, *args, **kwargs)
        except FileNotFoundError:
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            code = getattr(error, "errno", None) or errno.EIO
            raise OSError(code, reason, str(self)) from error

    return call


class StorePath:
    """Path of an object in a store, or of a folder, which is a common prefix of objects' names.

    A folder without objects does not exist. Methods that access the store raise OSError.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key.rstrip("/")

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """Folder that contains the object or folder."""
        return StorePath(self._store, self._key.rpartition("/")[0])

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self._store, f"{self._key}/{name}")

    def __str__(self) -> str:
        return str(self._store.unstrip_protocol(self._key))

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @_access_store
    def exists(self) -> bool:
        """Return True if an object or a folder has this path."""
        return bool(self._store.exists(self._key))

    @_access_store
    def is_dir(self) -> bool:
        """Return True if the path is a folder with objects."""
        return bool(self._store.isdir(self._key))

    @_access_store
    def is_file(self) -> bool:
        """Return True if the path is an object."""
        return bool(self._store.isfile(self._key))

    def iterdir(self) -> Iterator[StorePath]:
        """Return the objects and folders in a folder."""
        return (self / name for name in self.sizes())

    @_access_store
    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of a folder's entries by name; 0 for folders."""
        try:
            listing = self._store.ls(self._key, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for entry in listing:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            # Some stores list the folder itself.
            if name and name != self.name:
                sizes[name] = int(entry.get("size") or 0)
        return sizes

    @_access_store
    def size(self) -> int:
        """Return the size of an object in bytes."""
        return int(self._store.size(self._key))

    @_access_store
    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of an object, or its bytes from `start` to `stop`."""
        return bytes(self._store.cat_file(self._key, start=start or None, end=stop))

    @_access_store
    def open(self) -> IO[bytes]:
        """Open an object for sequential reads."""
        stream: IO[bytes] = self._store.open(self._key, "rb", cache_type="readahead")
        return stream

    @_access_store
    def put(self, data: bytes) -> None:
        """Write a small object atomically: a reader sees its old or its new content."""
        self._store.pipe_file(self._key, data)

    @_access_store
    def write(self, content: Callable[[IO[bytes]], object]) -> None:
        """Write an object of any size. If `content` fails, an incomplete object may remain."""
        with self._store.open(self._key, "wb") as stream:
            content(stream)

    @_access_store
    def delete(self) -> None:
        """Delete an object, or a folder with everything in it, if it exists."""
        if self._store.exists(self._key):
            self._store.rm(self._key, recursive=True)


Place = Path | StorePath
"""Folder or file of a file system or of an object store."""


def entries(folder: Place) -> list[Place]:
    """Return the entries of a folder, sorted by name. Raises OSError."""
    paths: list[Place] = [*folder.iterdir()]
    return sorted(paths, key=lambda path: path.name)


def place_of(place: str | Path | StorePath, field: str = "folder") -> Place:
    """Convert a path or a URL of a store.

    Args:
        place: Path, `file://` URL, or URL of a store that fsspec supports.
        field: Name of the setting, for error messages.

    Raises:
        InputError: The library for the store is not installed, or the URL was converted to a
            `pathlib.Path`, which removes a slash.
    """
    if isinstance(place, StorePath):
        return place
    text = str(place)
    if "://" not in text:
        # pathlib.Path("s3://bucket") is "s3:/bucket", which would silently be a local folder.
        scheme, colon, _ = text.partition(":/")
        if colon and scheme in fsspec.available_protocols():
            raise InputError(
                f"{field} = {text!r}: a URL has two slashes, and pathlib.Path keeps only one; pass"
                " the URL as text"
            )
        return Path(place)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    try:
        store, key = fsspec.url_to_fs(text, use_listings_cache=False)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(
            f"{field} = {text!r}: {error}; install the package for such URLs (s3fs for s3://, gcsfs"
            " for gs://)"
        ) from None
    return StorePath(store, key)


class Files:
    """File system of this machine. Every method may raise OSError."""

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        """Create a new folder.

        Args:
            path: The folder.
            parents: Whether to also make missing parents, and to accept an existing folder.
        """
        path.mkdir(parents=parents, exist_ok=parents)

    def create(self, path: Path) -> IO[bytes]:
        """Create a new file and open it for writing."""
        return open(path, "xb")

    def write(self, stream: IO[bytes], data: bytes | memoryview) -> None:
        """Write all of `data`."""
        stream.write(data)

    def sync(self, stream: IO[bytes]) -> None:
        """Wait until the written data is on disk."""
        stream.flush()
        os.fsync(stream.fileno())

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's directory entries are on disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or folder. A file replaces an existing file `target`."""
        path.rename(target)

    def unlink(self, path: Path) -> None:
        """Delete a file or a link, if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder and everything in it."""
        shutil.rmtree(path)

    def read(self, path: Path) -> bytes:
        """Return the content of a small file."""
        return path.read_bytes()

    def open(self, path: Path) -> IO[bytes]:
        """Open a file for reading."""
        return open(path, "rb")


FILES: Files = Files()
"""File system that this process uses."""


class ByteSink(Protocol):
    """Stream that the content of a file is written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of `data`, or raise OSError."""


def is_temporary(path: Place) -> bool:
    """Return True if the name of a file or folder is one that saves use temporarily."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY_SUFFIXES)


def write_file(path: Place, content: Callable[[ByteSink], object]) -> None:
    """Write a new file and wait until it is on disk.

    Args:
        path: File that does not exist.
        content: Writes the content to the stream that it receives.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    if isinstance(path, StorePath):
        path.write(content)
        return
    with _add_path_to_errors(path), FILES.create(path) as stream:
        content(_FileSink(stream))
        FILES.sync(stream)


class _FileSink:
    """Open file whose writes go through `FILES`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview, /) -> None:
        FILES.write(self._stream, data)


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    # Errors of write and fsync do not name the file.
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Place, text: str) -> None:
    """Write a new text file and wait until it is on disk. Raises OSError."""
    if isinstance(path, StorePath):
        path.put(text.encode())
    else:
        write_file(path, lambda stream: stream.write(text.encode()))


def read_bytes(path: Place, *, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        OSError: The file is missing, larger, or not a regular file. Reading a pipe would never end.
    """
    if isinstance(path, Path) and not path.is_file():
        reason = IS_NO_FILE if path.exists() else "No such file or directory"
        raise FileNotFoundError(errno.ENOENT, reason, str(path))

    size = size_of(path)
    if size > most:
        raise OSError(
            errno.EFBIG,
            f"has {size:,} bytes, but Plait writes at most {most:,} bytes to such a file",
            str(path),
        )
    if isinstance(path, StorePath):
        return path.read_bytes()
    return FILES.read(path)


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Turn OSError of a file system or store into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or place} cannot be read: {error.strerror or error};"
            " check that it exists and can be read"
        ) from error


def open_to_read(path: Place) -> IO[bytes]:
    """Open a file for reading. Raises OSError."""
    return path.open() if isinstance(path, StorePath) else FILES.open(path)


def size_of(path: Place) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def size_of_folder(path: Place) -> int:
    """Return the size of a folder's files in bytes; 0 if the folder is deleted during the call."""
    try:
        if isinstance(path, StorePath):
            return sum(path.sizes().values())
        return sum(file.stat(follow_symlinks=False).st_size for file in path.iterdir())
    except FileNotFoundError:
        return 0


def remove(path: Place) -> None:
    """Delete a file, a link, or a folder with everything in it. Raises OSError."""
    if isinstance(path, StorePath):
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        FILES.remove_folder(path)
    else:
        FILES.unlink(path)


def remove_if_possible(path: Path) -> None:
    """Delete a file or folder that only takes up space. Errors are ignored."""
    with suppress(OSError):
        remove(path)


def sync_folder(path: Path) -> None:
    """Wait until a folder's directory entries are on disk. Raises OSError."""
    with _add_path_to_errors(path):
        FILES.sync_folder(path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder and sync. An existing file `path` is replaced.

    Raises:
        OSError: A rename or sync failed.
    """
    # See Note [Order of syncs].
    if temporary.is_dir():
        sync_folder(temporary)
    FILES.rename(temporary, path)
    sync_folder(path.parent)


def replace_text(path: Place, text: str) -> None:
    """Replace the content of a small file atomically.

    A reader sees the old or the new text, even after a crash.

    Raises:
        OSError: The file cannot be written.
    """
    if isinstance(path, StorePath):
        path.put(text.encode())
        return

    # Two threads may replace it at the same time, so each needs a name of its own.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_text(temporary, text)
        publish(temporary, path)
    except OSError:
        remove_if_possible(temporary)
        raise
