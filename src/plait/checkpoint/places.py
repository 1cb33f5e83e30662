"""Locations of checkpoints: folders of a file system or of an object store.

Stores are those that fsspec supports (`s3://bucket/run`, `gs://`, `memory://` ...). `StorePath` has
the methods of `pathlib.Path` that checkpoints need. Listings are never cached, because other
processes write to the same folders. Errors of a store's library become OSError. Credentials,
regions and endpoints are configured as that library documents.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import fsspec

from plait.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


def _as_os_error(
    method: Callable[Concatenate[StorePath, P], T],
) -> Callable[Concatenate[StorePath, P], T]:
    @wraps(method)
    def call(self: StorePath, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
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

    @_as_os_error
    def exists(self) -> bool:
        """Return True if an object or a folder has this path."""
        self._store.invalidate_cache()
        return bool(self._store.exists(self._key))

    @_as_os_error
    def is_dir(self) -> bool:
        """Return True if the path is a folder with objects."""
        self._store.invalidate_cache()
        return bool(self._store.isdir(self._key))

    @_as_os_error
    def is_file(self) -> bool:
        """Return True if the path is an object."""
        self._store.invalidate_cache()
        return bool(self._store.isfile(self._key))

    def is_symlink(self) -> bool:
        """Return False, because stores have no links."""
        return False

    def iterdir(self) -> Iterator[StorePath]:
        """Return the objects and folders in a folder."""
        return (self / name for name in self.sizes())

    @_as_os_error
    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of a folder's entries by name; 0 for folders."""
        self._store.invalidate_cache()
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

    @_as_os_error
    def size(self) -> int:
        """Return the size of an object in bytes."""
        self._store.invalidate_cache()
        return int(self._store.size(self._key))

    @_as_os_error
    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the content of an object, or its bytes from `start` to `stop`."""
        return bytes(self._store.cat_file(self._key, start=start or None, end=stop))

    @_as_os_error
    def open(self) -> IO[bytes]:
        """Open an object for sequential reads."""
        stream: IO[bytes] = self._store.open(self._key, "rb", cache_type="readahead")
        return stream

    @_as_os_error
    def put(self, data: bytes) -> None:
        """Write a small object atomically: a reader sees its old or its new content."""
        self._store.pipe_file(self._key, data)

    @_as_os_error
    def write(self, content: Callable[[IO[bytes]], None]) -> None:
        """Write an object of any size. If `content` fails, an incomplete object may remain."""
        with self._store.open(self._key, "wb") as stream:
            content(stream)

    @_as_os_error
    def delete(self) -> None:
        """Delete an object, or a folder with everything in it, if it exists."""
        self._store.invalidate_cache()
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
            f"{field} = {text!r}: {error}; install what reads such URLs (s3fs for s3://, gcsfs for"
            " gs://)"
        ) from None
    return StorePath(store, key)
