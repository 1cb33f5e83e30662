"""Checks of device memory: peaks and their prediction, offloaded states, streamed weights.

The prediction of a training step's peak covers tensors only. Other allocations from torch's
allocator (cuBLAS workspaces) are measured before the model exists, and subtracted from the measured
peak. The largest model that is predicted to fit into memory must train.

With optimizer states in host memory, larger models must train; this check also reports the time of
a step. Generation with streamed weights must return the same tokens as with the weights in device
memory, at the bandwidth of the host link.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster import accelerator
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import Resolved
from plait.dryrun.predicted_peak import PredictedPeak, predict_peak, predict_peak_on
from plait.engine.build import initialize
from plait.inference.generate import generate
from plait.inference.source import Source, open_source
from plait.inference.streamed_model import least_budget, load_streamed, tensors_of
from plait.losses.loss import causal_lm_loss
from plait.sizes import GIB, MIB, dtype_of, format_bytes
from plait.validation.catalogue import BF16, HOST_MEMORY
from plait.validation.ceilings import copy_rate, seconds_per_call
from plait.validation.context import (
    MEDIUM,
    TINY,
    WIDE,
    Context,
    Workload,
    largest_size,
    on_device,
    on_meta,
    random_batch,
    require,
    step_settings,
    timed,
)
from plait.validation.peers import plait_trainer
from plait.validation.rows import NotRun, Verdict, verdict

ALLOWED = 0.02
"""Largest relative difference of the peak from its prediction."""

# Twelve layers each: without sharding, the prediction counts all gradients of the block whose
# backward runs, of which autograd has released some. One block of twelve is a small share.
_LARGE = Workload(2048, 5632, 16, 16, 32000, layers=12, length=2048, accumulation=2)
_SMALL = Workload(384, 1056, 6, 6, 8000, layers=12, length=512, samples=2, accumulation=2)
_SIMULATED = Workload(192, 528, 4, 4, 1024, layers=12, length=64, samples=2, accumulation=2)
SIZES = ((_LARGE, 24 * GIB), (_SMALL, 2 * GIB), (_SIMULATED, 0.5 * GIB))

LEAST_BYTES = 2 * GIB
LEAST_SIMULATED_BYTES = 64 * MIB
"""Least memory for the check. In less, workspaces of libraries outweigh the largest model."""
MOST_BYTES = 24 * GIB
"""Memory that the largest model may take. It is trained from a model on `meta`, whose weights are
drawn on the host at about a second per GiB."""
LARGEST_LENGTH = 128


def peaks(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Compare each rank's peak in the layouts of `settings["cases"]` with its prediction."""
    require("transformers")
    workload = largest_size(context, SIZES)
    if context.world == 1:
        # With one rank the prediction uses the real group, which stays.
        context.group()
    # All predictions come first, because with several ranks they need a process without a group.
    cases = {}
    predictions = {}
    for name, config in settings["cases"].items():
        cases[name] = step_settings(config, workload, world=context.world)
        predictions[name] = predicted(context, cases[name], workload).peak
    context.group()
    numbers: dict[str, Any] = {"workload": workload.as_dict(), "allowed": ALLOWED}
    problems = []
    for name, resolved in cases.items():
        build = partial(on_device, workload, context.device)
        measured, libraries = peak_of_step(context, build, resolved, workload)
        prediction = predictions[name]
        ranks = context.gathered((prediction.peak_bytes, measured, libraries, prediction.moment))
        keys = ("predicted", "measured", "libraries", "moment")
        numbers[name] = [dict(zip(keys, rank, strict=True)) for rank in ranks]
        for rank, values in enumerate(ranks):
            problem = difference(values[0], values[1])
            if problem:
                problems.append(f"{name}, rank {rank}: {problem}")
    return verdict(problems, **numbers)


