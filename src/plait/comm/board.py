"""What a rank publishes of itself for whoever looks for a hang: its step and phase, what it waits
for and since when, and a sign of life.

A board is a small file that the rank maps: writing is a store to memory, so it is cheap and needs
no lock, and it can be read when the rank is stopped, holds the interpreter's lock or has ended.
Times are those of the monotonic clock, which all processes of a machine share. Knows nothing of
torch: the launcher reads boards too.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import resource
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.files import anonymous_file

BYTES = 16 * 1024
_MAGIC = b"plait-1\0"
_HEAD = struct.Struct("<8sqqd")
_PROGRESS = struct.Struct("<qqd")
_WAIT = struct.Struct("<dH")
_SIGN = struct.Struct("<dH")
_PROGRESS_AT = 64
_WAIT_AT = 128
_SIGN_AT = 1024
_WAIT_ROOM = _SIGN_AT - _WAIT_AT - _WAIT.size
_SIGN_ROOM = BYTES - _SIGN_AT - _SIGN.size

PHASES = ("start", "between steps", "forward", "backward", "update", "evaluation", "checkpoint")
"""What a rank does, in its messages."""
START, BETWEEN, FORWARD, BACKWARD, UPDATE, EVALUATION, CHECKPOINT = range(len(PHASES))


@dataclass(frozen=True)
class Wait:
    """One collective that a rank has begun and that has not ended."""

    operation: str
    """`all-reduce`."""
    axis: str
    """The axis of the mesh, or what else names the group."""
    since: float
    sequence: int = 0
    """Its number among those of the group; 0 where none is known."""
    shape: str = ""
    missing: tuple[int, ...] | None = None
    """Ranks that have not taken part, where this rank can see it."""
    members: tuple[int, ...] = ()
    """The ranks of the group."""
    seen: float = math.inf
    """When it was last seen to go on; infinite where the rank itself takes it down when it ends."""

    def same_as(self, other: Wait) -> bool:
        """Whether `other`, of another rank, is the same collective."""
        return (self.operation, self.axis, self.members, self.sequence) == (
            other.operation,
            other.axis,
            other.members,
            other.sequence,
        )


@dataclass(frozen=True)
class Reading:
    """A board at one moment."""

    rank: int
    process: int
    timeout_seconds: float
    """What a wait may take."""
    step: int
    phase: int
    since: float
    """When the phase began."""
    sign: float
    """When its interpreter last ran the thread that watches; before that when the board was made.
    """
    waits: tuple[Wait, ...] = ()
    line: str = ""
    """`train.py:33`: where the main thread was then, in the user's code."""


def described(shape: Sequence[int], dtype: object) -> str:
    """`[1000] float32`."""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


