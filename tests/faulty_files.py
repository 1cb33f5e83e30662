"""File layer of checkpoints (`checkpoint/places.py`) whose calls fail, block or end the process."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

from plait.checkpoint import places
from plait.checkpoint.places import Files

WRITING = (
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "unlink",
    "remove_folder",
)


class Planted(Files):
    """Calls `happens` with the number of each call, counted from 0, before the call.

    A write is counted a second time when half of it is done.

    Attributes:
        calls: Calls so far, such as "rename .one.tmp".
    """

    def __init__(self, happens=lambda _: None, *, reading=False):
        """Count only calls that read if `reading`, and only calls that write otherwise."""
        self.calls: list[str] = []
        self._happens = happens
        self._reading = reading

    def _call(self, kind, name, path=None):
        if (kind in WRITING) == self._reading:
            return
        self.calls.append(f"{kind} {name}")
        try:
            self._happens(len(self.calls) - 1)
        except OSError as error:
            if path is not None:  # as the system reports calls that take a path
                error.filename = str(path)
            raise

    def make_folder(self, path, *, parents=False):
        self._call("make_folder", path.name, path)
        super().make_folder(path, parents=parents)

    def create(self, path):
        self._call("create", path.name, path)
        return super().create(path)

    def write(self, stream, data):
        name = Path(stream.name).name
        self._call("write", name)
        super().write(stream, data[: len(data) // 2])
        stream.flush()
        self._call("write", f"{name}, half")
        super().write(stream, data[len(data) // 2 :])

    def sync(self, stream):
        self._call("sync", Path(stream.name).name)
        super().sync(stream)

    def sync_folder(self, path):
        self._call("sync_folder", path.name)
        super().sync_folder(path)

    def rename(self, path, target):
        self._call("rename", path.name, path)
        super().rename(path, target)

    def unlink(self, path):
        self._call("unlink", path.name, path)
        super().unlink(path)

    def remove_folder(self, path):
        self._call("remove_folder", path.name, path)
        first = min(path.iterdir(), default=None)
        if first is not None:
            first.unlink()
            self._call("remove_folder", f"{path.name}, partly", path)
        super().remove_folder(path)

    def read(self, path):
        self._call("read", path.name, path)
        return super().read(path)

    def open(self, path):
        self._call("open", path.name, path)
        return super().open(path)


def failing(number, code, *, once):
    """Return a function that fails call `number`, and later calls unless `once`, with an errno."""

    def happens(call):
        if call == number or (call > number and not once):
            raise OSError(code, f"planted error {code}")

    return happens


def slow(seconds):
    """Return a function that delays every call."""
    return lambda _: time.sleep(seconds)


@contextmanager
def planted(layer):
    """Replace this process's file layer inside."""
    before = places.FILES
    places.FILES = layer
    try:
        yield
    finally:
        places.FILES = before
