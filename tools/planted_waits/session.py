"""One session of pytest in which tests run again and again.

First each test runs once to see which waits it reaches. Then those that reach a wait run without
it, the fastest first. The worker processes stay: tests/simulated_device/planted.py changes the
modules in them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from _pytest.runner import runtestprotocol

from tests.simulated_device import pool
from tests.simulated_device.planted import REACHED
from tools.planted_waits.places import Wait, recording, without

# Each file runs for the waits that those before it do not notice.
TESTS = tuple(
    f"tests/simulated_device/test_{name}.py"
    for name in ("waits", "ahead", "generation", "context", "cover")
)
SECONDS = 60
"""Limit of a task without a wait. One that hangs counts as noticed."""


@dataclass(frozen=True)
class Outcome:
    """What happened without one wait."""

    place: str
    line: int
    noticed: str
    """First test that failed, or empty."""
    told: str
    """Line of its error."""
    reached: int
    """Number of tests that reach the wait."""


@dataclass
class Session:
    """A plugin of pytest that runs the tests in its own order."""

    waits: Sequence[Wait]
    record: Callable[[Outcome], None]
    _reaching: dict[str, list[tuple[float, pytest.Item]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Seconds and item of the tests that reach a place."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace the loop of pytest."""
        missing = list(self.waits)
        for _, tests in groupby(session.items, key=lambda item: item.path):
            items = list(tests)
            session._setupstate.teardown_exact(items[0])  # fixtures of the previous file
            if missing:
                self._find_reaching(items, missing)
                missing = [wait for wait in missing if not self._is_noticed(wait)]
        for wait in missing:
            self.record(Outcome(wait.place, wait.line, "", "", len(self._reaching[wait.place])))
        session._setupstate.teardown_exact(None)  # ends the workers
        return True

    def _find_reaching(self, items: Sequence[pytest.Item], waits: Sequence[Wait]) -> None:
        """Run each test with all waits in place, and record which of them it reaches."""
        for file, places in groupby(waits, key=lambda wait: wait.file):
            pool.PLANTED[file] = recording(file, list(places), REACHED)
        for item in items:
            pool.RECORDS.clear()
            began = time.monotonic()
            failure = _failure(item)
            if failure is not None:
                raise pytest.UsageError(
                    f"{item.name} fails with all waits in place:\n{failure.longreprtext}"
                )
            seconds = time.monotonic() - began
            for place in frozenset().union(*(record.reached for record in pool.RECORDS)):
                self._reaching[place].append((seconds, item))
        pool.PLANTED.clear()

    def _is_noticed(self, wait: Wait) -> bool:
        tests = self._reaching[wait.place]
        for _, item in sorted(tests, key=lambda test: test[0]):
            if item.path != tests[-1][1].path:  # ran with an earlier file
                continue
            pool.PLANTED[wait.file] = without(wait)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pool, "SECONDS", SECONDS)
                failure = _failure(item)
            pool.PLANTED.clear()
            if failure is not None:
                line = _error_line(failure)
                self.record(Outcome(wait.place, wait.line, item.name, line, len(tests)))
                return True
        return False


def _failure(item: pytest.Item) -> pytest.TestReport | None:
    """Run a test, and return the report of its failure. Fixtures of its file are kept."""
    others = (one for one in item.session.items if one.path == item.path and one is not item)
    reports = runtestprotocol(item, log=False, nextitem=next(others, None))
    return next((report for report in reports if report.failed), None)


def _error_line(report: pytest.TestReport) -> str:
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:3] == "E  "]
    words = (" x rank ", "assert", "Error")
    telling = [line for line in lines if any(word in line for word in words)]
    return next(iter([*telling, *lines]), "")[:160]


def run(waits: Sequence[Wait], record: Callable[[Outcome], None]) -> None:
    """Run the tests without each of the waits, and pass every outcome to `record`."""
    plugin = Session(waits, record)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *TESTS], plugins=[plugin])
    if code != pytest.ExitCode.OK:
        raise SystemExit(int(code))
