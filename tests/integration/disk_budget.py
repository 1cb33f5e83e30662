"""Builds, trains and evaluates a model whose states do not fit a budget, and prints what the process held in each phase.
Run by test_disk_budget.py in a process of its own."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import plait

WIDTH, BLOCKS = 1024, 48


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, hidden):
        return hidden + F.relu(self.inner(hidden))


class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def resident():
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Watch:
    """The most bytes that were resident in each phase."""

    def __init__(self):
        self.baseline = resident()
        self.most: dict[str, int] = {}
        self._phase = ""
        self._running = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        while self._running:
            phase, now = self._phase, resident() - self.baseline
            self.most[phase] = max(self.most.get(phase, 0), now)
            time.sleep(0.002)

    def begin(self, phase):
        self._phase = phase

    def end(self):
        self._running = False
        self._thread.join()
        return {phase: most for phase, most in self.most.items() if phase}


OFFLOADS: dict[str, dict[str, Any]] = {
    "memory": {},
    "states": {"offload_optimizer": {"device": "nvme", "buffer_size": 3_000_000}},
    "parameters": {"offload_param": {"device": "nvme", "buffer_size": 1_100_000}},
    "everything": {
        "offload_optimizer": {"device": "nvme", "buffer_size": 3_000_000},
        "offload_param": {"device": "nvme", "buffer_size": 1_100_000},
    },
}
"""Files of the states in pieces of 12 MB, of the parameters with a pool for five blocks."""


def run(folder, where, *, width, blocks, watch=None):
    """Build, train and evaluate, and what that gave."""
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, width, generator=generator), torch.randn(4, width, generator=generator))
    begin = watch.begin if watch is not None else lambda phase: None
    with torch.device("meta"):
        model = Model(width, blocks)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            **{name: {**section, "nvme_path": folder} for name, section in OFFLOADS[where].items()},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "communication_data_type": "fp32",
    }
    loss = plait.per_sample(
        lambda output, batch: F.mse_loss(output.float(), batch[1], reduction="sum")
    )
    begin("building")
    engine = plait.initialize(model, config, loss_fn=loss)
    losses = []
    for _ in range(2):
        begin("training")
        losses += [float(engine.train_batch(batch)) for _ in range(2)]
        begin("evaluation")
        losses.append(engine.eval_batch(batch)[0])
    parameters = 4 * sum(p.numel() for p in engine.model.parameters())
    found = {
        "resident": watch.end() if watch else {},
        "parameters": parameters,
        "states": 4 * parameters,
        "losses": losses,
    }
    engine.close()
    return found


def main(folder, where):
    """Print one JSON object."""
    torch.set_num_threads(1)
    run(folder, where, width=8, blocks=2)  # what is imported on first use belongs to the baseline
    print(json.dumps(run(folder, where, width=WIDTH, blocks=BLOCKS, watch=Watch())))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
