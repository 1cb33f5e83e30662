"""What the watchdog and the checks of every step cost: two runs of two ranks in turn, one with them and one without, round by round."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
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


def measure(rounds: int, *, steps: int = 4) -> Overhead:
    """Interleaved; which of the two is first alternates."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _Run(Path(folder) / name, checked=name == "with", steps=steps) for name in ("with", "without")}
        for run in runs.values():
            run.round()
        times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        for number in range(rounds):
            for name in ("with", "without") if number % 2 else ("without", "with"):
                times[name].append(runs[name].round())
        for run in runs.values():
            run.end()
    wall, cpu = ([one[which] / other[which] for one, other in zip(times["with"], times["without"], strict=True)] for which in range(2))
    step = 1000 * statistics.median(one[0] for one in times["without"]) / steps
    return Overhead(rounds, steps, round(step, 2), round(statistics.median(wall), 4), round(statistics.median(cpu), 4))


class _Run:
    """Two ranks that do a round when they are told to."""

    def __init__(self, folder: Path, *, checked: bool, steps: int) -> None:
        folder.mkdir()
        self._pipes = [(os.pipe(), os.pipe()) for _ in range(WORLD)]
        ends = [(go[0], done[1]) for go, done in self._pipes]
        environment = {"PLAIT_WATCH_FOLDER": str(folder), "TORCH_FR_BUFFER_SIZE": "64"} if checked else {"TORCH_FR_BUFFER_SIZE": "0"}
        self._log = folder / "log"
        self._ranks = Ranks(_rounds, WORLD, ends, checked, steps, log=self._log, environment=environment)

    def round(self) -> tuple[float, float]:
        """(seconds, processor seconds of all ranks)."""
        for go, _ in self._pipes:
            os.write(go[1], b"1")
        found = []
        for _, done in self._pipes:
            text = os.read(done[0], 100).decode()
            if not text or len(self._ranks.poll()) < WORLD:
                raise SystemExit(f"a rank ended:\n{self._log.read_text()[-2000:]}")
            found.append([float(number) for number in text.split()])
        return max(wall for wall, _ in found), sum(cpu for _, cpu in found)

    def end(self) -> None:
        for go, _ in self._pipes:
            os.write(go[1], b"0")
        self._ranks.wait(20)


def _rounds(rank: int, ends: list[tuple[int, int]], checked: bool, steps: int) -> None:
    from unittest.mock import patch

    import plait
    from plait.comm.watch import Watch

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 2},
    }
    with patch.object(Watch, "arm", Watch.arm if checked else lambda _: None):
        engine = plait.initialize(model, config, loss_fn=lambda output, batch: (output.square().sum(), len(output)), weight_fn=len)
    engine.stepper.asks = checked
    batch = torch.randn(SAMPLES, HIDDEN)
    go, done = ends[rank]
    while os.read(go, 1) == b"1":
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            engine.train_batch(batch)
        os.write(done, f"{time.perf_counter() - began} {time.process_time() - used}".encode())
    engine.close()
