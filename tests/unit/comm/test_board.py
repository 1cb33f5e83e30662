"""Boards: the state that a rank publishes, read by another process."""

import errno
import math
import os
import resource
import time
from dataclasses import replace

import pytest

from plait.comm.hang import (
    BYTES,
    FORWARD,
    HEARTBEAT_SECONDS,
    UPDATE,
    Board,
    Wait,
    condition,
    read_board,
)
from plait.errors import InputError


@pytest.fixture
def board(tmp_path):
    board = Board(rank=2, timeout_seconds=5.0, path=tmp_path / "board")
    yield board
    board.close()


def test_what_is_written_is_read(board):
    board.progress(7, FORWARD)
    wait = Wait("all-gather", "dp_shard", 12.5, 4, "[8] float32", (1, 3), (0, 1, 2, 3))
    board.wait(wait)
    reduction = Wait("all-reduce", "tp", 11.0, 9, "[2] int64", None, (2, 3))
    board.heartbeat([reduction], line="a.py:3", seen=14.0)
    content = read_board(board.path)
    assert content.rank == 2
    assert content.step == 7
    assert content.phase == FORWARD
    assert content.timeout_seconds == 5.0
    assert content.line == "a.py:3"
    assert content.waits[0] == replace(wait, seen=math.inf)
    assert content.waits[1].members == (2, 3)
    assert content.waits[1].seen == 14.0

    board.waited()
    board.phase(UPDATE)
    board.heartbeat()
    content = read_board(board.path)
    assert content.step == 7
    assert content.phase == UPDATE
    assert content.waits == ()


def test_a_board_without_a_path_is_removed():
    board = Board(rank=0, timeout_seconds=5.0)
    assert read_board(board.path) is not None
    board.close()
    assert read_board(board.path) is None


def test_a_description_that_is_too_long_is_shortened(board):
    wait = Wait("all-reduce", "dp", 1.0, 1, "[8]", None, tuple(range(4096)))
    board.wait(wait)
    board.heartbeat([wait] * 3, line="a.py:3")
    content = read_board(board.path)
    assert content.line == "a.py:3"
    assert content.waits[0].operation == "all-reduce"


def test_other_files_are_no_boards(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * BYTES)
    assert read_board(tmp_path / "other") is None
    assert read_board(tmp_path / "missing") is None


def test_a_rank_without_a_heartbeat_holds_the_gil(board):
    """The watching thread has not run since the board was created."""
    board.progress(3, FORWARD)
    content = read_board(board.path)
    description = condition(content, time.monotonic() + HEARTBEAT_SECONDS + 1, state="S")
    assert "a call holds the interpreter's lock" in description


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_limit_of_the_size_of_files(in_memory, tmp_path):
    """`ulimit -f` holds for files in memory, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        message = f"^ulimit -f: processes may write at most 4,096 .* {BYTES:,} bytes, .*unlimited$"
        with pytest.raises(InputError, match=message):
            Board(rank=0, timeout_seconds=5, path=None if in_memory else tmp_path / "board")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    """A write to a mapped file without space would end the process by a signal."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # A full disk cannot be had otherwise.
    monkeypatch.setattr(os, "posix_fallocate", full)
    message = r": no space for .* \(No space left on device\); free some space, or set TMPDIR"
    with pytest.raises(InputError, match=message):
        Board(rank=0, timeout_seconds=5, path=tmp_path / "board")
