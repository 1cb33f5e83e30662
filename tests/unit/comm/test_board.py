"""What a rank publishes of itself, read by another process."""

from __future__ import annotations

import time
from pathlib import Path

from plait.comm.board import FORWARD, Board, read
from plait.comm.hang import SIGN_SECONDS, condition


def test_a_rank_that_never_gave_a_sign_holds_the_interpreters_lock(tmp_path: Path) -> None:
    """Its thread that watches has not run since the board was made, half a second before its first look."""
    board = Board(rank=1, timeout_seconds=5, path=tmp_path / "board")
    board.progress(3, FORWARD)
    reading = read(tmp_path / "board")
    assert reading is not None and (reading.step, reading.phase) == (3, FORWARD)
    said = condition(reading, time.monotonic() + SIGN_SECONDS + 1, state="S")
    assert "a call holds the interpreter's lock" in said
    board.close()
