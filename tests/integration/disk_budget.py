"""Trains a model whose states do not fit a budget and prints what it held. Run by test_disk_budget.py in a process of its own."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.engine.engine import Engine

WIDTH, BLOCKS = 1024, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.relu(self.inner(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def train(engine: Engine, steps: int) -> tuple[int, list[float]]:
    """(the most bytes resident during `steps` steps, their losses)."""
    most, running = 0, True

    def watch() -> None:
        nonlocal most
        while running:
            most = max(most, resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
    losses = [float(engine.train_batch(batch)) for _ in range(steps)]
    running = False
    watcher.join()
    return most, losses


def main(folder: str, on_disk: bool) -> None:
    """Print one JSON object."""
    torch.set_num_threads(1)
    baseline = resident()
    with torch.device("meta"):
        model = Model()
    offload = {"device": "nvme", "nvme_path": folder, "buffer_size": 3_000_000} if on_disk else {"device": "none"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "communication_data_type": "fp32",
    }
    loss = plait.per_sample(lambda output, batch: F.mse_loss(output.float(), batch[1], reduction="sum"))
    engine = plait.initialize(model, config, loss_fn=loss)
    most, losses = train(engine, 4)
    parameters = sum(p.numel() for p in engine.model.parameters())
    print(json.dumps({"resident": most - baseline, "states": 16 * parameters, "losses": losses}))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "disk")
