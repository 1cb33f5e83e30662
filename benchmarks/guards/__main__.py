"""Time of a step of the quickstart's model with the guards that are always on, beside one without them.

    plait launch --nproc-per-node 2 -m benchmarks.guards     two minutes; writes benchmarks/results/guards.json

The guards are the order of the units' collectives (`_torch.unit_order`) and the comparison of parameters with
their first values (`sharded.unchanged`). Both engines live in the same processes and take turns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import plait
from benchmarks.common.machine import facts
from plait.parallel.techniques import data_parallel
from plait.sharded.guard import STEPS, UnchangedParameters

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "guards.json"
ROUNDS = 60


def build_model() -> torch.nn.Module:
    """Return the model of examples/quickstart.json with random weights."""
    described = json.loads((ROOT / "examples" / "quickstart.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **described["model"]["config"], vocab_size=described["data"]["vocab_size"]
    )
    return AutoModelForCausalLM.from_config(config)


def engines(stage: int) -> tuple[Any, Any]:
    """Return an engine with the guards and one without them."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": {"transport": "torch"},
    }
    guarded = plait.initialize(build_model(), config, loss_fn=plait.causal_lm_loss)
    with patch.object(data_parallel, "_unit_order", lambda *_: None):
        plain = plait.initialize(build_model(), config, loss_fn=plait.causal_lm_loss)
    plain.sharded._unchanged = _NoComparison(plain.model, plain.sharded.mesh)
    return guarded, plain


class _NoComparison(UnchangedParameters):
    def before_update(self) -> None:
        """Skip the comparison."""

    def after_update(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        """Skip the comparison."""


def seconds(engine: Any, batch: dict[str, torch.Tensor]) -> float:
    """Return the time of one step, which all ranks start together."""
    dist.barrier()
    began = time.perf_counter()
    engine.train_batch(batch)
    return time.perf_counter() - began


def measured(stage: int) -> dict[str, float]:
    """Return medians of the step times and quartiles of the pairs' ratios."""
    pair = engines(stage)
    ids = torch.randint(0, 1024, (2, 128))
    batch = {"input_ids": ids, "labels": ids}
    for engine in pair:
        for _ in range(STEPS + 2):  # the comparison is part of the first steps
            engine.train_batch(batch)
    times: list[tuple[float, float]] = []
    for index in range(ROUNDS):
        taken = {engine: seconds(engine, batch) for engine in (pair if index % 2 else pair[::-1])}
        times.append((taken[pair[0]], taken[pair[1]]))
    for engine in pair:
        engine.close()
    low, _, high = quantiles([guarded / plain for guarded, plain in times], n=4)
    with_guards, without = (median(column) for column in zip(*times, strict=True))
    return {
        "seconds": with_guards,
        "seconds_without": without,
        "ratio": with_guards / without,
        "low": low,
        "high": high,
    }


def main() -> int:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    stages = {f"zero-{stage}": measured(stage) for stage in (1, 2, 3)}
    if dist.get_rank() == 0:
        result = {"machine": facts("torch", "transformers"), "rounds": ROUNDS, "stages": stages}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for name, row in stages.items():
            print(
                f"{name}: {row['ratio']:.3f} times (half of the pairs {row['low']:.3f} to {row['high']:.3f})"
            )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