def predicted(context: Context, resolved: Resolved, workload: Workload) -> PredictedPeak:
    """Return the predicted peak memory of this rank in a training step."""
    model = on_meta(workload)
    sizes = {"samples": workload.samples, "length": workload.length}
    if dist.is_initialized():
        return predict_peak_on(build_mesh(resolved.layout), model, resolved, **sizes)
    return predict_peak(model, resolved, rank=context.rank, **sizes)


def difference(predicted_bytes: float, measured_bytes: float) -> str:
    """Return a description of the error if the prediction is wrong, or an empty string."""
    relative = predicted_bytes / measured_bytes - 1 if measured_bytes else float("inf")
    if abs(relative) <= ALLOWED:
        return ""
    return (
        f"predicted {format_bytes(round(predicted_bytes))}, measured "
        f"{format_bytes(round(measured_bytes))}: {relative:+.1%}, allowed {ALLOWED:.0%}"
    )


def peak_of_step(
    context: Context, build: Callable[[], nn.Module], resolved: Resolved, workload: Workload
) -> tuple[int, int]:
    """Return (peak bytes of all steps but the first, bytes of library workspaces).

    The peak does not include the workspaces, which are measured before the model exists. `build`
    returns the model, on the meta device or with weights on the device.
    """
    dtype = dtype_of(resolved.precision.compute) if resolved.precision.compute else torch.float32
    libraries = library_bytes(context, dtype)
    engine = initialize(build(), resolved, loss_fn=causal_lm_loss, total_steps=3)
    batch = random_batch(workload, torch.device("cpu"), seed=engine.dp_rank)
    try:
        for step in range(3):
            # The first step allocates the states of the optimizer and loads kernels.
            if step == 1:
                context.synchronize()
                accelerator.reset_peak(context.device)
            engine.train_batch(batch)
        context.synchronize()
        return accelerator.peak_bytes(context.device) - libraries, libraries
    finally:
        engine.close()
        # Collected now, because the next case measures from what is allocated.
        del engine
        gc.collect()


