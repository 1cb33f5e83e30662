"""The worker of a baseline. It builds the step, and runs some steps when it is asked to.

Messages are (method of `Runner`, arguments). Batches are made before the clock starts, and the
clock runs between two barriers, so that a turn lasts until its slowest rank is done.
"""

import gc
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.steps import phases
from benchmarks.steps.baselines import Baseline, Step
from benchmarks.steps.workload import Workload, batch

MODELS = ("LlamaForCausalLM", "LlamaStage")
"""Class names of the modules whose call is a forward."""


def start(argument: tuple[Baseline, Workload]) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """Build the baseline and return what answers messages."""
    baseline, workload = argument
    torch.set_num_threads(workload.threads)
    runner = Runner(baseline.build(workload), workload)
    return lambda message: getattr(runner, message[0])(**message[1])


class Runner:
    """Counts the steps of a baseline, so that step i of every baseline has batch i."""

    def __init__(self, step: Step, workload: Workload) -> None:
        self._step = step
        self._workload = workload
        self._rank = int(os.environ["RANK"])
        self._done = 0

    def _next_batches(self, count: int) -> list[dict[str, torch.Tensor]]:
        steps = range(self._done, self._done + count)
        self._done += count
        return [batch(self._workload, step=step, rank=self._rank) for step in steps]

    def turn(self, *, warm: int, steps: int) -> dict[str, Any]:
        """Run `warm` steps without the clock, then `steps` with it.

        Returns:
            Wall seconds and processor seconds (all threads) per step, the loss and the gradient
            norm of each step, and the largest resident size in bytes.
        """
        batches = self._next_batches(warm + steps)
        gc.collect()
        results = [self._step(inputs) for inputs in batches[:warm]]
        dist.barrier()
        began = time.perf_counter()
        processor = time.process_time()
        results += [self._step(inputs) for inputs in batches[warm:]]
        dist.barrier()
        return {
            "seconds": (time.perf_counter() - began) / steps,
            "processor_seconds": (time.process_time() - processor) / steps,
            "losses": [loss for loss, _ in results],
            "norms": [norm for _, norm in results],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def phases(self, *, warm: int, steps: int) -> dict[str, float]:
        batches = iter(self._next_batches(warm + steps))
        for _ in range(warm):
            self._step(next(batches))
        dist.barrier()
        return phases.measure(lambda: self._step(next(batches)), steps=steps, models=MODELS)
