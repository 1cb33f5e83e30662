"""Seconds between the ends of two steps: by the device's own clock where steps are queued on
one.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """A GPU is behind the program: when the numbers of a step are read, the next one may be queued
    or done already. So ends of steps are events among the device's work. Elsewhere a step has ended
    when `seconds` asks.
    """

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._device = (
            device if accelerator is not None and accelerator.type == device.type else None
        )
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._last = self.mark()
        if self._last is None:
            self._last = time.perf_counter()

    def mark(self) -> Any:
        """What was queued so far, as an event of the device; None on a CPU."""
        if self._device is None:
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, ended: Any) -> float:
        """From the end of the step before, or from `restart`, to `ended`; waits for it. Steps are
        asked for in their order.
        """
        before = self._last
        self._last = time.perf_counter() if ended is None else ended
        if ended is None:
            return float(self._last - before)
        ended.synchronize()
        return float(before.elapsed_time(ended)) / 1e3