def library_bytes(context: Context, dtype: torch.dtype) -> int:
    """Return the bytes of library workspaces that remain after a forward and backward."""
    layer = nn.Linear(256, 256, bias=False, device=context.device, dtype=dtype)
    x = torch.ones(256, 256, device=context.device, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()
    context.synchronize()
    del layer, x
    return accelerator.allocated_bytes(context.device)


def largest(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Train the model whose predicted peak is a given fraction of the device memory.

    `settings["trains"]` is False for a model that must run out of memory.
    """
    require("transformers")
    library_bytes(context, torch.float32)
    free = context.free_bytes()
    limit = min(free, MOST_BYTES)
    least = context.size(LEAST_BYTES, small=LEAST_SIMULATED_BYTES)
    if limit < least:
        raise NotRun(
            f"the device has {format_bytes(free)} free, but this check needs {format_bytes(least)};"
            " use a larger device"
        )
    # The allocator enforces the limit, so that the prediction is tested against it.
    if limit < free and not context.is_small:
        accelerator.limit_memory(context.device, limit)
    share = settings["share"]
    trains = settings["trains"]
    workload, prediction = model_of_share(limit, share, at_most=trains)
    resolved = step_settings({}, workload, world=1)
    context.group()
    parameters = sum(parameter.numel() for parameter in on_meta(workload).parameters())
    peak = None
    try:
        peak, _ = peak_of_step(context, partial(on_meta, workload), resolved, workload)
    # For `trains` = False this is the expected end.
    except torch.OutOfMemoryError:
        context.progress({"out_of_memory": True})
    numbers = {
        "memory": limit,
        "parameters": parameters,
        "workload": workload.as_dict(),
        "predicted": prediction,
        "predicted_share": prediction / limit,
        "peak": peak,
    }
    text = f"predicted {prediction / limit:.0%} of {format_bytes(limit)}"
    problems = []
    if trains and peak is None:
        problems = [f"{text}, and memory ran out"]
    if not trains and peak is not None:
        problems = [f"{text}, and it trained with a peak of {format_bytes(peak)}"]
    return verdict(problems, **numbers)


def shape_of(limit: float) -> Workload:
    """Return a workload whose layers need about a twentieth of `limit` bytes each.

    A layer has 12.25 x hidden^2 parameters with 16 bytes each.
    """
    hidden = max(64, int((limit / 20 / 196) ** 0.5) // 64 * 64)
    heads = hidden // 64
    return Workload(
        hidden,
        hidden * 11 // 4,
        heads,
        heads,
        1024,
        layers=2,
        length=LARGEST_LENGTH,
        accumulation=2,
    )


def model_of_share(limit: float, share: float, *, at_most: bool) -> tuple[Workload, int]:
    """Return (model whose predicted peak is closest to `share` x `limit`, predicted peak in bytes).

    Args:
        limit: Bytes of memory.
        share: Fraction of `limit`.
        at_most: True returns the largest model below that size, False the smallest one above it.
    """
    shape = shape_of(limit)

    def peak(layers: int) -> int:
        workload = shape.with_layers(layers)
        resolved = step_settings({}, workload, world=1)
        sizes = {"rank": 0, "samples": workload.samples, "length": workload.length}
        return predict_peak(on_meta(workload), resolved, **sizes).peak.peak_bytes

    # A line through the peaks at two depths gives a first guess, which the loops below correct.
    low = peak(2)
    slope = (peak(6) - low) / 4
    target = share * limit
    layers = max(2, 2 + int((target - low) / slope)) + int(not at_most)
    nearest = peak(layers)
    while at_most and nearest > target and layers > 1:
        layers -= 1
        nearest = peak(layers)
    while not at_most and nearest < target:
        layers += 1
        nearest = peak(layers)
    return shape.with_layers(layers), nearest


OFFLOAD_SIZES = ((MEDIUM, 24 * GIB), (TINY, 1 * GIB))
OFFLOAD_STEPS = 3
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "on_device": {**BF16, "zero_optimization": {"stage": 3}},
    "states_on_host": {**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": HOST_MEMORY}},
}


def optimizer(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Time steps with optimizer states on device and host, and estimate the largest model.

    The peaks at two depths give the bytes per layer, and thus the number of layers that fit into
    the device's memory. The largest model is not trained: its states would fill the host's
    memory, and pinning them would take longer than all other checks.
    """
    require("transformers")
    context.group()
    workload = largest_size(context, OFFLOAD_SIZES)
    half = workload.with_layers(workload.layers // 2)
    numbers: dict[str, Any] = {"workload": workload.as_dict()}
    for name, config in CONFIGS.items():
        seconds, peak = measure(context, workload, config)
        _, peak_of_half = measure(context, half, config)
        numbers[name] = {
            "seconds_per_step": seconds,
            "peak_bytes": peak,
            **extrapolated(context, workload, peak, half, peak_of_half),
        }
        context.progress(numbers)
    ratio = numbers["states_on_host"]["seconds_per_step"] / numbers["on_device"]["seconds_per_step"]
    return timed(context, verdict([], step_ratio=ratio, **numbers))


def measure(context: Context, workload: Workload, config: Mapping[str, Any]) -> tuple[float, int]:
    """Return (seconds per step, peak bytes on the device) of training with Plait."""
    batch = random_batch(workload, context.device, seed=0)
    trainer = plait_trainer(context, workload, config)
    try:
        trainer.step(batch)
        context.synchronize()
        accelerator.reset_peak(context.device)
        seconds = seconds_per_call(context, partial(trainer.step, batch), OFFLOAD_STEPS)
        return seconds, context.peak_bytes()
    finally:
        trainer.close()
        del trainer
        context.release_memory()


def extrapolated(
    context: Context, workload: Workload, peak: int, half: Workload, peak_of_half: int
) -> dict[str, Any]:
    """Return the bytes per layer, and the parameters of the largest model that fits."""
    layer_bytes = (peak - peak_of_half) / (workload.layers - half.layers)
    # The depth does not decide the peak, so nothing can be extrapolated.
    if layer_bytes <= 0:
        return {"bytes_per_layer": layer_bytes}
    capacity = accelerator.capacity_bytes(context.device.index or 0)
    layers = int((capacity - peak) / layer_bytes) + workload.layers
    return {
        "bytes_per_layer": layer_bytes,
        "extrapolated_layers": layers,
        "extrapolated_parameters": workload.with_layers(layers).parameters,
    }


LEAST_SHARE = 0.9
"""Share of the rate of plain copies from pinned memory that streaming must reach."""
STREAMING_SIZES = (
    # A copy of a layer takes 8 ms at 55 GB/s. With toy layers the row would measure Python.
    (replace(WIDE, layers=6, vocabulary=32000, length=2048), 8 * GIB),
    # With two layers, the slots in which streamed layers compute would hold both of them.
    (TINY.with_layers(6), 0.25 * GIB),
)
PROMPTS = 2
PROMPT_TOKENS = 12
TOKENS = 16
_UNLIMITED = 1 << 62
_MOST_COPIED_BYTES = 256 * MIB
_OTHER_BYTES = 64 * MIB
"""Part of the budget for keys, values and activations."""


def weights(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Generate tokens with all layers streamed from `settings["source"]` ("host" or "files").

    With `settings["rate"]` the bandwidth is compared with that of plain copies. Otherwise the
    tokens are compared with those of the model in device memory.
    """
    require("transformers")
    workload = largest_size(context, STREAMING_SIZES)
    with tempfile.TemporaryDirectory(prefix="plait-streaming-") as name:
        source = _saved(context, workload, Path(name))
        model = source.model()
        budget = least_budget(model, tensors_of(source, model), other_bytes=_OTHER_BYTES)
        # Without host memory every layer is read from its file.
        host_bytes = _UNLIMITED if settings["source"] == "host" else 0
        streamed, seconds, nbytes = _generated(context, source, budget, host_bytes)
        if not settings.get("rate"):
            resident, _, _ = _generated(context, source, _UNLIMITED, 0)
            same = streamed == resident and nbytes > 0
            problem = "the tokens differ from those of the model in the device's memory"
            return verdict([] if same else [problem], bytes_per_token=nbytes)
    if not nbytes:
        return verdict([f"none of the {workload.layers} layers was streamed"])
    rate = TOKENS * nbytes / seconds
    link = copy_rate(context, min(nbytes, _MOST_COPIED_BYTES))
    numbers = {
        "bytes_per_token": nbytes,
        "rate": rate,
        "link": link,
        "share": rate / link,
        "least_share": LEAST_SHARE,
    }
    problem = f"streaming reaches {rate / 1e9:.1f} GB/s, and plain copies {link / 1e9:.1f} GB/s"
    return timed(context, verdict([problem] if rate < LEAST_SHARE * link else [], **numbers))


def _saved(context: Context, workload: Workload, folder: Path) -> Source:
    model: Any = on_device(workload, context.device, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(folder)
    return open_source(folder)


def _generated(
    context: Context, source: Source, budget_bytes: int, host_bytes: int
) -> tuple[list[list[int]], float, int]:
    """Return (tokens, seconds of the second generation, bytes that are streamed per token)."""
    sharded, plan = load_streamed(
        source, budget_bytes=budget_bytes, other_bytes=_OTHER_BYTES, host_bytes=host_bytes
    )
    prompts = []
    for prompt in range(PROMPTS):
        # Prompts differ from each other and do not repeat a token.
        tokens = [(7 * position + 3 * prompt) % 97 for position in range(PROMPT_TOKENS)]
        prompts.append(tokens)
    settings: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        # No answer ends early, so that the number of passes over the weights is known.
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "use_cache": True,
    }
    try:
        # The first generation loads kernels and is not timed.
        answers = generate(sharded, prompts, **settings)
        seconds = seconds_per_call(context, partial(generate, sharded, prompts, **settings), 1)
        return [answer.token_ids for answer in answers], seconds, plan.streamed_bytes
    finally:
        sharded.close()
        del sharded
        gc.collect()
