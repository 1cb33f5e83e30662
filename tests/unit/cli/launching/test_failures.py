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


def _record(
    path, *, summary="ValueError: no", time_ns=10, exit_code=1, told=False, text="Traceback"
):
    extra = {"py_callstack": text, "timestamp": "0"}
    own = {"time_ns": time_ns, "exit_code": exit_code, "pid": 4321, "told": told}
    path.write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}, "plait": own}))


def _failure(rank, exit_code, *, noticed=100, summary=None, at=0):
    record = FailureRecord(at, 1, 1, summary, "", False) if summary is not None else None
    return Failure(rank, exit_code, noticed, record)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([_failure(0, 1, summary=LOST, at=50), _failure(1, 1, summary="ValueError: no", at=40)], 1),
        # Two real exceptions: the earlier one.
        ([_failure(0, 1, summary="ValueError: a", at=50), _failure(1, 1, summary="ValueError: b", at=40)], 1),
        # The crash leaves no record and is noticed after the other rank recorded that its peer is gone.
        ([_failure(0, 1, summary=LOST, at=50), _failure(1, -11, noticed=60)], 1),
        ([_failure(0, -signal.SIGTERM, noticed=10), _failure(1, 7, noticed=60)], 1),
        ([_failure(0, -signal.SIGTERM, noticed=10), _failure(1, -signal.SIGKILL, noticed=60)], 1),
        # A user's own error may speak of timeouts.
        ([_failure(0, 1, summary=LOST, at=30), _failure(1, 1, summary="ValueError: timeout must be positive", at=40)], 1),
        ([_failure(0, 1, summary=LOST, at=30), _failure(1, 1, summary=LOST, at=20)], 1),
        # What failed first may be on another machine: still more telling than the rank that was stopped here.
        ([_failure(0, -signal.SIGTERM, noticed=10), _failure(1, 1, summary=LOST, at=20)], 1),
    ],
)  # fmt: skip
def test_the_cause_comes_before_its_effects(failures, cause):
    assert first_cause(failures).rank == cause
    assert first_cause(failures[::-1]).rank == cause


def test_exit_codes_are_those_of_a_shell():
    assert process_exit_code(_failure(0, 7)) == 7
    assert process_exit_code(_failure(0, -11)) == 139
    # It recorded an exception and was then stopped by the launcher while it ended.
    assert process_exit_code(_failure(0, -15, summary="ValueError: no")) == 1


class TestRead:
    def test_missing_and_half_written(self, tmp_path):
        assert read_record(tmp_path / "error.json") is None
        (tmp_path / "error.json").write_text('{"message": ')
        assert read_record(tmp_path / "error.json") is None

    def test_written_by_torch(self, tmp_path, monkeypatch):
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def fails():
            raise ValueError("boom")

        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        with pytest.raises(ValueError, match="boom"):
            fails()
        found = read_record(tmp_path / "error.json")
        assert found.summary == "ValueError: boom"
        assert found.text.startswith("Traceback (most recent call last)")
        assert abs(found.time_ns - time.time_ns()) < 60e9

    def test_text_only(self, tmp_path):
        (tmp_path / "error.json").write_text(json.dumps({"message": "gone\nwrong", "timestamp": 3}))
        found = read_record(tmp_path / "error.json")
        assert (found.summary, found.text, found.time_ns) == ("wrong", "gone\nwrong", 3 * 10**9)