class Board:
    """This process's own. Without a path it is an anonymous file, of which nothing is left when the
    process ends.
    """

    def __init__(self, *, rank: int, timeout_seconds: float, path: Path | None = None) -> None:
        if path is None:
            self._descriptor = anonymous_file("plait-board")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.path = path
        try:
            # a file with holes on a full disk ends whoever writes to it, by SIGBUS
            os.posix_fallocate(self._descriptor, 0, BYTES)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_room(error, path) from None
        self._memory = mmap.mmap(self._descriptor, BYTES)
        self.step = 0
        self.timeout_seconds = timeout_seconds
        self.progress(0, START)
        self.sign()  # whose thread never runs holds the interpreter's lock from now on
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, timeout_seconds)

    def progress(self, step: int, phase: int) -> None:
        """A phase of a step begins."""
        self.step = step
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, step, phase, time.monotonic())

    def phase(self, phase: int) -> None:
        """A phase of the same step begins."""
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, self.step, phase, time.monotonic())

    @property
    def now(self) -> tuple[int, int, float]:
        """(step, phase, when it began)."""
        return _PROGRESS.unpack_from(self._memory, _PROGRESS_AT)

    def wait(self, wait: Wait) -> None:
        """The main thread waits from now on; call before."""
        text = _text(wait, _WAIT_ROOM)
        self._memory[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + len(text)] = text
        _WAIT.pack_into(self._memory, _WAIT_AT, wait.since, len(text))

    def waited(self) -> None:
        """It waits no more."""
        _WAIT.pack_into(self._memory, _WAIT_AT, 0.0, 0)

    @property
    def waiting_since(self) -> float:
        """Of `wait`; 0 where the main thread waits for nothing that was published."""
        return float(_WAIT.unpack_from(self._memory, _WAIT_AT)[0])

    def sign(self, waits: Sequence[Wait] = (), *, line: str = "", seen: float = 0.0) -> None:
        """A sign of life, with what the last look from outside of the main thread has found, at
        `seen`: see `watch`.
        """
        for count in range(len(waits), -1, -1):
            text = json.dumps(
                {"line": line, "seen": seen, "waits": [_plain(wait) for wait in waits[:count]]}
            ).encode()
            if len(text) <= _SIGN_ROOM:
                break
        self._memory[_SIGN_AT + _SIGN.size : _SIGN_AT + _SIGN.size + len(text)] = text
        _SIGN.pack_into(self._memory, _SIGN_AT, time.monotonic(), len(text))

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()
        os.close(self._descriptor)


def _no_room(error: OSError, path: Path | None) -> InputError:
    what = "in which each of several processes says what it waits for"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        rule = (
            f"processes may write files of {limit:,} bytes at most, and need one of {BYTES:,},"
            f" {what}"
        )
        return InputError(f"ulimit -f: {rule}; raise the limit: ulimit -f unlimited")
    where = "memory" if path is None else str(path.parent)
    remedy = "make room, or name another folder for temporary files with TMPDIR"
    return InputError(f"{where}: no room for {BYTES:,} bytes ({error.strerror}), {what}; {remedy}")


def read(path: Path) -> Reading | None:
    """A board as it is now; None where there is none, or it is being written just now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = os.pread(descriptor, BYTES, 0)
        for _ in range(3):
            after = os.pread(descriptor, BYTES, 0)
            if after == before:
                return _reading(after)
            before = after
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return None


def _reading(data: bytes) -> Reading | None:
    if len(data) != BYTES or not data.startswith(_MAGIC):
        return None
    _, process, rank, timeout = _HEAD.unpack_from(data, 0)
    step, phase, since = _PROGRESS.unpack_from(data, _PROGRESS_AT)
    waiting_since, length = _WAIT.unpack_from(data, _WAIT_AT)
    sign, sign_length = _SIGN.unpack_from(data, _SIGN_AT)
    seen = json.loads(data[_SIGN_AT + _SIGN.size :][:sign_length]) if sign else {}
    waits = [_wait(one, seen=seen["seen"]) for one in seen.get("waits", ())]
    if waiting_since:
        waits.insert(0, _wait(json.loads(data[_WAIT_AT + _WAIT.size :][:length]), seen=math.inf))
    return Reading(
        rank, process, timeout, step, phase, since, sign, tuple(waits), seen.get("line", "")
    )


def _plain(wait: Wait) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(wait).items()
        if value not in ("", 0, ()) and name != "seen"
    }


def _text(wait: Wait, room: int) -> bytes:
    text = json.dumps(_plain(wait)).encode()
    if len(text) > room:  # of a very large group
        text = json.dumps(
            _plain(
                Wait(wait.operation, wait.axis[:100], wait.since, wait.sequence, wait.shape[:100])
            )
        ).encode()
    return text


def _wait(plain: dict[str, Any], *, seen: float) -> Wait:
    missing = plain.get("missing")
    return Wait(
        operation=plain["operation"],
        axis=plain.get("axis", ""),
        since=plain["since"],
        sequence=plain.get("sequence", 0),
        shape=plain.get("shape", ""),
        missing=None if missing is None else tuple(missing),
        members=tuple(plain.get("members", ())),
        seen=seen,
    )
