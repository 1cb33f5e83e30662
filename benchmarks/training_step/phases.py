"""Where the time of a step goes, seen from outside and the same way for every baseline.

Forward is the call of the root module, backward the call into autograd, optimizer the step of the innermost `torch.optim.Optimizer`;
the rest of the step (clipping, gathering updated parameters, bookkeeping) is `other`. In each phase the main thread is either busy or
waiting, which here means waiting for a collective or for a core that a communication thread holds. Nothing is recorded inside the
timed rounds: the clock is attached for a turn of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

PHASES = ("forward", "backward", "optimizer", "other")


class Clock:
    """Seconds of wall time and of main-thread processor time a phase, summed over steps."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float, float]] = []

    def begin(self, phase: str) -> None:
        """Enter a phase. Phases may nest: the inner one's time is not counted in the outer one."""
        self._settle()
        self._open.append((phase, time.perf_counter(), time.thread_time()))

    def end(self) -> None:
        """Leave the innermost phase."""
        self._settle()
        self._open.pop()
        if self._open:
            self._open[-1] = (self._open[-1][0], time.perf_counter(), time.thread_time())

    def _settle(self) -> None:
        if self._open:
            phase, wall, busy = self._open[-1]
            self.wall[phase] += time.perf_counter() - wall
            self.busy[phase] += time.thread_time() - busy


@contextmanager
def _attached(clock: Clock, is_root: Callable[[nn.Module], bool]) -> Iterator[None]:
    def before(module: nn.Module, _: Any) -> None:
        if is_root(module):
            clock.begin("forward")

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if is_root(module):
            clock.end()

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        clock.begin("backward")
        try:
            backward(*args, **kwargs)
        finally:
            clock.end()

    backward = torch.autograd.backward
    handles = [
        module_hooks.register_module_forward_pre_hook(before),
        module_hooks.register_module_forward_hook(
            after, always_call=True
        ),  # a pipeline stage may leave by an exception
        optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: clock.begin("optimizer")),
        optimizer_hooks.register_optimizer_step_post_hook(lambda *_: clock.end()),
    ]
    torch.autograd.backward = timed_backward
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


def measure(step: Callable[[], object], *, steps: int, roots: Collection[str]) -> dict[str, float]:
    """Milliseconds a step: `<phase>` wall time and `<phase> waiting` for each of PHASES, `total`, and `threads`, the processor time of
    all other threads of this process. `roots` are the class names that a model may have."""
    clock = Clock()
    names = {*roots, *(f"FSDP{root}" for root in roots)}
    wall, busy, process = time.perf_counter(), time.thread_time(), time.process_time()
    with _attached(clock, lambda module: type(module).__name__ in names):
        for _ in range(steps):
            clock.begin("other")
            step()
            clock.end()
    wall, busy, process = (
        time.perf_counter() - wall,
        time.thread_time() - busy,
        time.process_time() - process,
    )
    found = {"total": wall, "threads": process - busy}
    for phase in PHASES:
        found[phase] = clock.wall[phase]
        found[f"{phase} waiting"] = clock.wall[phase] - clock.busy[phase]
    return {name: 1000 * seconds / steps for name, seconds in found.items()}
