"""One session of pytest in which tests run again and again: first to see what each of them reaches, then for every wait that is taken out,
those that reach it, the fastest first. The workers stay; what is taken out is taken out in them (tests/simulated_device/planted.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from _pytest.runner import runtestprotocol

from tests.simulated_device import pool
from tests.simulated_device.planted import REACHED
from tools.planted_waits.places import Wait, telling, without

TESTS = tuple(
    f"tests/simulated_device/test_{name}.py"
    for name in ("waits", "ahead", "generation", "context", "cover")
)
"""Each for what those before do not notice."""
SECONDS = 60
"""That a task may take with a wait taken out; one that hangs has noticed."""


@dataclass(frozen=True)
class Found:
    """What became of one place."""

    place: str
    line: int
    noticed: str
    """The first test that failed, empty for none."""
    told: str
    reached: int
    """Tests that come by."""


@dataclass
class Session:
    """A plugin of pytest."""

    waits: Sequence[Wait]
    found: Callable[[Found], None]
    _reached: dict[str, list[tuple[float, pytest.Item]]] = field(default_factory=dict)
    """Of a place: seconds and test."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's."""
        missing = list(self.waits)
        for _, tests in groupby(session.items, key=lambda item: item.path):
            items = list(tests)
            session._setupstate.teardown_exact(items[0])  # the file before
            if missing:
                self._look(items, missing)
                missing = [wait for wait in missing if not self._noticed(wait)]
        for wait in missing:
            self.found(Found(wait.place, wait.line, "", "", len(self._reached.get(wait.place, []))))
        session._setupstate.teardown_exact(None)  # ends the workers
        return True

    def _look(self, items: Sequence[pytest.Item], waits: Sequence[Wait]) -> None:
        """What each test reaches, with nothing taken out."""
        by_file = groupby(waits, key=lambda wait: wait.file)
        pool.PLANTED.update(
            {file: telling(file, list(places), REACHED) for file, places in by_file}
        )
        for item in items:
            pool.RECORDS.clear()
            began = time.monotonic()
            failed = _failed(item)
            if failed is not None:
                raise pytest.UsageError(
                    f"{item.name} fails with nothing taken out:\n{failed.longreprtext}"
                )
            seconds = time.monotonic() - began
            for place in frozenset().union(*(record.reached for record in pool.RECORDS)):
                self._reached.setdefault(place, []).append((seconds, item))
        pool.PLANTED.clear()

    def _noticed(self, wait: Wait) -> bool:
        tests = self._reached.get(wait.place, [])
        for _, item in sorted(tests, key=lambda test: test[0]):
            if item.path != tests[-1][1].path:  # ran with the file before
                continue
            pool.PLANTED[wait.file] = without(wait)
            with pytest.MonkeyPatch.context() as shorter:
                shorter.setattr(pool, "SECONDS", SECONDS)
                failed = _failed(item)
            pool.PLANTED.clear()
            if failed is not None:
                self.found(Found(wait.place, wait.line, item.name, _told(failed), len(tests)))
                return True
        return False


def _failed(item: pytest.Item) -> pytest.TestReport | None:
    """Run a test; what it shares with the others of its file is kept, if it is not the only one."""
    then = next(
        (other for other in item.session.items if other.path == item.path and other is not item),
        None,
    )
    return next(
        (report for report in runtestprotocol(item, log=False, nextitem=then) if report.failed),
        None,
    )


def _told(report: pytest.TestReport) -> str:
    errors = [
        line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E  ")
    ]
    said: Iterator[str] = (
        line for line in errors if " x rank " in line or "assert" in line or "Error" in line
    )
    return next(said, errors[0] if errors else "")[:160]


def run(waits: Sequence[Wait], found: Callable[[Found], None]) -> None:
    """Tell `found` of every wait."""
    code = pytest.main(["-q", "-p", "no:cacheprovider", *TESTS], plugins=[Session(waits, found)])
    if code != pytest.ExitCode.OK:
        raise SystemExit(int(code))
