"""The launcher finds the first cause among the failures of ranks, and reports each of them once."""

import json
import signal
import time

import pytest

from plait.cli.launching.failures import (
    Failure,
    FailureRecord,
    Reporter,
    first_cause,
    process_exit_code,
    read_record,
)

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:24961"
"""Error of a rank whose peer has ended. It is an effect of another failure."""


def write_record(
    path, *, summary="ValueError: no", time_ns=10, exit_code=1, told=False, text="Traceback"
):
    """Write the file that a failing rank leaves."""
    extra = {"py_callstack": text, "timestamp": "0"}
    content = {
        "message": {"message": summary, "extraInfo": extra},
        "plait": {"time_ns": time_ns, "exit_code": exit_code, "pid": 4321, "told": told},
    }
    path.write_text(json.dumps(content))


def failure(rank, exit_code, *, noticed=100, summary=None, at=0):
    """Return the failure of a rank. It has a record of the time `at` if it has a summary."""
    record = None
    if summary is not None:
        record = FailureRecord(at, 1, 1, summary, "", False)
    return Failure(rank, exit_code, noticed, record)


TERMINATED = failure(0, -signal.SIGTERM, noticed=10)


@pytest.mark.parametrize(
    ("effect", "cause"),
    [
        (failure(0, 1, summary=LOST, at=50), failure(1, 1, summary="ValueError: no", at=40)),
        # The earlier one of two exceptions.
        (failure(0, 1, summary="ValueError: a", at=50), failure(1, 1, summary="TypeError", at=40)),
        # A crash leaves no record, and is noticed after another rank recorded a lost peer.
        (failure(0, 1, summary=LOST, at=50), failure(1, -11, noticed=60)),
        (TERMINATED, failure(1, 7, noticed=60)),
        (TERMINATED, failure(1, -signal.SIGKILL, noticed=60)),
        # An error of the script may mention timeouts.
        (
            failure(0, 1, summary=LOST, at=30),
            failure(1, 1, summary="ValueError: timeout must be positive", at=40),
        ),
        (failure(0, 1, summary=LOST, at=30), failure(1, 1, summary=LOST, at=20)),
        # The cause may be on another machine. A lost peer says more than a rank that was stopped.
        (TERMINATED, failure(1, 1, summary=LOST, at=20)),
    ],
)
def test_the_cause_comes_before_its_effects(effect, cause):
    assert first_cause([effect, cause]) is cause
    assert first_cause([cause, effect]) is cause


def test_exit_codes_are_those_of_a_shell():
    assert process_exit_code(failure(0, 7)) == 7
    assert process_exit_code(failure(0, -11)) == 139
    # The launcher stopped the rank while it ended with an exception.
    assert process_exit_code(failure(0, -15, summary="ValueError: no")) == 1


class TestRead:
    @pytest.fixture
    def file(self, tmp_path):
        return tmp_path / "error.json"

    def test_missing_and_incomplete_records(self, file):
        assert read_record(file) is None
        file.write_text('{"message": ')
        assert read_record(file) is None

    def test_records_of_torch(self, file, monkeypatch):
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def fail():
            raise ValueError("boom")

        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(ValueError, match="boom"):
            fail()
        failure_record = read_record(file)
        assert failure_record.summary == "ValueError: boom"
        assert failure_record.text.startswith("Traceback (most recent call last)")
        assert abs(failure_record.time_ns - time.time_ns()) < 60e9

    def test_records_with_a_text_only(self, file):
        file.write_text(json.dumps({"message": "gone\nwrong", "timestamp": 3}))
        failure_record = read_record(file)
        assert (failure_record.summary, failure_record.text) == ("wrong", "gone\nwrong")
        assert failure_record.time_ns == 3 * 10**9


