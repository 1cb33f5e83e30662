"""What a rank publishes of itself, read by another process."""

import errno
import os
import resource
import time

import pytest

from plait.comm.hang import BYTES, FORWARD, HEARTBEAT_SECONDS, Board, condition, read_board
from plait.errors import InputError


def test_a_rank_that_never_signalled_holds_the_gil(tmp_path):
    """Its thread that watches has not run since the board was made, half a second before its first look."""
    board = Board(rank=1, timeout_seconds=5, path=tmp_path / "board")
    board.progress(3, FORWARD)
    reading = read_board(tmp_path / "board")
    assert reading is not None and (reading.step, reading.phase) == (3, FORWARD)
    said = condition(reading, time.monotonic() + HEARTBEAT_SECONDS + 1, state="S")
    assert "a call holds the interpreter's lock" in said
    board.close()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_limit_of_the_size_of_files(in_memory, tmp_path):
    """`ulimit -f` holds for files in memory, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        words = f"^ulimit -f: processes may write at most 4,096 bytes to a file, .* {BYTES:,} bytes, .*unlimited$"
        with pytest.raises(InputError, match=words):
            Board(rank=0, timeout_seconds=5, path=None if in_memory else tmp_path / "board")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path, monkeypatch):
    """It is told, where a store to a file with holes would end the process."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = r": no space for .* \(No space left on device\); free some space, or set TMPDIR"
    with pytest.raises(InputError, match=words):
        Board(rank=0, timeout_seconds=5, path=tmp_path / "board")
