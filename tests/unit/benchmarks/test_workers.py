"""Worker groups answer by rank, and every way to fail is told."""

import operator
import os
import time

import pytest

from benchmarks.common.workers import WorkerGroup, WorkerGroupError


def worker_group(tmp_path, start, argument):
    return WorkerGroup(
        "worker_group", ranks=2, start=start, argument=argument, logs=tmp_path, environment={}
    )


def test_answers_come_by_rank_until_the_team_is_stopped(tmp_path):
    one = worker_group(tmp_path, operator.attrgetter("join"), ",")
    one.ready(timeout_seconds=60)
    assert one.ask(["a", "b"], timeout_seconds=60) == ["a,b", "a,b"]
    assert len(set(one.pids)) == 2
    one.stop()
    assert not any(process.is_alive() for process in one.processes)


def test_an_exception_is_told_with_its_traceback(tmp_path):
    one = worker_group(tmp_path, operator.attrgetter("join"), ",")
    one.ready(timeout_seconds=60)
    words = "(?s)worker_group: rank . failed.*TypeError: can only join an iterable"
    with pytest.raises(WorkerGroupError, match=words):
        one.ask(3, timeout_seconds=60)
    one.stop()


def test_a_death_is_told(tmp_path):
    one = worker_group(tmp_path, os._exit, 3)
    with pytest.raises(WorkerGroupError, match="rank . died"):
        one.ready(timeout_seconds=60)
    one.stop()


def test_silence_is_told(tmp_path):
    one = worker_group(tmp_path, time.sleep, 60)
    with pytest.raises(WorkerGroupError, match=r"no answer from rank \[0, 1\] in 1 s"):
        one.ready(timeout_seconds=1)
    one.stop(patience_seconds=0)
    assert not any(process.is_alive() for process in one.processes)
