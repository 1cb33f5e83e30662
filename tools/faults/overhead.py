"""Cost of the watchdog and of the checks of every step.

Two ranks run rounds in turn with both and without. The processes are the same, because equal runs
differ by 3 % in where their memory lies. torch's record of collectives, which the watchdog reads,
is on in both: it is by default, and cannot be switched while a process runs.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
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
    pipes, ends = zip(*(multiprocessing.Pipe() for _ in range(WORLD)), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        variables = {"PLAIT_WATCH_FOLDER": folder, "TORCH_FR_BUFFER_SIZE": "64"}
        ranks = Ranks(_run_rounds, WORLD, ends, log=log, environment=variables)

        def run_round(checked: bool) -> tuple[float, float]:
            for pipe in pipes:
                pipe.send(checked)
            longest = total = 0.0
            for pipe in pipes:
                while not pipe.poll(0.1):
                    if len(ranks.running()) < WORLD:
                        raise SystemExit(f"a rank ended:\n{log.read_text()[-2000:]}")
                wall, cpu = pipe.recv()
                longest = max(longest, wall)
                total += cpu
            return longest, total

        for number in range(-2, rounds):  # two rounds are not counted
            for checked in (True, False) if number % 2 else (False, True):
                seconds = run_round(checked)
                if number >= 0:
                    times[checked].append(seconds)
        for pipe in pipes:
            pipe.send(None)
        ranks.wait(20)

    # [rounds, (wall, cpu)]
    plain = np.array(times[False])
    wall, cpu = np.median(np.array(times[True]) / plain, axis=0).tolist()
    step = 1000 * float(np.median(plain[:, 0])) / STEPS
    return {"rounds": rounds, "step_milliseconds": step, "wall": wall, "cpu": cpu}


def _run_rounds(rank: int, ends: Sequence[Connection]) -> None:
    import plait
    from plait.comm.watch import WATCH

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 2},
    }
    loss_fn = plait.WeightedLoss(lambda output, batch: (output.square().sum(), len(output)), len)
    engine = plait.initialize(model, config, loss_fn=loss_fn)
    batch = torch.randn(SAMPLES, HIDDEN)
    while (checked := ends[rank].recv()) is not None:
        engine.stepper.checks_finite = checked
        WATCH.disarm()
        if checked:
            WATCH.arm()
        engine.train_batch(batch)
        dist.barrier()
        began = time.perf_counter()
        used = time.process_time()
        for _ in range(STEPS):
            engine.train_batch(batch)
        ends[rank].send((time.perf_counter() - began, time.process_time() - used))
    engine.close()
