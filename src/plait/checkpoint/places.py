"""Where checkpoints are: a folder of a file system, or of an object store that fsspec knows
(`s3://bucket/run`, `gs://`, `memory://` ...).

A `StorePath` answers as much as a `pathlib.Path` as reading a checkpoint asks. What a store lists
is never taken from a cache. Whatever the store's own library raises is an OSError here. Keys,
regions and endpoints are the library's: it reads them from where it always does.
"""

from __future__ import annotations

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
            raise OSError(getattr(error, "errno", None) or 5, reason, str(self)) from error

    return call


class StorePath:
    """An object, or what the names of several begin with, which is called a folder here. A folder
    without objects does not exist.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key.rstrip("/")

    @property
    def name(self) -> str:
        """After the last `/`."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The folder that it is in."""
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
        """As an object or as a folder."""
        self._store.invalidate_cache()
        return bool(self._store.exists(self._key))

    @_as_os_error
    def is_dir(self) -> bool:
        """Whether objects are in it."""
        self._store.invalidate_cache()
        return bool(self._store.isdir(self._key))

    @_as_os_error
    def is_file(self) -> bool:
        """Whether it is an object."""
        self._store.invalidate_cache()
        return bool(self._store.isfile(self._key))

    def is_symlink(self) -> bool:
        """There are none."""
        return False

    def iterdir(self) -> Iterator[StorePath]:
        """What is in a folder."""
        return (self / name for name in self.sizes())

    @_as_os_error
    def sizes(self) -> dict[str, int]:
        """Name to bytes, of a folder as 0."""
        self._store.invalidate_cache()
        try:
            listed = self._store.ls(self._key, detail=True)
        except FileNotFoundError:
            return {}
        found = {
            entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0)
            for entry in listed
        }
        return {name: size for name, size in found.items() if name and name != self.name}

    @_as_os_error
    def size(self) -> int:
        """Bytes of an object."""
        self._store.invalidate_cache()
        return int(self._store.size(self._key))

    @_as_os_error
    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """An object, or a part of it."""
        return bytes(self._store.cat_file(self._key, start=start or None, end=stop))

    @_as_os_error
    def open(self) -> IO[bytes]:
        """An object, to be read from its beginning to its end."""
        found: IO[bytes] = self._store.open(self._key, "rb", cache_type="readahead")
        return found

    @_as_os_error
    def put(self, data: bytes) -> None:
        """Write a small object in one piece: a reader finds what was there before, or this."""
        self._store.pipe_file(self._key, data)

    @_as_os_error
    def write(self, content: Callable[[IO[bytes]], None]) -> None:
        """Write an object of any size. One that was not written to its end may be left."""
        with self._store.open(self._key, "wb") as stream:
            content(stream)

    @_as_os_error
    def delete(self) -> None:
        """An object, or a folder with all that is in it, or what is not there."""
        self._store.invalidate_cache()
        if self._store.exists(self._key):
            self._store.rm(self._key, recursive=True)


Place = Path | StorePath


def entries(folder: Place) -> list[Place]:
    """What is in a folder, by name. Raises OSError."""
    found: list[Place] = [*folder.iterdir()]
    return sorted(found, key=lambda path: path.name)


def place_of(place: str | Path | StorePath, field: str = "folder") -> Place:
    """A path, or a URL of a store. Raises InputError, naming `field`, for one whose library is not
    installed, and for a URL that was made a path, which loses a `/`.
    """
    if isinstance(place, StorePath):
        return place
    if "://" not in (text := str(place)):
        scheme, colon, _ = text.partition(":/")
        if colon and scheme in fsspec.available_protocols():
            raise InputError(
                f"{field} = {text!r}: a URL has two slashes, and pathlib.Path leaves one; pass the"
                " URL as text"
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
