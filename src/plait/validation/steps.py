"""A training step of Plait beside one of torch's classes, or of DeepSpeed, as a ratio of times: the same model, batch, precision and
optimizer, in the same processes, in turns.

In float32 products use TF32 on both sides; in bfloat16 both compute on casts of float32 parameters and reduce in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from plait.config.resolving.resolve import Resolved
from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.units import GIB
from plait.validation.context import Context, dtype_of_products, require, sized, timed
from plait.validation.memory import LARGE, MEDIUM, SMALL, TINY, built, fields_of, random_batch, step_settings
from plait.validation.rows import Found, compared
from plait.verify.model_under_test import transformers_model

SLOWEST = 1.2
"""A step of Plait may take this many times the other's."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "large": {"model": LARGE, "samples": 2, "length": 2048},
    "medium": {"model": MEDIUM, "samples": 4, "length": 1024},
    "small": {"model": SMALL, "samples": 4, "length": 512},
    "tiny": {"model": TINY, "samples": 1, "length": 32},
}
NEEDED = {"large": 60 * GIB, "medium": 22 * GIB, "small": 6 * GIB, "tiny": 1.5 * GIB}
"""Bytes that a device has free for both at once."""
ROUNDS, STEPS, WARM = 7, 3, 2

Step = Callable[[], float]
"""A full optimizer step; its loss."""


def ratio(context: Context, settings: Mapping[str, Any]) -> Found:
    """Plait as `settings["config"]` says, and `settings["peer"]`."""
    require("transformers", *settings.get("requires", ()))
    size = sized(context, SIZES, least_bytes=NEEDED)
    context.group()
    resolved = step_settings(settings["config"], samples=size["samples"], world=context.world)
    batch = random_batch(resolved.batch, size["length"], vocabulary=size["model"]["vocab_size"], seed=context.rank)
    with dtype_of_products("high"):
        engine = initialize(built(size["model"], size["length"]), resolved, loss_fn=causal_lm_loss, total_steps=1000)
        try:
            peer = PEERS[settings["peer"]](context, size, resolved, batch, settings)
            seconds = in_turns(context, {"plait": lambda: float(engine.train_batch(batch).loss), settings["peer"]: peer})
        finally:
            engine.close()
    return timed(context, of_ratio(seconds, settings["peer"], size))


def of_ratio(seconds: Mapping[str, list[float]], peer: str, size: Mapping[str, Any]) -> Found:
    """The median of the rounds' ratios against the bar."""
    ratios = [ours / theirs for ours, theirs in zip(seconds["plait"], seconds[peer], strict=True)]
    middle = median(ratios)
    numbers = {"ratio": middle, "ratios": ratios, "seconds": dict(seconds), "allowed": SLOWEST, "size": dict(size)}
    problem = f"a step takes {middle:.2f} times that of {peer}, allowed {SLOWEST}"
    return compared([problem] if not middle <= SLOWEST else [], **numbers)


def in_turns(context: Context, steps: Mapping[str, Step]) -> dict[str, list[float]]:
    """Seconds a step of each in every round, the order changing from round to round. Collective."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    rounds, count = (1, 1) if context.simulated else (ROUNDS, STEPS)
    for step in steps.values():
        for _ in range(WARM):
            step()
    for index in range(rounds):
        for name, step in list(steps.items())[:: 1 if index % 2 else -1]:
            context.synchronize()
            if context.world > 1:
                dist.barrier()
            began = time.perf_counter()
            losses = [step() for _ in range(count)]
            context.synchronize()
            seconds[name].append((time.perf_counter() - began) / count)
            if not all(loss == loss for loss in losses):
                raise AssertionError(f"{name}: a loss is not a number: {losses}")
    return seconds


def _model(context: Context, size: Mapping[str, Any]) -> nn.Module:
    """With weights of its own, on the device."""
    torch.manual_seed(0)
    return transformers_model(fields_of(size["model"], size["length"]), dtype=torch.float32, device=str(context.device)).train()


def _pieces(context: Context, batch: Mapping[str, torch.Tensor], samples: int) -> list[dict[str, torch.Tensor]]:
    there = {name: tensor.to(context.device) for name, tensor in batch.items()}
    columns = zip(*(tensor.split(samples) for tensor in there.values()), strict=True)
    return [dict(zip(there, column, strict=True)) for column in columns]


def _torch_step(
    context: Context, model: nn.Module, resolved: Resolved, batch: Mapping[str, torch.Tensor], last: Callable[[bool], Any]
) -> Step:
    """Micro-batches, clipping and the fused AdamW. `last` is told whether the next backward is the last of the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pieces = _pieces(context, batch, resolved.batch.micro_batch_size)

    def step() -> float:
        total = 0.0
        for index, piece in enumerate(pieces):
            last(index == len(pieces) - 1)
            loss = model(**piece).loss / len(pieces)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def _ddp(context: Context, size: Mapping[str, Any], resolved: Resolved, batch: Any, settings: Mapping[str, Any]) -> Step:
    model = DistributedDataParallel(_model(context, size), gradient_as_bucket_view=True, broadcast_buffers=False)

    def last(is_last: bool) -> None:
        model.require_backward_grad_sync = is_last

    return _torch_step(context, model, resolved, batch, last)


def _fully_shard(context: Context, size: Mapping[str, Any], resolved: Resolved, batch: Any, settings: Mapping[str, Any]) -> Step:
    model = _model(context, size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    freed = settings["config"]["zero_optimization"]["stage"] == 3
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, mp_policy=policy, reshard_after_forward=freed)
    sharded: Any = fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    return _torch_step(context, sharded, resolved, batch, lambda is_last: None)


def _deepspeed(context: Context, size: Mapping[str, Any], resolved: Resolved, batch: Any, settings: Mapping[str, Any]) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": resolved.batch.micro_batch_size,
        "gradient_accumulation_steps": resolved.batch.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1_000_000,
        **settings["config"],
    }
    model = _model(context, size)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    pieces = _pieces(context, batch, resolved.batch.micro_batch_size)

    def step() -> float:
        total = 0.0
        for piece in pieces:
            loss = engine(**piece).loss
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / len(pieces)
        return float(total)

    return step


PEERS = {"DDP": _ddp, "fully_shard": _fully_shard, "DeepSpeed": _deepspeed}
