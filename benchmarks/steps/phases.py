"""Phases of a step, measured from outside in the same way for every baseline.

Forward is the call of the model, backward the call into autograd, and optimizer the step of the
innermost `torch.optim.Optimizer`. The rest of the step is `other`. The main thread is busy, or it
waits for a collective or for a core. The clock is not attached in timed rounds.
"""

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
    """Seconds of wall time and of processor time of the main thread per phase."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float, float]] = []

    def begin(self, phase: str) -> None:
        """Enter a phase. The time of an inner phase is not counted in the outer one."""
        self._settle()
        self._open.append((phase, time.perf_counter(), time.thread_time()))

    def end(self) -> None:
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
        # A pipeline stage may be left by an exception.
        module_hooks.register_module_forward_hook(after, always_call=True),
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


def measure(step: Callable[[], object], *, steps: int, models: Collection[str]) -> dict[str, float]:
    """Run some steps, and return milliseconds per step.

    Args:
        step: One training step.
        steps: Number of steps.
        models: Class names of the modules whose call is a forward.

    Returns:
        `<phase>` and `<phase> waiting` for each of PHASES, `total`, and `threads`, the processor
        time of all other threads of this process.
    """
    clock = Clock()
    names = {*models, *(f"FSDP{model}" for model in models)}
    wall = time.perf_counter()
    busy = time.thread_time()
    process = time.process_time()
    with _attached(clock, lambda module: type(module).__name__ in names):
        for _ in range(steps):
            clock.begin("other")
            step()
            clock.end()
    other_threads = time.process_time() - process - (time.thread_time() - busy)
    seconds = {"total": time.perf_counter() - wall, "threads": other_threads}
    for phase in PHASES:
        seconds[phase] = clock.wall[phase]
        seconds[f"{phase} waiting"] = clock.wall[phase] - clock.busy[phase]
    return {name: 1000 * value / steps for name, value in seconds.items()}
