"""Real training steps of a layout, timed: what calibration and benchmarks feed the planner with.
Collective, and it looks at a clock.

The model is a Transformers configuration built on meta, the data random tokens, the engine the one
that any run gets. An engine is closed before the next is made, so that layouts follow each other in
the same processes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.losses.loss import causal_lm_loss


@dataclass(frozen=True)
class TimedSteps:
    """Seconds of each step, of the slowest rank; the first, which makes buffers and states, was
    left out.
    """

    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]
    """Of the rank that used most: the cost of a step without waiting. Other programs hardly move
    it.
    """
    peak_bytes: int | None = None
    """Of the allocator, on the rank that held most; None on a CPU, where processes keep memory that
    no layout asked for.
    """


def time_steps(
    model: Mapping[str, Any], config: Mapping[str, Any], *, sequence: int, steps: int, warm: int = 1
) -> TimedSteps:
    """Train the causal language model of the Transformers fields `model` as `config` says for
    `warm` + `steps` steps of random tokens.

    Collective over the processes that `config` lays out.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"use_cache": False, **model}
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
        )
    engine = initialize(built.train(), config, loss_fn=causal_lm_loss, total_steps=warm + steps)
    try:
        accelerator.reset_peak(engine.device)
        samples = engine.config.batch.micro_batch_size * engine.config.batch.accumulation
        generator = torch.Generator().manual_seed(engine.dp_rank)
        times = []
        for _ in range(warm + steps):
            tokens = torch.randint(
                0, fields["vocab_size"], (samples, sequence), generator=generator
            )
            times.append(_timed(engine, {"input_ids": tokens, "labels": tokens}))
        wall, used = zip(*times[warm:], strict=True)
        return TimedSteps(wall, used, _peak(engine.device))
    finally:
        engine.close()
        del engine, built
        gc.collect()


def _timed(engine: Engine, batch: Any) -> tuple[float, float]:
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        dist.barrier()
    began = time.perf_counter()
    used = time.process_time()
    float(engine.train_batch(batch).loss)  # waits for the step
    taken = torch.tensor(
        [time.perf_counter() - began, time.process_time() - used],
        dtype=torch.float64,
        device=engine.device,
    )
    if several:
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    wall, processor = taken.tolist()
    return wall, processor


def _peak(device: torch.device) -> int | None:
    if not accelerator.is_one(device):
        return None
    peak = torch.tensor(accelerator.peak_bytes(device), device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)
