"""Waits that a process publishes while its main thread runs and its clock is changed.

The recorder of torch and the state of the main thread cannot be set in any other way than by
replacing the functions that read them.
"""

from __future__ import annotations

import time

import pytest

from plait._torch.groups import UnfinishedCollective
from plait.comm import watch
from plait.comm.hang import FORWARD, Board, Wait, read_board
from plait.comm.watch import Watch


@pytest.fixture
def board(tmp_path):
    board = Board(rank=0, timeout_seconds=5.0, path=tmp_path / "board")
    board.progress(1, FORWARD)
    yield board
    board.close()


def test_a_wait_that_ends_during_a_look_is_not_overdue(board, monkeypatch):
    """It may end between two reads of its start, which is 0 afterwards."""
    monkeypatch.setattr(watch, "unfinished_collectives", list)
    monkeypatch.setattr(watch, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    start = time.monotonic() - 2

    def ends_after_the_first_read(_):
        monkeypatch.setattr(Board, "waiting_since", property(lambda _: 0.0))
        return start

    watched = Watch()
    monkeypatch.setattr(Board, "waiting_since", property(ends_after_the_first_read))
    (wait,) = watched._publish(board, time.monotonic(), 0.0)
    assert wait.since == start
    monkeypatch.setattr(Board, "waiting_since", property(ends_after_the_first_read))
    watched.look(board)


def test_an_overdue_rank_reports_and_ends_itself(board, monkeypatch, capfd):
    """It leaves the launcher 20 s to end the run."""
    monkeypatch.setattr(watch, "unfinished_collectives", list)
    codes = []
    monkeypatch.setattr(watch, "end_process", codes.append)
    watched = Watch()
    watched._launcher_watches = True
    board.wait(Wait("all-reduce", "dp", since=time.monotonic() - 24))
    watched.look(board)
    assert not codes
    board.wait(Wait("all-reduce", "dp", since=time.monotonic() - 26))
    watched.look(board)
    assert codes == [5]
    assert "has waited 20 s longer than its timeout" in capfd.readouterr().err


@pytest.mark.parametrize("change", [30.0, -30.0])
def test_a_changed_clock_does_not_change_the_age_of_a_wait(board, monkeypatch, change):
    """Times of torch's recorder are those of the adjustable clock, times of boards are not."""

    def collective(sequence):
        start_ns = time.time_ns() - 2 * 10**9
        group = ("all_reduce", "0", "default_pg", (0, 1))
        return UnfinishedCollective(*group, sequence, "[1] float32", start_ns)

    watched = Watch()
    first = collective(1)
    second = collective(2)
    monkeypatch.setattr(watch, "unfinished_collectives", lambda: [first])
    (wait,) = watched._publish(board, time.monotonic(), 0.0)
    age = time.monotonic() - wait.since
    assert 1.9 < age < 4

    clock = time.time
    monkeypatch.setattr(watch, "unfinished_collectives", lambda: [first, second])
    monkeypatch.setattr(time, "time", lambda: clock() + change)
    watched._publish(board, time.monotonic(), 0.0)
    (published,) = read_board(board.path).waits
    assert published.since == wait.since
    # The second one began after the last look, whatever the changed clock says.
    for start in watched._unfinished.values():
        assert time.monotonic() - start < age + 2
