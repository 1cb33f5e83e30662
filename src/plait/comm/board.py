"""Boards: small files in which ranks publish their progress, for the detection of hangs.

A board has the step and the phase of a rank, the collectives that it waits for, and a sign of life.
The rank maps the file into memory. A write is a store to memory, so it is cheap and needs no lock.
Other processes can read the board while the rank is stopped, holds the interpreter's lock or has
ended. Times are those of the monotonic clock, which all processes of a machine share.

The module does not import torch, because the launcher reads boards too.
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
from plait.units import dtype_name

BYTES = 16 * 1024
"""Size of a board."""
_MAGIC = b"plait-1\0"
# Magic, process, rank, timeout.
_HEAD = struct.Struct("<8sqqd")
# Step, phase, time at which the phase began.
_PROGRESS = struct.Struct("<qqd")
# Time at which the wait began (0 if there is none), length of the JSON text behind it.
_WAIT = struct.Struct("<dH")
# Time of the last sign of life, length of the JSON text behind it.
_SIGN = struct.Struct("<dH")
_PROGRESS_OFFSET = 64
_WAIT_OFFSET = 128
_SIGN_OFFSET = 1024
_WAIT_TEXT_OFFSET = _WAIT_OFFSET + _WAIT.size
_SIGN_TEXT_OFFSET = _SIGN_OFFSET + _SIGN.size
_WAIT_TEXT_BYTES = _SIGN_OFFSET - _WAIT_TEXT_OFFSET
_SIGN_TEXT_BYTES = BYTES - _SIGN_TEXT_OFFSET

PHASES = ("start", "between steps", "forward", "backward", "update", "evaluation", "checkpoint")
"""Phases of a rank, as messages name them."""
START, BETWEEN, FORWARD, BACKWARD, UPDATE, EVALUATION, CHECKPOINT = range(len(PHASES))


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has begun and that has not ended.

    Attributes:
        operation: For example `all-reduce`.
        axis: Mesh dimension, or another name of the group.
        since: Time at which the rank began it.
        sequence: Number of the collective in its group, or 0 if it is not known.
        shape: Shapes and dtypes of the tensors.
        missing: Ranks that have not taken part, if this rank can see that.
        members: Ranks of the group.
        seen: Time at which it was last observed. Infinite if the rank itself removes the entry at
            the end of the wait.
    """

    operation: str
    axis: str
    since: float
    sequence: int = 0
    shape: str = ""
    missing: tuple[int, ...] | None = None
    members: tuple[int, ...] = ()
    seen: float = math.inf

    def same_as(self, other: Wait) -> bool:
        """Return whether the wait of another rank is for the same collective."""
        return (self.operation, self.axis, self.members, self.sequence) == (
            other.operation,
            other.axis,
            other.members,
            other.sequence,
        )


@dataclass(frozen=True)
class BoardContent:
    """Content of a board at one moment.

    Attributes:
        rank: Global rank.
        process: Number of the process.
        timeout_seconds: Longest time that a wait may take.
        step: Step of the training.
        phase: Index in `PHASES`.
        since: Time at which the phase began.
        sign: Time at which the interpreter last ran the watching thread, or at which the board was
            created.
        waits: Unfinished collectives. The one of the main thread is first.
        line: Line of user code that the main thread was at, for example `train.py:33`.
    """

    rank: int
    process: int
    timeout_seconds: float
    step: int
    phase: int
    since: float
    sign: float
    waits: tuple[Wait, ...] = ()
    line: str = ""


def describe_tensor(shape: Sequence[int], dtype: object) -> str:
    """Return a shape and a dtype as text, for example `[1000] float32`."""
    return f"{list(shape)} {dtype_name(dtype)}"


