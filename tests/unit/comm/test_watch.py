"""What a process publishes of its own waits, while its main thread goes on and its clocks are set."""

from __future__ import annotations

import time

import pytest

from plait._torch.groups import UnfinishedCollective
from plait.comm import watch
from plait.comm.hang import FORWARD, Board, Wait, read_board
from plait.comm.watch import Watch


@pytest.fixture
def board(tmp_path):
    made = Board(rank=0, timeout_seconds=5.0, path=tmp_path / "board")
    made.progress(1, FORWARD)
    yield made
    made.close()


def test_a_wait_that_ends_meanwhile_has_a_sane_age(board, monkeypatch):
    """One in a hundred slow but healthy runs ended itself: the wait was over between two reads of when it began."""
    monkeypatch.setattr(watch, "unfinished_collectives", list)
    monkeypatch.setattr(watch, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    began = time.monotonic() - 2

    def ends_at_once(_):
        monkeypatch.setattr(Board, "waiting_since", property(lambda _: 0.0))
        return began

    watched = Watch()
    monkeypatch.setattr(Board, "waiting_since", property(ends_at_once))
    assert [wait.since for wait in watched._publish(board, time.monotonic(), 0.0)] == [began]
    monkeypatch.setattr(Board, "waiting_since", property(ends_at_once))
    watched.look(board)


def test_a_rank_that_waits_on_says_so_before_it_ends(board, monkeypatch, capfd):
    monkeypatch.setattr(watch, "unfinished_collectives", list)
    codes: list[int] = []
    monkeypatch.setattr(watch, "end_process", codes.append)
    watched = Watch()
    watched._launcher_watches = True
    board.wait(Wait("all-reduce", "dp", since=time.monotonic() - 24))
    watched.look(board)
    assert not codes
    board.wait(Wait("all-reduce", "dp", since=time.monotonic() - 26))
    watched.look(board)
    assert codes == [5] and "has waited 20 s longer than its timeout" in capfd.readouterr().err


@pytest.mark.parametrize("set_by", [30.0, -30.0])
def test_a_clock_that_is_set_makes_no_wait_longer(board, monkeypatch, tmp_path, set_by):
    """The recorder has times of the clock that may be set, and boards those of the other."""
    watched, real = Watch(), time.time
    first = UnfinishedCollective(
        "all_reduce", "0", "default_pg", (0, 1), 1, "[1] float32", time.time_ns() - 2 * 10**9
    )
    second = UnfinishedCollective(
        "all_reduce", "0", "default_pg", (0, 1), 2, "[1] float32", time.time_ns() - 2 * 10**9
    )
    monkeypatch.setattr(watch, "unfinished_collectives", lambda: [first])
    (seen,) = watched._publish(board, time.monotonic(), 0.0)
    age = time.monotonic() - seen.since
    assert 1.9 < age < 4

    monkeypatch.setattr(watch, "unfinished_collectives", lambda: [first, second])
    monkeypatch.setattr(time, "time", lambda: real() + set_by)
    watched._publish(board, time.monotonic(), 0.0)
    reading = read_board(tmp_path / "board")
    assert reading is not None and [wait.since for wait in reading.waits] == [seen.since]
    assert all(time.monotonic() - began < age + 2 for began in watched._unfinished.values()), (
        "one that is new began after the last look"
    )
