"""Clock that measures the seconds between the ends of two steps."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Measures the time between the ends of consecutive steps.

    A GPU runs behind the program: when the numbers of a step are read, the next step may be queued
    or even finished. The clock therefore records the end of a step as an event on the device. On a
    CPU a step has ended when `seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._device: torch.device | None = None
        if accelerator is not None and accelerator.type == device.type:
            self._device = device
        self.restart()

    def restart(self) -> None:
        """Start the next measurement now."""
        self._last = self.mark()
        if self._last is None:
            self._last = time.perf_counter()

    def mark(self) -> Any:
        """Record an event after the work queued so far, and return it. None on a CPU."""
        if self._device is None:
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, end: Any) -> float:
        """Return the seconds since the previous end, or since `restart`. Waits for the device.

        Args:
            end: Result of `mark` at the end of a step. Steps must be passed in their order.
        """
        previous = self._last
        if end is None:
            self._last = time.perf_counter()
            return float(self._last - previous)

        self._last = end
        end.synchronize()
        return float(previous.elapsed_time(end)) / 1e3
