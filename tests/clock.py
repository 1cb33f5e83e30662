"""A clock that advances only when a test says so.

Nothing sleeps, and no decision depends on what else the machine does.
"""

import time
from contextlib import contextmanager
from unittest.mock import patch


class Clock:
    """Seconds since an arbitrary start.

    Each reading takes a tenth of a microsecond, so no two readings are the same.
    """

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
        """Replace `time.perf_counter` inside. Code that waits for a duration would never end."""
        with patch.object(time, "perf_counter", self.perf_counter):
            yield
