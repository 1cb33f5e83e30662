"""What `plait launch` runs in a planned fault: a small model, and one rank that does something bad in its loss at one step.

plait launch --nproc-per-node 2 tools/faults/worker.py '{"kind": "stop", "rank": 1, "step": 3, "log": "FILE", ...}'
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import plait

HIDDEN = 64


def happen(kind: str, plan: dict[str, Any]) -> None:
    """The fault."""
    if kind == "exception":
        raise ValueError("a planted exception in the loss")
    if kind == "out of memory":
        raise MemoryError("a planted lack of memory")
    if kind == "disk full":
        raise OSError(28, "No space left on device", "/planted/file")
    if kind == "bad batch":
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    if kind == "exit 0":
        sys.exit(0)
    if kind == "exit 7":
        os._exit(7)
    if kind == "segmentation fault":
        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "sleep":
        time.sleep(10_000)
    if kind == "interpreter's lock":
        ctypes.PyDLL(None).sleep(10_000)  # a call through PyDLL keeps the lock
    if kind == "blocked read":
        os.read(os.pipe()[0], 1)
    if kind == "failed and does not end":
        import threading

        threading.Thread(target=time.sleep, args=(10_000,)).start()
        raise ValueError("a planted exception in the loss")


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": plan["stage"]},
        "parallel": {"transport": plan["transport"]},
        "faults": {"timeout_seconds": plan["timeout"]},
    }
    step = 0
    chance = random.Random(plan.get("seed", 0))

    def loss_fn(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        if engine.rank == plan["rank"] and step == plan["step"]:
            note("fault")
            happen(plan["kind"], plan)
        if (
            plan["kind"] == "slow"
            and chance.randrange(engine.world_size) == engine.rank
            and step % 2
        ):
            time.sleep(plan["stall"])
        return output.square().sum(), len(output)

    def note(what: str) -> None:
        with open(plan["log"], "a") as file:
            file.write(f"{json.dumps([what, os.getpid(), engine.rank, step, time.monotonic()])}\n")

    engine = plait.initialize(model, config, loss_fn=plait.WeightedLoss(loss_fn, len))
    note("start")
    for step in range(1, plan["steps"] + 1):  # noqa: B007 the loss reads it
        engine.train_batch(torch.randn(2, HIDDEN))
    note("end")
    engine.close()


main(json.loads(sys.argv[1]))
