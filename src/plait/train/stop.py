"""Request of SIGINT, SIGTERM or SIGUSR1 to stop a run, which the loop reads between steps.

Note [Stopping together]
    A signal reaches the ranks at different moments, or only one of them. A rank that stopped alone
    would leave the others waiting in a collective forever. All ranks therefore stop after the first
    step in which any of them was asked to.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

# Schedulers of clusters send SIGUSR1 shortly before a time limit.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

STOP_REQUESTED = 1
"""Number that stands for a request of the program itself, in place of a signal.

It is less than any signal of `_SIGNALS`, so that the signal wins if both occur.
"""


class StopRequest:
    """Context manager that turns signals into a request to stop.

    The first SIGINT, SIGTERM or SIGUSR1 is recorded. A second SIGINT raises KeyboardInterrupt.

    Args:
        on_request: Called by the signal handler when a signal is recorded.

    Attributes:
        number: Signal that was received, ASKED, or 0 without a request.
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        self.number = 0
        self._on_request = on_request
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = {
            number: signal.signal(number, self._handle) for number in _SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._on_request is not None:
            self._on_request()

    def ask(self) -> None:
        """Request the end of the run, as a signal does, but with exit code 0."""
        self.number = self.number or STOP_REQUESTED

    def shared(self, *, device: torch.device, is_due: bool = False) -> torch.Tensor:
        """Return the request of all processes of the default group. Collective.

        Every process calls this in every step. Without a process group the result is the request of
        this process. See Note [Stopping together].

        Args:
            device: Device of the result.
            is_due: Whether a checkpoint is due by the clock of this process. Clocks differ.

        Returns:
            A float64 tensor [1] on `device`, which the loop reads together with the other numbers
            of the step. Its integral part is the signal that stops the run, ASKED, or 0. Its
            fraction is 0.5 if a checkpoint is due on a process with the largest integral part. A
            run that stops writes a checkpoint anyway.
        """
        number = self.number + 0.5 * is_due
        # `full` is a kernel. A tensor made from a Python number would be copied to the device.
        request = torch.full((1,), number, dtype=torch.float64, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(request, op=dist.ReduceOp.MAX)
        return request