class TestReporter:
    @pytest.fixture
    def lines(self):
        return []

    @pytest.fixture
    def files(self, tmp_path):
        return {rank: tmp_path / f"{rank}.json" for rank in range(4)}

    @pytest.fixture
    def reporter(self, lines, files):
        with Reporter("a01", lines.append) as reporter:
            reporter.watch({rank: str(path) for rank, path in files.items()})
            yield reporter

    def _wait(self, lines):
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)

    def test_an_exception_is_told_while_the_others_still_run(self, lines, files, reporter):
        _record(files[2], text="Traceback\n  here\nValueError: no")
        self._wait(lines)
        message = "plait: rank 2 (node a01, process 4321) failed with exit code 1. Its traceback:\nTraceback\n  here\nValueError: no"
        assert lines == [message]
        _record(files[0], summary=LOST, time_ns=5)
        cause = reporter.report_attempt({0: 1, 1: -15, 2: 1}, 99)
        assert cause.rank == 2
        assert lines[1:] == [
            f"plait: rank 0 (node a01, process 4321) failed too, with exit code 1: {LOST}",
            "plait: rank 1 was stopped",
        ]

    def test_a_lost_peer_waits_for_the_rank_that_crashed(self, lines, files, reporter):
        _record(files[0], summary=LOST)
        time.sleep(0.4)
        assert lines == []
        cause = reporter.report_attempt({0: 1, 1: -11}, 99)
        assert cause.rank == 1
        assert "rank 1 (node a01) was killed by signal 11 SIGSEGV" in lines[0]
        assert "rank 0" in lines[1]

    def test_a_lost_peer_alone_points_to_the_other_machines(self, lines, files, reporter):
        _record(files[0], summary=LOST)
        assert reporter.report_attempt({0: 1}, 99).rank == 0
        assert "other machines" in lines[1]

    def test_the_same_failure_on_many_ranks_is_told_once(self, lines, files, reporter):
        for rank, path in files.items():
            _record(path, time_ns=10 - rank)
        assert reporter.report_attempt(dict.fromkeys(files, 1), 99).rank == 3
        assert lines[0].startswith("plait: rank 3")
        assert lines[1:] == ["plait: ranks 0, 1, 2 failed in the same way"]

    def test_a_users_error_is_one_sentence(self, lines, files, reporter):
        for path in files.values():
            error = {"summary": "ConfigError: tp = 3", "text": "tp = 3: no; use 2"}
            _record(path, told=True, exit_code=2, **error)
        assert process_exit_code(reporter.report_attempt(dict.fromkeys(files, 2), 99)) == 2
        assert lines == ["plait: tp = 3: no; use 2"]

    def test_out_of_memory_is_named(self, lines, files, reporter):
        reporter.report_attempt({0: -9}, 99)
        assert "signal 9 SIGKILL (out of memory?)" in lines[0]

    def test_a_rank_that_ignored_sigterm_was_stopped(self, lines, reporter):
        """The launcher kills it after a while."""
        cause = reporter.report_attempt({0: -9, 1: 7, 2: -9}, 99, running=[0])
        assert cause.rank != 0
        assert "plait: rank 0 was stopped" in lines
        words = "rank 2 (node a01) was killed by signal 9 SIGKILL (out"
        assert any(words in line for line in lines)

    def test_a_collective_that_cannot_complete_is_an_effect(self, lines, files, reporter):
        error = {"summary": "CommunicationError: rank 1 ended", "text": "rank 1 ended"}
        _record(files[0], told=True, exit_code=5, **error)
        time.sleep(0.3)
        assert lines == []
        assert reporter.report_attempt({0: 5, 1: -9}, 99).rank == 1
        assert "rank 1 (node a01) was killed by signal 9" in lines[0]

    def test_a_rank_that_ended_well_before_the_others_is_their_cause(self, lines, files, reporter):
        _record(files[0], summary=LOST)
        reporter.report_attempt({0: 1}, 99, ended={1})
        message = (
            "plait: rank 1 (node a01) ended with exit code 0 before the others, which wait for it"
        )
        assert lines[0] == message

    def test_a_rank_that_failed_and_does_not_end(self, lines, files, reporter):
        _record(files[2], exit_code=4, time_ns=time.time_ns() - 3 * 10**9)
        _record(files[3], time_ns=time.time_ns())
        assert reporter.failed_and_running([0, 1, 2, 3], 2) == {2: 4}
        assert reporter.failed_and_running([0, 1, 3], 2) == {}

    def test_after_a_hang_other_failures_are_its_effects(self, lines, files, reporter):
        reporter.report_hang("plait: rank 1 is stuck")
        _record(files[0], summary="ValueError: late")
        time.sleep(0.3)
        assert lines == ["plait: rank 1 is stuck"]

    def test_every_attempt_is_told(self, lines, files, reporter, tmp_path):
        _record(files[0], text="first")
        reporter.report_attempt({0: 1}, 99, restarting=True)
        again = tmp_path / "again.json"
        reporter.watch({0: str(again)})
        _record(again, text="second")
        reporter.report_attempt({0: 1}, 99)
        last_lines = [line.splitlines()[-1] for line in lines]
        assert last_lines == ["first", "plait: starting the ranks again", "second"]
