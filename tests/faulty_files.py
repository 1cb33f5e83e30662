"""A file layer of checkpoints (`checkpoint/places.py`) in which something happens at a call: it fails, takes long, or ends the process."""

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
    """Calls `happens` with the number of each call, counted from 0, before the call; of a write also when half of it is done."""

    def __init__(self, happens=lambda _: None, *, reading=False):
        """`reading`: reads are counted, and nothing else is; otherwise only what writes."""
        self.calls: list[str] = []
        """`rename .one.tmp`."""
        self._happens, self._reading = happens, reading

    def _call(self, kind, name, path=None):
        if (kind in WRITING) == self._reading:
            return
        self.calls.append(f"{kind} {name}")
        try:
            self._happens(len(self.calls) - 1)
        except OSError as error:
            if path is not None:  # as the system does for calls that are given a path
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
    """Call `number` fails with an errno, and those after it unless `once`."""

    def happens(call):
        if call == number or (call > number and not once):
            raise OSError(code, f"planted error {code}")

    return happens


def slow(seconds):
    """Every call takes so long more."""
    return lambda _: time.sleep(seconds)


@contextmanager
def planted(layer):
    """In place of this process's."""
    before, places.FILES = places.FILES, layer
    try:
        yield
    finally:
        places.FILES = before
