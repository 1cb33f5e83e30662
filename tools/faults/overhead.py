"""What the watchdog and the checks of every step cost: a run of two ranks, in turn with them and without, round by round.

The processes are the same, because two equal runs differ by 3 % in where their memory lies. torch's record of collectives, which the
watchdog reads, is on in both: it is by default, and cannot be switched while a process runs.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.faults.forks import Ranks

HIDDEN, LAYERS, SAMPLES, WORLD = 512, 6, 64, 2


@dataclass
class Overhead:
    """Medians."""

    rounds: int
    steps_a_round: int
    step_milliseconds: float
    """Without."""
    wall: float
    """Time of a round with them to that without, of neighbours."""
    cpu: float
    """The same of all processor time of the ranks, which other programs disturb less."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(rounds: int, *, steps: int = 8) -> Overhead:
    """Interleaved; which of the two is first alternates."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(Path(folder), steps=steps)
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(-2, rounds):
            for checked in (True, False) if number % 2 else (False, True):
                found = run.round(checked)
                if number >= 0:
                    times[checked].append(found)
        run.end()
    wall, cpu = (
        [one[which] / other[which] for one, other in zip(times[True], times[False], strict=True)]
        for which in range(2)
    )
    step = 1000 * statistics.median(one[0] for one in times[False]) / steps
    return Overhead(
        rounds,
        steps,
        round(step, 2),
        round(statistics.median(wall), 4),
        round(statistics.median(cpu), 4),
    )


class _Run:
    """Two ranks that do a round when they are told to."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self._pipes = [(os.pipe(), os.pipe()) for _ in range(WORLD)]
        ends = [(go[0], done[1]) for go, done in self._pipes]
        self._log = folder / "log"
        environment = {"PLAIT_WATCH_FOLDER": str(folder), "TORCH_FR_BUFFER_SIZE": "64"}
        self._ranks = Ranks(_rounds, WORLD, ends, steps, log=self._log, environment=environment)

    def round(self, checked: bool) -> tuple[float, float]:
        """(seconds, processor seconds of all ranks)."""
        for go, _ in self._pipes:
            os.write(go[1], b"1" if checked else b"0")
        found = []
        for _, done in self._pipes:
            text = os.read(done[0], 100).decode()
            if not text or len(self._ranks.poll()) < WORLD:
                raise SystemExit(f"a rank ended:\n{self._log.read_text()[-2000:]}")
            found.append([float(number) for number in text.split()])
        return max(wall for wall, _ in found), sum(cpu for _, cpu in found)

    def end(self) -> None:
        for go, _ in self._pipes:
            os.write(go[1], b".")
        self._ranks.wait(20)


def _rounds(rank: int, ends: list[tuple[int, int]], steps: int) -> None:
    import plait
    from plait.comm.watch import WATCH

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 2},
    }
    engine = plait.initialize(
        model,
        config,
        loss_fn=plait.WeightedLoss(lambda output, batch: (output.square().sum(), len(output)), len),
    )
    batch = torch.randn(SAMPLES, HIDDEN)
    go, done = ends[rank]
    while (told := os.read(go, 1)) != b".":
        engine.stepper.checks_finite = told == b"1"
        WATCH.disarm()
        if told == b"1":
            WATCH.arm()
        engine.train_batch(batch)
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            engine.train_batch(batch)
        os.write(done, f"{time.perf_counter() - began} {time.process_time() - used}".encode())
    engine.close()
