"""Time that passes when a test says so: nothing sleeps, and what else the machine does changes no decision."""

import time
from contextlib import contextmanager
from unittest.mock import patch


class Clock:
    """Seconds since any beginning. To be asked takes a tenth of a microsecond, so that no two answers are the same."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        """Like `time.perf_counter`."""
        self.now += 1e-7
        return self.now

    def sleep(self, seconds):
        """Let time pass."""
        self.now += seconds

    @contextmanager
    def instead(self):
        """Inside, `time.perf_counter` is this one's. Nothing may wait there until enough time has passed."""
        with patch.object(time, "perf_counter", self.perf_counter):
            yield
