"""Boards, and who is late: what ranks publish, and the sentence that is made of it. No process group."""

import math
from dataclasses import replace

import pytest

from plait.comm import hang
from plait.comm.hang import Board, BoardContent, Wait, read_board

TIMEOUT = 5.0
NOW = 100.0


def reading(rank, *waits, step=3, sign=NOW, line="train.py:33"):
    return BoardContent(rank, 1000 + rank, TIMEOUT, step, hang.BACKWARD, NOW - 6, sign, waits, line)


def reduce(sequence, *members, since=NOW - 5.5, axis="dp_shard", missing=None):
    return Wait("all-reduce", axis, since, sequence, "[1000] float32", missing, members, NOW)


class TestBoard:
    def test_what_is_written_is_read(self, tmp_path):
        own = Board(rank=2, timeout_seconds=TIMEOUT, path=tmp_path / "board")
        own.progress(7, hang.FORWARD)
        wait = Wait("all-gather", "dp_shard", 12.5, 4, "[8] float32", (1, 3), (0, 1, 2, 3))
        own.wait(wait)
        reduction = Wait("all-reduce", "tp", 11.0, 9, "[2] int64", None, (2, 3))
        own.heartbeat([reduction], line="a.py:3", seen=14.0)
        found = read_board(tmp_path / "board")
        assert (found.rank, found.step, found.phase) == (2, 7, hang.FORWARD)
        assert (found.timeout_seconds, found.line) == (TIMEOUT, "a.py:3")
        assert found.waits[0] == replace(wait, seen=math.inf)
        assert found.waits[1].members == (2, 3) and found.waits[1].seen == 14.0
        own.waited()
        own.phase(hang.UPDATE)
        own.heartbeat()
        found = read_board(tmp_path / "board")
        assert (found.step, found.phase, found.waits) == (7, hang.UPDATE, ())
        own.close()

    def test_without_a_path_nothing_is_left(self):
        own = Board(rank=0, timeout_seconds=TIMEOUT)
        assert read_board(own.path) is not None
        path = own.path
        own.close()
        assert read_board(path) is None

    def test_a_description_that_is_too_long_is_shortened(self, tmp_path):
        own = Board(rank=0, timeout_seconds=TIMEOUT, path=tmp_path / "board")
        wait = Wait("all-reduce", "dp", 1.0, 1, "[8]", None, tuple(range(4096)))
        own.wait(wait)
        own.heartbeat([wait] * 3, line="a.py:3")
        found = read_board(tmp_path / "board")
        assert found.line == "a.py:3" and found.waits[0].operation == "all-reduce"
        own.close()

    def test_a_file_that_is_no_board(self, tmp_path):
        (tmp_path / "other").write_bytes(b"x" * hang.BYTES)
        assert read_board(tmp_path / "other") is None
        assert read_board(tmp_path / "none") is None


class TestFind:
    def test_a_wait_within_its_timeout_is_no_hang(self):
        early = {0: reading(0, reduce(5, 0, 1, since=NOW - 4.9)), 1: reading(1)}
        assert hang.find_hang(early, NOW) is None
        # What a rank saw 3 s ago may have ended since.
        unseen = {0: reading(0, replace(reduce(5, 0, 1), seen=NOW - 3)), 1: reading(1)}
        assert hang.find_hang(unseen, NOW) is None

    def test_the_rank_that_did_not_begin_is_late(self):
        wait = reduce(5, 0, 1, 2)
        ranks = {0: reading(0, wait), 1: reading(1), 2: reading(2, wait)}
        found = hang.find_hang(ranks, NOW)
        assert found.late == (1,)
        assert hang.describe_cause(found, ranks) == (
            "rank 1 is stuck in step 3, backward: ranks 0, 2 have waited 5.5 s in all-reduce over dp_shard (number 5, [1000] float32) at "
            "train.py:33; the timeout is 5 s"
        )

    def test_a_rank_that_waits_for_another_is_not_the_cause(self):
        first, second = reduce(5, 0, 1), reduce(2, 1, 2, axis="tp")
        ranks = {0: reading(0, first), 1: reading(1, second), 2: reading(2)}
        assert hang.find_hang(ranks, NOW).late == (2,)

    def test_what_the_wait_itself_knows_comes_first(self):
        """Shared memory shows who is missing. torch's record of the same moment does not."""
        waits = (reduce(5, 0, 1, 2), reduce(9, 0, 1, 2, missing=(2,)))
        ranks = {0: reading(0, *waits), 1: reading(1), 2: reading(2)}
        assert hang.find_hang(ranks, NOW).late == (2,)

    def test_ranks_that_wait_for_each_other(self):
        other = reading(1, reduce(3, 0, 1, axis="tp"), line="other.py:8")
        ranks = {0: reading(0, reduce(5, 0, 1)), 1: other}
        found = hang.find_hang(ranks, NOW)
        assert not found.late
        text = hang.describe_cause(found, ranks)
        start = "the ranks wait for each other in different collectives: rank 0 for 5.5 s in all-reduce over dp_shard"
        assert text.startswith(start)
        words = "rank 1 for 5.5 s in all-reduce over tp (number 3, [1000] float32) at other.py:8"
        assert words in text

    def test_a_rank_that_has_ended(self):
        """The rank left by sys.exit before the launcher saw it, so no process is stuck."""
        ranks = {0: reading(0, reduce(5, 0, 1)), 1: reading(1)}
        cause = hang.describe_cause(hang.find_hang(ranks, NOW), ranks, ended=[1])
        words = "rank 1 has ended in step 3, backward: rank 0 has waited 5.5 s in all-reduce"
        assert cause.startswith(words)

    def test_another_machine(self):
        ranks = {0: reading(0, reduce(5, 0, 1))}
        cause = hang.describe_cause(hang.find_hang(ranks, NOW), ranks)
        words = "rank 1, on another machine or ended, is stuck: rank 0 has waited"
        assert cause.startswith(words)


@pytest.mark.parametrize(
    ("state", "sign", "words"),
    [
        ("T", NOW - 6, "its process is stopped (SIGSTOP"),
        ("R", NOW - 6, "its interpreter has run no other thread for 6.0 s"),
        ("S", NOW, "for 6.0 s, at train.py:33; the stacks"),
        ("Z", NOW, "its process has ended"),
    ],
)
def test_the_condition_of_a_rank(state, sign, words):
    assert words in hang.condition(reading(1, sign=sign), NOW, state=state, stack="rank-1.txt")


def test_ranks_are_named_in_runs():
    assert hang.format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5" and hang.format_ranks([4]) == "rank 4"