class Board:
    """Board of this process.

    Args:
        rank: Global rank.
        timeout_seconds: Longest time that a wait may take.
        path: File of the board. Without one the file is anonymous, and disappears with the process.

    Attributes:
        path: Path under which other processes can open the board.
        step: Step of the training.
        timeout_seconds: Longest time that a wait may take.

    Raises:
        InputError: There is no room for the file.
    """

    def __init__(self, *, rank: int, timeout_seconds: float, path: Path | None = None) -> None:
        if path is None:
            self._descriptor = anonymous_file("plait-board")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.path = path
        try:
            # A write into a hole of a mapped file on a full disk would end the process by SIGBUS.
            os.posix_fallocate(self._descriptor, 0, BYTES)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_room(error, path) from None

        self._memory = mmap.mmap(self._descriptor, BYTES)
        self.step = 0
        self.timeout_seconds = timeout_seconds
        self.progress(0, START)
        # If the watching thread never runs, the silence counts from now on.
        self.sign()
        # Readers ignore a board without this head, so it is written last.
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, timeout_seconds)

    def progress(self, step: int, phase: int) -> None:
        """Record that a phase of a step begins."""
        self.step = step
        _PROGRESS.pack_into(self._memory, _PROGRESS_OFFSET, step, phase, time.monotonic())

    def phase(self, phase: int) -> None:
        """Record that another phase of the same step begins."""
        _PROGRESS.pack_into(self._memory, _PROGRESS_OFFSET, self.step, phase, time.monotonic())

    @property
    def now(self) -> tuple[int, int, float]:
        """Step, phase, and the time at which the phase began."""
        return _PROGRESS.unpack_from(self._memory, _PROGRESS_OFFSET)

    def wait(self, wait: Wait) -> None:
        """Record that the main thread starts to wait. Call this before the wait."""
        text = _wait_text(wait)
        self._memory[_WAIT_TEXT_OFFSET : _WAIT_TEXT_OFFSET + len(text)] = text
        _WAIT.pack_into(self._memory, _WAIT_OFFSET, wait.since, len(text))

    def waited(self) -> None:
        """Record that the main thread does not wait any more."""
        _WAIT.pack_into(self._memory, _WAIT_OFFSET, 0.0, 0)

    @property
    def waiting_since(self) -> float:
        """Time at which the main thread's recorded wait began, or 0 if there is none."""
        return float(_WAIT.unpack_from(self._memory, _WAIT_OFFSET)[0])

    def sign(self, waits: Sequence[Wait] = (), *, line: str = "", seen: float = 0.0) -> None:
        """Record a sign of life, with the observations of the watching thread.

        Args:
            waits: Unfinished collectives that torch recorded. The last ones are left out if there
                is no room for all.
            line: Line of user code that the main thread is at.
            seen: Time of the observation.
        """
        for count in range(len(waits), -1, -1):
            plain_waits = [_plain(wait) for wait in waits[:count]]
            text = json.dumps({"line": line, "seen": seen, "waits": plain_waits}).encode()
            if len(text) <= _SIGN_TEXT_BYTES:
                break
        self._memory[_SIGN_TEXT_OFFSET : _SIGN_TEXT_OFFSET + len(text)] = text
        _SIGN.pack_into(self._memory, _SIGN_OFFSET, time.monotonic(), len(text))

    def close(self) -> None:
        """Unmap the board and close its file."""
        self._memory.close()
        os.close(self._descriptor)


def _no_room(error: OSError, path: Path | None) -> InputError:
    purpose = "in which a process publishes what it waits for"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        rule = (
            f"processes may write files of {limit:,} bytes at most, and need one of {BYTES:,},"
            f" {purpose}"
        )
        return InputError(f"ulimit -f: {rule}; raise the limit: ulimit -f unlimited")
    folder = "memory" if path is None else str(path.parent)
    remedy = "make room, or name another folder for temporary files with TMPDIR"
    return InputError(
        f"{folder}: no room for {BYTES:,} bytes ({error.strerror}), {purpose}; {remedy}"
    )


def read_board(path: Path) -> BoardContent | None:
    """Return the content of a board, or None if there is none or it is being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # There is no lock. Two equal reads in sequence show that the owner did not write meanwhile.
        data = os.pread(descriptor, BYTES, 0)
        for _ in range(3):
            next_data = os.pread(descriptor, BYTES, 0)
            if next_data == data:
                return _reading(data)
            data = next_data
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return None


def _reading(data: bytes) -> BoardContent | None:
    if len(data) != BYTES or not data.startswith(_MAGIC):
        return None
    _, process, rank, timeout = _HEAD.unpack_from(data, 0)
    step, phase, since = _PROGRESS.unpack_from(data, _PROGRESS_OFFSET)
    waiting_since, length = _WAIT.unpack_from(data, _WAIT_OFFSET)
    sign, sign_length = _SIGN.unpack_from(data, _SIGN_OFFSET)

    observed: dict[str, Any] = {}
    if sign:
        observed = json.loads(data[_SIGN_TEXT_OFFSET:][:sign_length])
    waits = [_parsed_wait(plain, seen=observed["seen"]) for plain in observed.get("waits", ())]
    if waiting_since:
        plain = json.loads(data[_WAIT_TEXT_OFFSET:][:length])
        waits.insert(0, _parsed_wait(plain, seen=math.inf))
    line = observed.get("line", "")
    return BoardContent(rank, process, timeout, step, phase, since, sign, tuple(waits), line)


def _plain(wait: Wait) -> dict[str, Any]:
    """Return the fields of a wait that differ from their defaults, for JSON."""
    return {
        name: value
        for name, value in vars(wait).items()
        if value not in ("", 0, ()) and name != "seen"
    }


def _wait_text(wait: Wait) -> bytes:
    text = json.dumps(_plain(wait)).encode()
    if len(text) > _WAIT_TEXT_BYTES:
        # The ranks of a very large group do not fit.
        short = Wait(wait.operation, wait.axis[:100], wait.since, wait.sequence, wait.shape[:100])
        text = json.dumps(_plain(short)).encode()
    return text


def _parsed_wait(plain: dict[str, Any], *, seen: float) -> Wait:
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
