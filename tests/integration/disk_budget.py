"""Builds, trains and evaluates a model, and prints the peak resident memory of each phase.

test_disk_budget.py runs it in a process.
"""

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

WIDTH = 1024
BLOCKS = 48


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
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Watch:
    """Thread that records the peak resident bytes of each phase, above those at the start."""

    def __init__(self):
        self.baseline = resident()
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self._running = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        while self._running:
            phase = self._phase
            self.peaks[phase] = max(self.peaks.get(phase, 0), resident() - self.baseline)
            time.sleep(0.002)

    def begin(self, phase):
        self._phase = phase

    def end(self):
        self._running = False
        self._thread.join()
        return {phase: peak for phase, peak in self.peaks.items() if phase}


# Buffers of 12 MB for states, and of one block for parameters.
STATES = {"offload_optimizer": {"device": "nvme", "buffer_size": 3_000_000}}
PARAMETERS = {"offload_param": {"device": "nvme", "buffer_size": 1_100_000}}
OFFLOADS: dict[str, dict[str, Any]] = {
    "memory": {},
    "states": STATES,
    "parameters": PARAMETERS,
    "everything": {**STATES, **PARAMETERS},
}


def run(folder, placement, *, width, blocks, watch=None):
    """Build, train and evaluate, and return memory, sizes and losses."""
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(4, width, generator=generator), torch.randn(4, width, generator=generator))
    begin = watch.begin if watch is not None else lambda phase: None
    with torch.device("meta"):
        model = Model(width, blocks)
    zero: dict[str, Any] = {"stage": 3}
    for name, section in OFFLOADS[placement].items():
        zero[name] = {**section, "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
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
    result = {
        "resident": watch.end() if watch else {},
        "parameters": parameters,
        "states": 4 * parameters,
        "losses": losses,
    }
    engine.close()
    return result


def main(folder, placement):
    """Print one JSON object."""
    torch.set_num_threads(1)
    # A small run imports everything, so that modules are part of the baseline.
    run(folder, placement, width=8, blocks=2)
    print(json.dumps(run(folder, placement, width=WIDTH, blocks=BLOCKS, watch=Watch())))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
