"""What runs inside a worker process: build one baseline, then do steps when told.

Messages are (verb, arguments); answers are plain values. Batches are made before the clock starts, and the clock runs between two
barriers, so a turn lasts until its slowest rank is done.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training_step import phases
from benchmarks.training_step.baselines import Baseline, Step
from benchmarks.training_step.workload import Workload, batch


def start(argument: tuple[Baseline, Workload]) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """Build the baseline and return what answers messages."""
    baseline, workload = argument
    torch.set_num_threads(workload.threads)
    return answers(Runner(baseline.build(workload), workload))


def answers(runner: Runner) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """What answers messages with the methods of `runner`."""
    verbs: dict[str, Callable[..., Any]] = {
        "turn": runner.turn,
        "phases": runner.phases,
        "operators": runner.operators,
    }

    def handle(message: tuple[str, dict[str, Any]]) -> Any:
        verb, arguments = message
        return verbs[verb](**arguments)

    return handle


class Runner:
    """Counts the steps of a baseline, so that step i always sees batch i."""

    roots: tuple[str, ...] = ("LlamaForCausalLM",)
    """Class names of the module whose call is a forward."""

    def __init__(self, step: Step, workload: Workload) -> None:
        self.step = step
        self.workload = workload
        self.rank = int(os.environ["RANK"])
        self.done = 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """What this rank's step number `step` sees."""
        return batch(self.workload, step=step, rank=self.rank)

    def _upcoming(self, count: int) -> list[dict[str, torch.Tensor]]:
        made = [self.batch(self.done + i) for i in range(count)]
        self.done += count
        return made

    def turn(self, *, warm: int, steps: int) -> dict[str, Any]:
        """`warm` steps without the clock, then `steps` with it. Wall and processor seconds a step (all threads of this rank), every step's
        loss and gradient norm, peak bytes."""
        batches = self._upcoming(warm + steps)
        gc.collect()
        results = [self.step(each) for each in batches[:warm]]
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        results += [self.step(each) for each in batches[warm:]]
        dist.barrier()
        return {
            "seconds": (time.perf_counter() - began) / steps,
            "processor_seconds": (time.process_time() - used) / steps,
            "losses": [loss for loss, _ in results],
            "norms": [norm for _, norm in results],
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def phases(self, *, warm: int, steps: int) -> dict[str, float]:
        """Milliseconds a step and phase; see `phases.measure`."""
        batches = iter(self._upcoming(warm + steps))
        for _ in range(warm):
            self.step(next(batches))
        dist.barrier()
        return phases.measure(lambda: self.step(next(batches)), steps=steps, roots=self.roots)

    def operators(self, *, warm: int, steps: int, rows: int) -> dict[str, str]:
        """Two tables of torch's profiler on this rank: by self time, and the collectives."""
        batches = iter(self._upcoming(warm + steps))
        for _ in range(warm):
            self.step(next(batches))
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                self.step(next(batches))
        averages = profile.key_averages()
        collectives = [
            each for each in averages if each.key.startswith(("c10d::", "gloo:", "nccl:"))
        ]
        lines = [
            f"{each.key:<48}{each.count / steps:>8.1f} calls/step {each.cpu_time_total / steps / 1000:>10.2f} ms/step"
            for each in sorted(collectives, key=lambda each: -each.cpu_time_total)
        ]
        return {
            "operators": str(
                averages.table(
                    sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=60
                )
            ),
            "collectives": "\n".join(lines),
        }