class TestReporter:
    @pytest.fixture
    def lines(self):
        """Return the list of reported messages."""
        return []

    @pytest.fixture
    def files(self, tmp_path):
        """Return the files of the records of four ranks."""
        return {rank: tmp_path / f"{rank}.json" for rank in range(4)}

    @pytest.fixture
    def reporter(self, lines, files):
        with Reporter("a01", lines.append) as reporter:
            reporter.watch({rank: str(path) for rank, path in files.items()})
            yield reporter

    def test_an_exception_is_reported_while_others_run(self, lines, files, reporter):
        write_record(files[2], text="Traceback\n  here\nValueError: no")
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)
        rank = "plait: rank 2 (node a01, process 4321) failed with exit code 1."
        assert lines == [f"{rank} Its traceback:\nTraceback\n  here\nValueError: no"]

        write_record(files[0], summary=LOST, time_ns=5)
        assert reporter.report_attempt({0: 1, 1: -15, 2: 1}, 99).rank == 2
        assert lines[1:] == [
            f"plait: rank 0 (node a01, process 4321) failed too, with exit code 1: {LOST}",
            "plait: rank 1 was stopped",
        ]

    def test_a_lost_peer_waits_for_the_rank_that_crashed(self, lines, files, reporter):
        write_record(files[0], summary=LOST)
        time.sleep(0.4)
        assert lines == []
        assert reporter.report_attempt({0: 1, 1: -11}, 99).rank == 1
        assert "rank 1 (node a01) was killed by signal 11 SIGSEGV" in lines[0]
        assert "rank 0" in lines[1]

    def test_a_lost_peer_alone_points_to_other_machines(self, lines, files, reporter):
        write_record(files[0], summary=LOST)
        assert reporter.report_attempt({0: 1}, 99).rank == 0
        assert "other machines" in lines[1]

    def test_equal_failures_of_many_ranks_are_reported_once(self, lines, files, reporter):
        for rank, path in files.items():
            write_record(path, time_ns=10 - rank)
        assert reporter.report_attempt(dict.fromkeys(files, 1), 99).rank == 3
        assert lines[0].startswith("plait: rank 3")
        assert lines[1:] == ["plait: ranks 0, 1, 2 failed in the same way"]

    def test_an_error_of_plait_has_no_traceback(self, lines, files, reporter):
        for path in files.values():
            error = {"summary": "ConfigError: tp = 3", "text": "tp = 3: no; use 2"}
            write_record(path, told=True, exit_code=2, **error)
        assert process_exit_code(reporter.report_attempt(dict.fromkeys(files, 2), 99)) == 2
        assert lines == ["plait: tp = 3: no; use 2"]

    def test_out_of_memory_is_named(self, lines, reporter):
        reporter.report_attempt({0: -9}, 99)
        assert "signal 9 SIGKILL (out of memory?)" in lines[0]

    def test_a_rank_that_the_launcher_killed_was_stopped(self, lines, reporter):
        """The launcher kills ranks that ignore SIGTERM."""
        assert reporter.report_attempt({0: -9, 1: 7, 2: -9}, 99, running=[0]).rank != 0
        assert "plait: rank 0 was stopped" in lines
        message = "rank 2 (node a01) was killed by signal 9 SIGKILL (out"
        assert any(message in line for line in lines)

    def test_an_incomplete_collective_is_an_effect(self, lines, files, reporter):
        error = {"summary": "CommunicationError: rank 1 ended", "text": "rank 1 ended"}
        write_record(files[0], told=True, exit_code=5, **error)
        time.sleep(0.3)
        assert lines == []
        assert reporter.report_attempt({0: 5, 1: -9}, 99).rank == 1
        assert "rank 1 (node a01) was killed by signal 9" in lines[0]

    def test_a_rank_that_ended_early_is_the_cause(self, lines, files, reporter):
        write_record(files[0], summary=LOST)
        reporter.report_attempt({0: 1}, 99, ended={1})
        rank = "plait: rank 1 (node a01) ended with exit code 0"
        assert lines[0] == f"{rank} before the others, which wait for it"

    def test_a_failed_rank_that_does_not_end(self, files, reporter):
        now = time.time_ns()
        write_record(files[2], exit_code=4, time_ns=now - 3 * 10**9)
        write_record(files[3], time_ns=now)
        assert reporter.failed_and_running([0, 1, 2, 3], 2) == {2: 4}
        assert reporter.failed_and_running([0, 1, 3], 2) == {}

    def test_failures_after_a_hang_are_its_effects(self, lines, files, reporter):
        reporter.report_hang("plait: rank 1 is stuck")
        write_record(files[0], summary="ValueError: late")
        time.sleep(0.3)
        assert lines == ["plait: rank 1 is stuck"]

    def test_every_attempt_is_reported(self, lines, files, reporter, tmp_path):
        write_record(files[0], text="first")
        reporter.report_attempt({0: 1}, 99, restarting=True)
        second = tmp_path / "second.json"
        reporter.watch({0: str(second)})
        write_record(second, text="second")
        reporter.report_attempt({0: 1}, 99)
        last_lines = [line.splitlines()[-1] for line in lines]
        assert last_lines == ["first", "plait: starting the ranks again", "second"]
