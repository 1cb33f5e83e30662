"""Whether gradients travel as int8 or int4 where the user allows it: the first steps of a run are whole, and show what that would save.

Links alone cannot say it: what a step gains is no more than what it waits. So the run's own steps are timed. A way saves the smaller of
what the step waits for its gradients and what the way takes less on the measured links. int8 is taken where it saves a tenth of a step,
int4 where that saves another tenth; with error feedback unless that is off. Decided once, alike on every rank of the group, and kept in
the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from plait.comm.buckets import Buckets, Flat
from plait.parallel.reducer import Reducer

SHARE = 0.1
"""Of a step, which fewer bits have to save."""
_UNCOUNTED, _COUNTED = 2, 3
"""Steps: caches and buffers come into being first."""


@dataclass(frozen=True)
class Option:
    """A way to compress that may be taken."""

    bits: int
    saves_seconds: float
    """What it takes less for all gradients of a step, by the links."""
    make_buckets: Callable[[Sequence[Flat]], Buckets]
    bucket_bytes: int
    """Of gradients in a compressed bucket."""


@dataclass
class Trial:
    """Call `after_step` once a step, between two of them."""

    reducer: Reducer
    options: tuple[Option, ...]
    """Most bits first."""
    verdict: torch.Tensor = field(default_factory=lambda: torch.full((), -1, dtype=torch.int64))
    """-1 not yet; 0 whole; else the bits of a number. For a checkpoint."""
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _before: float | None = None

    def after_step(self, waited_seconds: float) -> str:
        """Count a step that waited so long for its gradients. What was decided, for people, after the step that decides; else nothing.
        Collective over the group at that step."""
        if int(self.verdict) >= 0:
            return ""
        now = time.perf_counter()
        if self._before is not None:
            self._steps.append((now - self._before, waited_seconds))
        self._before = now
        if len(self._steps) < _UNCOUNTED + _COUNTED:
            return ""
        taken, waited = (median(step[index] for step in self._steps[_UNCOUNTED:]) for index in (0, 1))
        # The longest step, and the shortest wait: the rank that comes last waits for the links only.
        longest = torch.tensor([taken, -waited], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.reducer.group)
        taken, waited = float(longest[0]), -float(longest[1])
        chosen, best = 0, 0.0
        saves = {option.bits: min(waited, option.saves_seconds) for option in self.options}
        for bits, saved in saves.items():
            if saved - best > SHARE * taken:
                chosen, best = bits, saved
        self.conclude(chosen)
        told = ", ".join(f"int{bits} saves {saved * 1e3:.3g} ms" for bits, saved in saves.items())
        said = f"a step takes {taken * 1e3:.3g} ms and waits {waited * 1e3:.3g} ms of them for gradients; {told}"
        if chosen:
            return f"gradients travel as int{chosen} from here on: {said}"
        return f"gradients stay whole: {said}, less than {SHARE:.0%}"

    def conclude(self, bits: int) -> None:
        """Decide, or take over what was decided before; 0 leaves gradients whole."""
        self.verdict.fill_(bits)
        if bits:
            option = next(option for option in self.options if option.bits == bits)
            self.reducer.rebuild(option.make_buckets, bucket_bytes=option.bucket_bytes, separate_vectors=True)
