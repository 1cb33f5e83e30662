"""Ctrl-C, SIGTERM and SIGUSR1 as a request that the loop reads between steps, agreed on by all
ranks.

A signal reaches ranks at different moments, or only one of them. A rank that stopped alone would
leave the others waiting in a collective for ever, so all stop after the first step in which any of
them was asked to.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send SIGUSR1 before a limit of time."""
ASKED = 1
"""In place of a signal's number: the program itself asked. Less than any signal of _SIGNALS, which
counts where both ask.
"""


class StopRequest:
    """Listens for SIGINT, SIGTERM and SIGUSR1 while it is entered as a context. The first one asks,
    a second SIGINT interrupts at once.
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        self.number = 0
        """The signal that asked, or ASKED; 0 while there is none."""
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._on_request is not None:
            self._on_request()

    def ask(self) -> None:
        """End the run as a signal does, and with exit code 0."""
        self.number = self.number or ASKED

    def shared(self, *, device: torch.device, is_due: bool = False) -> torch.Tensor:
        """Return the request of all processes of the default group. Collective.

        Every process calls this in every step. Without a group the answer is this process's own.

        Args:
            device: Device of the result.
            is_due: Whether a checkpoint is due by the clock of this process. Clocks differ.

        Returns:
            A float64 tensor [1] on `device`, which the loop reads together with the other numbers
            of the step. Its integral part is the signal that stops the run, ASKED, or 0. Its
            fraction is 0.5 if a checkpoint is due on a process with the largest integral part. A
            run that stops writes a checkpoint anyway.
        """
        number = self.number + (0.5 if is_due else 0.0)
        # `full` is a kernel. A tensor made from a Python number would be copied to the device.
        answer = torch.full((1,), number, dtype=torch.float64, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return answer
