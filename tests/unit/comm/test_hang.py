"""Ranks that hang: which rank is late, and the sentence that describes it."""

from dataclasses import replace

import pytest

from plait.comm import hang
from plait.comm.hang import BoardContent, Wait

TIMEOUT = 5.0
NOW = 100.0


def board(rank, *waits, sign=NOW, line="train.py:33"):
    """Content of a rank's board in the backward of step 3."""
    return BoardContent(rank, 1000 + rank, TIMEOUT, 3, hang.BACKWARD, NOW - 6, sign, waits, line)


def all_reduce(sequence, *members, since=NOW - 5.5, axis="dp_shard", missing=None):
    return Wait("all-reduce", axis, since, sequence, "[1000] float32", missing, members, NOW)


def test_a_wait_within_its_timeout_is_no_hang():
    early = {0: board(0, all_reduce(5, 0, 1, since=NOW - 4.9)), 1: board(1)}
    assert hang.find_hang(early, NOW) is None
    # A wait that was seen 3 s ago may have ended since then.
    old = {0: board(0, replace(all_reduce(5, 0, 1), seen=NOW - 3)), 1: board(1)}
    assert hang.find_hang(old, NOW) is None


def test_the_rank_that_did_not_begin_is_late():
    wait = all_reduce(5, 0, 1, 2)
    boards = {0: board(0, wait), 1: board(1), 2: board(2, wait)}
    result = hang.find_hang(boards, NOW)
    assert result.late == (1,)
    assert hang.describe_cause(result, boards) == (
        "rank 1 is stuck in step 3, backward: ranks 0, 2 have waited 5.5 s in all-reduce over "
        "dp_shard (number 5, [1000] float32) at train.py:33; the timeout is 5 s"
    )


def test_a_rank_that_waits_for_another_is_not_the_cause():
    first = board(0, all_reduce(5, 0, 1))
    second = board(1, all_reduce(2, 1, 2, axis="tp"))
    assert hang.find_hang({0: first, 1: second, 2: board(2)}, NOW).late == (2,)


def test_missing_ranks_of_a_wait_have_precedence():
    """Shared memory knows who is missing. torch's record of the same moment does not."""
    waits = (all_reduce(5, 0, 1, 2), all_reduce(9, 0, 1, 2, missing=(2,)))
    boards = {0: board(0, *waits), 1: board(1), 2: board(2)}
    assert hang.find_hang(boards, NOW).late == (2,)


def test_ranks_that_wait_for_each_other():
    second = board(1, all_reduce(3, 0, 1, axis="tp"), line="other.py:8")
    boards = {0: board(0, all_reduce(5, 0, 1)), 1: second}
    result = hang.find_hang(boards, NOW)
    assert not result.late
    description = hang.describe_cause(result, boards)
    assert description.startswith("the ranks wait for each other in different collectives: ")
    for part in (
        "rank 0 for 5.5 s in all-reduce over dp_shard",
        "rank 1 for 5.5 s in all-reduce over tp (number 3, [1000] float32) at other.py:8",
    ):
        assert part in description


def test_a_rank_that_has_ended():
    """The launcher has not noticed its end, so no process is stuck."""
    boards = {0: board(0, all_reduce(5, 0, 1)), 1: board(1)}
    description = hang.describe_cause(hang.find_hang(boards, NOW), boards, ended=[1])
    expected = "rank 1 has ended in step 3, backward: rank 0 has waited 5.5 s in all-reduce"
    assert description.startswith(expected)


def test_a_rank_on_another_machine():
    boards = {0: board(0, all_reduce(5, 0, 1))}
    description = hang.describe_cause(hang.find_hang(boards, NOW), boards)
    expected = "rank 1, on another machine or ended, is stuck: rank 0 has waited"
    assert description.startswith(expected)


@pytest.mark.parametrize(
    ("state", "sign", "expected"),
    [
        ("T", NOW - 6, "its process is stopped (SIGSTOP"),
        ("R", NOW - 6, "its interpreter has run no other thread for 6.0 s"),
        ("S", NOW, "for 6.0 s, at train.py:33; the stacks"),
        ("Z", NOW, "its process has ended"),
    ],
)
def test_the_condition_of_a_rank(state, sign, expected):
    description = hang.condition(board(1, sign=sign), NOW, state=state, stack="rank-1.txt")
    assert expected in description


def test_consecutive_ranks_are_a_range():
    assert hang.format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert hang.format_ranks([4]) == "rank 4"
