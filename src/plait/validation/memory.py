"""Peak memory of a training step on the device against the prediction, and the largest model that the prediction says will train.

The prediction counts tensors. What libraries hold besides (cuBLAS' workspaces, in torch's allocator too) is measured before and taken off.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from plait.cluster import accelerator
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.dryrun.predicted_peak import predict_peak
from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.units import GIB, MIB, dtype_of, format_bytes
from plait.validation.context import Context, require, sized
from plait.validation.rows import Found, NotRun, compared
from plait.verify.model_under_test import transformers_model

ALLOWED = 0.02
"""Relative difference of the peak from its prediction."""
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000}
MEDIUM = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32000}
SMALL = {"hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 12, "num_attention_heads": 6, "vocab_size": 8000}
TINY = {"hidden_size": 192, "intermediate_size": 528, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 1024}
"""Twelve layers each: without sharding the prediction counts all gradients of the block whose backward runs, a twelfth of them or less, and
autograd has released some."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "large": {"model": LARGE, "samples": 1, "length": 2048},
    "medium": {"model": MEDIUM, "samples": 2, "length": 1024},
    "small": {"model": SMALL, "samples": 2, "length": 512},
    "tiny": {"model": TINY, "samples": 2, "length": 64},
}
LEAST_BYTES, LEAST_SIMULATED = 2 * GIB, 64 * MIB
"""The largest model of less would be small beside the workspaces of libraries."""
NEEDED = {"large": 24 * GIB, "medium": 10 * GIB, "small": 2 * GIB, "tiny": 0.5 * GIB}
"""Bytes that a device has free for a size."""

MOST_BYTES = 24 * GIB
"""Of the device's memory, for the largest model: its weights are drawn on the host, which takes a second a GiB and more."""


def fields_of(model: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Transformers' fields of a Llama."""
    heads = model["num_attention_heads"]
    return {"model_type": "llama", "max_position_embeddings": length, "num_key_value_heads": heads, "tie_word_embeddings": False, **model}


def built(model: Mapping[str, Any], length: int) -> nn.Module:
    """A Llama on meta with float32 parameters."""
    return transformers_model(fields_of(model, length), dtype=torch.float32).train()


def step_settings(case: Mapping[str, Any], *, samples: int, world: int) -> Resolved:
    """`case` with what every step of these checks has."""
    tree = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **case,
    }
    return resolve(load(tree), world_size=world)


def peaks(context: Context, settings: Mapping[str, Any]) -> Found:
    """Every rank's peak in the layouts of `settings["cases"]`, name to configuration, against its prediction."""
    require("transformers")
    size = sized(context, SIZES, least_bytes=NEEDED)
    samples, length = size["samples"], size["length"]
    cases = {name: step_settings(case, samples=samples, world=context.world) for name, case in settings["cases"].items()}
    predicted = {
        name: predict_peak(built(size["model"], length), resolved, rank=context.rank, samples=samples, length=length).peak
        for name, resolved in cases.items()
    }
    context.group()
    numbers: dict[str, Any] = {"model": dict(size["model"]), "samples": samples, "length": length, "allowed": ALLOWED}
    problems = []
    for name, resolved in cases.items():
        measured, libraries = peak_of_step(context, built(size["model"], length), resolved, length=length)
        ranks = context.gathered((predicted[name].peak_bytes, measured, libraries, predicted[name].moment))
        numbers[name] = [dict(zip(("predicted", "measured", "libraries", "moment"), rank, strict=True)) for rank in ranks]
        problems += [f"{name}, rank {rank}: {problem}" for rank, each in enumerate(ranks) if (problem := difference(*each[:2]))]
    return compared(problems, **numbers)


def difference(predicted: float, measured: float) -> str:
    """What is wrong with a prediction; empty for nothing."""
    relative = predicted / measured - 1 if measured else float("inf")
    if abs(relative) <= ALLOWED:
        return ""
    return f"predicted {format_bytes(round(predicted))}, measured {format_bytes(round(measured))}: {relative:+.1%}, allowed {ALLOWED:.0%}"


