"""Script of `ranks.py` for `plait launch`: a small model with a fault in the loss of one rank."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plait
from tools.faults.forks import Notes

HIDDEN = 64
FOREVER = 10_000


def fail(error: BaseException) -> None:
    raise error


def fail_and_stay() -> None:
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    raise ValueError("a planted exception in the loss")


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": lambda: fail(ValueError("a planted exception in the loss")),
    "out of memory": lambda: fail(MemoryError("a planted lack of memory")),
    "disk full": lambda: fail(OSError(28, "No space left on device", "/planted/file")),
    "bad batch": lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "exit 0": lambda: sys.exit(0),
    "exit 7": lambda: os._exit(7),
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # A call through PyDLL keeps the lock of the interpreter.
    "interpreter's lock": lambda: ctypes.PyDLL(None).sleep(FOREVER),
    "failed and does not end": fail_and_stay,
}


def happen(kind: str) -> None:
    """Plant the fault. The messages of a hang name this function."""
    if kind == "sleep":
        time.sleep(FOREVER)
    elif kind == "blocked read":
        os.read(os.pipe()[0], 1)
    else:
        FAULTS[kind]()


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "parallel": {"transport": plan["transport"]},
        "faults": {"timeout_seconds": plan["timeout"]},
    }
    step = 0
    chance = random.Random(plan.get("seed", 0))
    notes = Notes(Path(plan["notes"]))

    def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        if engine.rank == plan["rank"] and step == plan["step"]:
            notes.add("fault")
            happen(plan["kind"])
        is_chosen = chance.randrange(engine.world_size) == engine.rank
        if plan["kind"] == "slow" and is_chosen and step % 2:
            time.sleep(plan["stall"])
        return output.square().sum(), len(output)

    engine = plait.initialize(model, config, loss_fn=plait.WeightedLoss(loss_fn, len))
    notes.add("start", os.getpid())
    for step in range(1, plan["steps"] + 1):  # noqa: B007 the loss reads it
        engine.train_batch(torch.randn(2, HIDDEN))
    notes.add("end")
    engine.close()


main(json.loads(sys.argv[1]))
