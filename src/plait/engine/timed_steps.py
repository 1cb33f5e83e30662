"""Timed training steps of a layout, for calibration and benchmarks of the planner.

The model is built from a configuration of Transformers on meta, the data are random tokens, and the
engine is that of any run. An engine is closed before the next is made, so layouts can follow each
other in the same processes.
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
from plait.cluster.small_messages import max_over_ranks
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.losses.loss import causal_lm_loss


@dataclass(frozen=True)
class TimedSteps:
    """Times of steps, without the first one, which makes buffers and optimizer states.

    Attributes:
        seconds: Wall-clock seconds of each step on the slowest rank.
        processor_seconds: Processor seconds of each step on the rank that used most. This is the
            cost without waiting; other programs hardly change it.
        peak_bytes: Peak of the allocator on the rank with the highest. None on CPUs, where
            processes keep memory that no layout asked for.
    """

    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]
    peak_bytes: int | None = None


def time_steps(
    model: Mapping[str, Any], config: Mapping[str, Any], *, sequence: int, steps: int, warm: int = 1
) -> TimedSteps:
    """Time training steps of a causal language model with random tokens. Collective.

    Args:
        model: Fields of the model's configuration in Transformers.
        config: The configuration of the run.
        sequence: Tokens per sample.
        steps: Number of timed steps.
        warm: Number of steps before them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"use_cache": False, **model}
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
        )
    engine = initialize(
        meta_model.train(), config, loss_fn=causal_lm_loss, total_steps=warm + steps
    )
    try:
        accelerator.reset_peak(engine.device)
        samples = engine.config.batch.micro_batch_size * engine.config.batch.accumulation
        # Ranks that share a slice of the batch need the same tokens.
        generator = torch.Generator().manual_seed(engine.dp_rank)
        times = []
        for _ in range(warm + steps):
            tokens = torch.randint(
                0, fields["vocab_size"], (samples, sequence), generator=generator
            )
            times.append(_time_step(engine, {"input_ids": tokens, "labels": tokens}))
        wall_seconds, processor_seconds = zip(*times[warm:], strict=True)
        return TimedSteps(wall_seconds, processor_seconds, _peak(engine.device))
    finally:
        engine.close()
        # The next layout needs the memory now, also that of reference cycles.
        del engine, meta_model
        gc.collect()


def _time_step(engine: Engine, batch: Any) -> tuple[float, float]:
    """Return the largest wall-clock and processor seconds over all ranks. Collective."""
    # All ranks start together, so that none waits for a late one inside of the measured time.
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    start = time.perf_counter()
    processor_start = time.process_time()
    # Reading the loss waits for the step.
    float(engine.train_batch(batch).loss)
    seconds = [time.perf_counter() - start, time.process_time() - processor_start]
    wall_seconds, processor_seconds = max_over_ranks(
        seconds, dist.group.WORLD, device=engine.device
    )
    return wall_seconds, processor_seconds


def _peak(device: torch.device) -> int | None:
    if not accelerator.is_accelerator(device):
        return None
    return max_over_ranks([accelerator.peak_bytes(device)], dist.group.WORLD, device=device)[0]