def peak_of_step(context: Context, model: nn.Module, resolved: Resolved, *, length: int) -> tuple[int, int]:
    """(the most bytes that a step after the first held, what libraries held before)."""
    vocabulary = cast(Any, model.config).vocab_size
    dtype = dtype_of(resolved.precision.compute) if resolved.precision.compute else torch.float32
    libraries = held_by_libraries(context, dtype)
    engine = initialize(model, resolved, loss_fn=causal_lm_loss, total_steps=3)
    try:
        for step in range(3):
            if step == 1:
                context.synchronize()
                accelerator.reset_peak(context.device)
            engine.train_batch(random_batch(engine.config.batch, length, vocabulary=vocabulary, seed=engine.dp_rank))
        context.synchronize()
        return accelerator.peak_bytes(context.device) - libraries, libraries
    finally:
        engine.close()
        del engine, model
        gc.collect()


def held_by_libraries(context: Context, dtype: torch.dtype) -> int:
    """Bytes that stay allocated after a product forward and backward: workspaces, of both threads."""
    layer = nn.Linear(256, 256, bias=False, device=context.device, dtype=dtype)
    layer(torch.ones(256, 256, device=context.device, dtype=dtype, requires_grad=True)).sum().backward()
    context.synchronize()
    del layer
    return accelerator.held_bytes(context.device)


def random_batch(batch: Any, length: int, *, vocabulary: Any, seed: int) -> dict[str, torch.Tensor]:
    """This rank's part of a step: `input_ids` and `labels` [micro-batch x accumulation, length] int64, on the host."""
    shape = (batch.micro_batch_size * batch.accumulation, length)
    tokens = torch.randint(0, int(vocabulary), shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


# ---- the largest model --------------------------------------------------------------------------------------------------------------


def largest(context: Context, settings: Mapping[str, Any]) -> Found:
    """The model whose predicted peak is just below 95 % of the memory trains; that just above 110 % runs out of memory."""
    require("transformers")
    held_by_libraries(context, torch.float32)
    free = context.free_bytes()
    limit = min(free, MOST_BYTES)
    least = LEAST_SIMULATED if context.simulated else LEAST_BYTES
    if limit < least:
        raise NotRun(f"the device has {format_bytes(free)} free, and this check needs {format_bytes(least)}")
    if limit < free and not context.simulated:
        accelerator.limit_memory(context.device, limit)
    share, trains = settings["share"], settings["trains"]
    layers, predicted = model_of_share(limit, share, at_most=trains)
    resolved = step_settings({}, samples=1, world=1)
    model = built({**shape_of(limit), "num_hidden_layers": layers}, LENGTH)
    parameters = sum(p.numel() for p in model.parameters())
    context.group()
    try:
        peak, _ = peak_of_step(context, model, resolved, length=LENGTH)
    except torch.OutOfMemoryError:
        peak = None
    numbers = {
        "memory": limit,
        "parameters": parameters,
        "layers": layers,
        "predicted": predicted,
        "predicted_share": predicted / limit,
        "peak": peak,
    }
    problems = []
    if trains and peak is None:
        problems = [f"predicted {predicted / limit:.0%} of {format_bytes(limit)}, and memory ran out"]
    if not trains and peak is not None:
        problems = [f"predicted {predicted / limit:.0%} of {format_bytes(limit)}, and it trained with a peak of {format_bytes(peak)}"]
    return compared(problems, **numbers)


LENGTH = 128


def shape_of(limit: float) -> dict[str, int]:
    """Of a model whose layers take about a twentieth of `limit` each: 16 bytes of every one of 12.25 x hidden^2 parameters."""
    hidden = max(64, int((limit / 20 / 196) ** 0.5) // 64 * 64)
    return {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_attention_heads": hidden // 64, "vocab_size": 1024}


def model_of_share(limit: float, share: float, *, at_most: bool) -> tuple[int, int]:
    """(layers, predicted peak) of the model next to `share` of `limit`: the largest below it, or the smallest above it."""

    def peak(layers: int) -> int:
        model = built({**shape_of(limit), "num_hidden_layers": layers}, LENGTH)
        return predict_peak(model, step_settings({}, samples=1, world=1), rank=0, samples=1, length=LENGTH).peak.peak_bytes

    low, high = peak(2), peak(6)
    slope, wanted = (high - low) / 4, share * limit
    layers = max(2, 2 + int((wanted - low) / slope)) + (not at_most)
    found = peak(layers)
    while at_most and found > wanted and layers > 1:
        layers -= 1
        found = peak(layers)
    while not at_most and found < wanted:
        layers += 1
        found = peak(layers)
    return layers, found
