"""Worker groups answer by rank, and every failure is reported."""

import operator
import os
import time

import pytest

from benchmarks.common.workers import WorkerGroup, WorkerGroupError


@pytest.fixture
def start_group(tmp_path):
    """Return a function that starts a worker group of two ranks, which is stopped at the end."""
    groups = []

    def start(function, argument):
        group = WorkerGroup(
            "group", ranks=2, start=function, argument=argument, logs=tmp_path, environment={}
        )
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.stop(patience_seconds=0)
        assert not any(process.is_alive() for process in group.processes)


def test_answers_are_in_the_order_of_ranks(start_group):
    group = start_group(operator.attrgetter("join"), ",")
    group.ready(timeout_seconds=60)
    assert group.ask(["a", "b"], timeout_seconds=60) == ["a,b", "a,b"]
    assert len(set(group.pids)) == 2
    group.stop()
    assert not any(process.is_alive() for process in group.processes)


def test_an_exception_is_reported_with_its_traceback(start_group):
    group = start_group(operator.attrgetter("join"), ",")
    group.ready(timeout_seconds=60)
    message = "(?s)group: rank . failed.*TypeError: can only join an iterable"
    with pytest.raises(WorkerGroupError, match=message):
        group.ask(3, timeout_seconds=60)


def test_the_end_of_a_process_is_reported(start_group):
    group = start_group(os._exit, 3)
    with pytest.raises(WorkerGroupError, match="rank . died"):
        group.ready(timeout_seconds=60)


def test_a_rank_that_does_not_answer_is_reported(start_group):
    group = start_group(time.sleep, 60)
    with pytest.raises(WorkerGroupError, match=r"no answer from rank \[0, 1\] in 1 s"):
        group.ready(timeout_seconds=1)
