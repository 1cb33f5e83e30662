"""Cost of the watchdog and of the checks of every step.

Two ranks run rounds in turn with both and without. The processes are the same, because equal runs
differ by 3 % in where their memory lies. torch's record of collectives, which the watchdog reads,
is on in both: it is by default, and cannot be switched while a process runs.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.faults.forks import Ranks

HIDDEN, LAYERS, SAMPLES, WORLD = 512, 6, 64, 2
STEPS = 8
"""Steps per round."""


def measure(rounds: int) -> dict[str, Any]:
    """Return the median ratios of neighbouring rounds with both and without.

    `wall` is a ratio of times. `cpu` is one of processor time, which other programs disturb less.
    """
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [(os.pipe(), os.pipe()) for _ in range(WORLD)]
        ends = [(go[0], done[1]) for go, done in pipes]
        log = Path(folder) / "log"
        variables = {"PLAIT_WATCH_FOLDER": folder, "TORCH_FR_BUFFER_SIZE": "64"}
        ranks = Ranks(_run_rounds, WORLD, ends, log=log, environment=variables)

        def run_round(checked: bool) -> tuple[float, float]:
            for go, _ in pipes:
                os.write(go[1], b"1" if checked else b"0")
            answers = []
            for _, done in pipes:
                text = os.read(done[0], 100).decode()
                if not text or len(ranks.poll()) < WORLD:
                    raise SystemExit(f"a rank ended:\n{log.read_text()[-2000:]}")
                answers.append([float(number) for number in text.split()])
            return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)

        for number in range(-2, rounds):  # two rounds are not counted
            for checked in (True, False) if number % 2 else (False, True):
                seconds = run_round(checked)
                if number >= 0:
                    times[checked].append(seconds)
        for go, _ in pipes:
            os.write(go[1], b".")
        ranks.wait(20)

    pairs = list(zip(times[True], times[False], strict=True))
    wall, cpu = (
        statistics.median(checked[index] / plain[index] for checked, plain in pairs)
        for index in range(2)
    )
    step = 1000 * statistics.median(seconds for seconds, _ in times[False]) / STEPS
    return {"rounds": rounds, "step_milliseconds": step, "wall": wall, "cpu": cpu}


def _run_rounds(rank: int, ends: list[tuple[int, int]]) -> None:
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
    while (order := os.read(go, 1)) != b".":
        engine.stepper.checks_finite = order == b"1"
        WATCH.disarm()
        if order == b"1":
            WATCH.arm()
        engine.train_batch(batch)
        dist.barrier()
        began = time.perf_counter()
        used = time.process_time()
        for _ in range(STEPS):
            engine.train_batch(batch)
        text = f"{time.perf_counter() - began} {time.process_time() - used}"
        os.write(done, text.encode())
    engine.close()
