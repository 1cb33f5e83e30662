"""Throughput of a Llama with 8B widths under Plait, torch's FSDP2 and a hand-written model.

Note [Visits]
    A contender is a trainer of `validation.peers`. Its model has as many layers as fit into memory,
    so only one contender can be in memory at a time. A visit builds a contender on the device,
    warms it up, times some steps and frees it. In a round every contender is visited once. Rounds
    alternate the order, so that a drift of the GPU's clocks affects all contenders equally. The
    first visit of a contender includes compilation. Rounds are added until the row's planned time
    has passed.

Note [FLOPs]
    Model FLOPs of a step are 6 x matrix parameters x tokens, plus 6 x width x length x tokens per
    layer for causal attention, which computes half of the scores. Recomputation is not included.
    MFU is model FLOPs per second divided by the datasheet's bfloat16 peak. The time of a layer is
    the difference between the step times of two depths, divided by the difference of the depths.
    The embedding, the head, the loss and fixed costs thus cancel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.sizes import format_bytes
from plait.validation import peers
from plait.validation.ceilings import bfloat16_peak, datasheet, seconds_per_call
from plait.validation.context import (
    TINY,
    WIDE,
    Context,
    Workload,
    random_batch,
    require,
    require_compiler,
    timed,
)
from plait.validation.rows import NotRun, Verdict, verdict

SLOWEST = 1.2
"""Largest allowed ratio of the time of Plait's step to that of its first peer."""
WARM_STEPS = 2
TIMED_STEPS = 5
MOST_ROUNDS = 4
MOST_LAYERS = 12
"""Largest number of layers. More would repeat the same measurement at a higher cost."""
LEAST_LAYERS = 2
MARGIN = 0.8
"""Share of the free memory that is planned for. The rest is lost between blocks of the allocator.
"""
LAYERS = "throughput layers"
"""Entry of `Context.results`: number of layers that fit."""
STEP_SECONDS = "throughput step seconds"
"""Entry of `Context.results`: (workload, median seconds of Plait's step), for the planner."""
TRAINERS = {**peers.TRAINERS, **peers.MODEL_PARALLEL_TRAINERS}
PACKAGES = {"deepspeed": "deepspeed", "fsdp2-liger": "liger_kernel", "plait-liger": "liger_kernel"}


@dataclass(frozen=True)
class Visit:
    """Step times, memory and loss of one visit of a contender. See Note [Visits]."""

    seconds: float
    """Seconds per step, of the slowest rank."""
    warm_seconds: float
    """Seconds of building and of the first steps, compilation included."""
    peak_bytes: int
    loss: float
    retries: int = 0
    """Number of times that the allocator freed its cache in the timed steps, for lack of memory."""


def compare(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Time the steps of `settings["contenders"]` in turn, several times. See Note [Visits]."""
    contenders: Sequence[str] = settings["contenders"]
    packages = [PACKAGES[name] for name in contenders if name in PACKAGES]
    require("transformers", *packages)
    if any(name.endswith("-compiled") for name in contenders):
        require_compiler(context)
    peak = bfloat16_peak(datasheet(context))
    context.group()
    workload = first_workload(context, settings.get("accumulation", 1))
    if settings.get("layer_share") and not context.is_small:
        layers = max(LEAST_LAYERS, int(settings["layer_share"] * workload.layers))
        workload = workload.with_layers(layers)

    workload, first_round, errors = first_visits(context, contenders, workload)
    contenders = [name for name in contenders if name in first_round]
    report = {
        "workload": workload.as_dict(),
        "bfloat16_peak": peak,
        "allowed": SLOWEST,
        "errors": errors,
    }
    if not contenders:
        return verdict(list(errors.values()), **report)
    rounds = [first_round]
    context.progress({**report, **comparison(rounds, workload, peak, context.world)})
    while another_round_fits(context, rounds, settings):
        order = contenders if len(rounds) % 2 == 0 else contenders[::-1]
        rounds.append({name: visit(context, name, workload) for name in order})
        context.progress(comparison(rounds, workload, peak, context.world))
    numbers = {**report, **comparison(rounds, workload, peak, context.world)}
    # The planner is compared with the plain step of one device.
    if contenders[0] == "plait" and context.world == 1:
        context.results[STEP_SECONDS] = (workload, numbers["seconds"]["plait"])

    if settings.get("depths") and workload.layers > 1:
        seconds = {}
        for name in contenders:
            seconds[name] = visit(context, name, workload.with_layers(1)).seconds
        numbers["layer"] = per_layer(numbers["seconds"], seconds, workload, peak)
    if any(name.endswith("-compiled") for name in contenders):
        # Compiled code of later rows is for other shapes.
        torch.compiler.reset()
    return timed(context, judge(numbers, contenders))


def first_workload(context: Context, accumulation: int = 1) -> Workload:
    """Return the workload with as many layers as are expected to fit into device memory."""
    if context.is_small:
        workload = TINY
    else:
        # All ranks must build the same model.
        free = min(context.gathered(context.free_bytes()))
        layers = context.results.get(LAYERS) or layers_that_fit(free, WIDE)
        workload = WIDE.with_layers(layers)
    return replace(workload, accumulation=accumulation)


def layers_that_fit(free_bytes: float, workload: Workload) -> int:
    """Return the number of layers for which a training step fits on one GPU.

    The peak is at the end of the forward or in the optimizer step. At the end of the forward there
    are 12 bytes per parameter (float32 weights and both moments of Adam), the gathered embedding
    and head in bfloat16, the activations (30 bytes per token and hidden element, 8 bytes per token
    and element of the MLP's width), and 16 bytes per token and vocabulary entry for the logits and
    the loss. In the optimizer step there are 16 bytes per parameter, and no activations.

    Raises:
        NotRun: Fewer than LEAST_LAYERS fit.
    """
    tokens = workload.length * workload.samples
    ends = 2 * workload.vocabulary * workload.hidden
    layer = workload.layer_parameters
    activations = tokens * (30 * workload.hidden + 8 * workload.ffn)

    usable = MARGIN * free_bytes
    forward_fixed = 14 * ends + 16 * tokens * workload.vocabulary
    forward_layer = 12 * layer + activations
    in_forward = (usable - forward_fixed) / forward_layer
    in_update = (usable - 18 * ends) / (16 * layer)

    layers = int(min(in_forward, in_update))
    if layers < LEAST_LAYERS:
        needed = (forward_fixed + LEAST_LAYERS * forward_layer) / MARGIN
        raise NotRun(
            f"{LEAST_LAYERS} layers need {format_bytes(needed)}, but the device has"
            f" {format_bytes(free_bytes)} free; use a larger device"
        )
    return min(layers, MOST_LAYERS)


def first_visits(
    context: Context, contenders: Sequence[str], workload: Workload
) -> tuple[Workload, dict[str, Visit], dict[str, str]]:
    """Measure each contender once. If one of them runs out of memory, use fewer layers for all.

    A step in which the allocator releases its cache and retries is also treated as out of memory,
    because the host then waits for the device.

    Returns:
        The workload that fits, the visits by contender, and the errors of contenders that do not
        run.

    Raises:
        NotRun: Memory runs out even with LEAST_LAYERS.
    """
    while True:
        visits: dict[str, Visit] = {}
        errors: dict[str, str] = {}
        for name in contenders:
            attempt = try_visit(context, name, workload)
            if attempt is None:
                break
            if isinstance(attempt, str):
                errors[name] = f"{name}: {attempt}"
            elif attempt.retries and workload.layers > LEAST_LAYERS:
                break
            else:
                visits[name] = attempt
            context.progress(
                {"first_visits": {name: asdict(visited) for name, visited in visits.items()}}
            )
        if len(visits) + len(errors) == len(contenders):
            context.results[LAYERS] = workload.layers
            return workload, visits, errors
        if workload.layers <= LEAST_LAYERS:
            raise NotRun(
                f"out of memory with {workload.layers} layers, the smallest model of this check;"
                " use a larger device"
            )
        workload = workload.with_layers(max(LEAST_LAYERS, workload.layers * 3 // 4))
        # Compiled code may keep memory of the models that did not fit.
        torch.compiler.reset()
        context.release_memory()


def try_visit(context: Context, name: str, workload: Workload) -> Visit | str | None:
    """Visit a contender. With one rank, return an error of the visit instead of raising it.

    With several ranks all errors are raised, because the other ranks wait in a collective and the
    launch has to end.

    Returns:
        The visit, None if memory ran out, or the error message of a contender that failed.
    """
    result: Visit | str | None = None
    try:
        result = visit(context, name, workload)
    except Exception as error:
        if context.world > 1:
            raise
        if not isinstance(error, torch.OutOfMemoryError):
            lines = str(error).strip().splitlines() or [""]
            result = f"{type(error).__name__}: {lines[0][:500]}"
    # The handlers have ended: no error keeps the frames and their tensors alive.
    context.release_memory()
    return result


def visit(context: Context, name: str, workload: Workload) -> Visit:
    """Build a contender, warm it up, time its steps and free it. Collective."""
    started = time.perf_counter()
    batch = random_batch(workload, context.device, seed=context.rank)
    trainer = TRAINERS[name](context, workload)
    try:
        for _ in range(WARM_STEPS):
            trainer.step(batch)
        context.synchronize()
        warm_seconds = time.perf_counter() - started
        accelerator.reset_peak(context.device)
        retries = accelerator.allocation_retries(context.device)
        seconds, loss = timed_steps(context, trainer, batch)
        retries = max(context.gathered(accelerator.allocation_retries(context.device) - retries))
        peak = context.peak_bytes()
    finally:
        trainer.close()
        del trainer
        context.release_memory()
    # NaN is the only number that differs from itself.
    if loss != loss:
        raise AssertionError(
            f"{name}: the loss is not a number; if {name} is Plait, report a bug with the output of"
            " `plait doctor`"
        )
    return Visit(max(context.gathered(seconds)), warm_seconds, peak, loss, retries)


def timed_steps(
    context: Context, trainer: peers.TimedTrainer, batch: Mapping[str, torch.Tensor]
) -> tuple[float, float]:
    """Return (seconds per step, last loss).

    The host waits for the device before the first step and after the last one.
    """
    losses: list[torch.Tensor] = []
    if context.world > 1:
        context.synchronize()
        dist.barrier()
    seconds = seconds_per_call(
        context,
        lambda: losses.append(trainer.step(batch)),
        context.size(TIMED_STEPS, small=1),
    )
    return seconds, float(losses[-1])


def another_round_fits(
    context: Context, rounds: Sequence[Mapping[str, Visit]], settings: Mapping[str, Any]
) -> bool:
    """Return whether one more round fits into the row's planned time. Collective."""
    if context.is_small:
        return len(rounds) < 2
    if len(rounds) >= settings.get("rounds", MOST_ROUNDS):
        return False
    steps = WARM_STEPS + TIMED_STEPS
    round_seconds = 0.0
    for visited in rounds[-1].values():
        # A later visit does not compile again. Building takes seconds at most.
        warm_seconds = min(visited.warm_seconds, 2 * visited.seconds + 5)
        round_seconds += warm_seconds + steps * visited.seconds
    depths = 0.5 * round_seconds if settings.get("depths") else 0.0
    fits = context.row_deadline - time.monotonic() > round_seconds + depths
    # Clocks of ranks differ, and all must decide alike.
    return bool(context.from_first_rank(fits))


def comparison(
    rounds: Sequence[Mapping[str, Visit]], workload: Workload, peak: float, ranks: int
) -> dict[str, Any]:
    """Return each contender's medians over rounds, and Plait's time relative to the other ones.

    Args:
        rounds: Visits of each round, keyed by contender.
        workload: Workload of one rank.
        peak: Peak bfloat16 FLOP/s of a device.
        ranks: Number of ranks.
    """
    names = list(rounds[0])
    first = names[0]
    # Ranks that the model is split over share a batch, and each computes a part of the FLOPs.
    replicas = ranks if first in ("plait", "plait-compiled") else max(1, ranks // 2)
    seconds = {}
    tokens_per_second = {}
    mfu = {}
    ratio = {}
    peak_bytes = {}
    for name in names:
        visits = [visits_of_round[name] for visits_of_round in rounds]
        seconds[name] = median(visited.seconds for visited in visits)
        tokens_per_second[name] = replicas * workload.tokens / seconds[name]
        mfu[name] = replicas * workload.flops / seconds[name] / (ranks * peak)
        peak_bytes[name] = max(visited.peak_bytes for visited in visits)
        if name != first:
            # Ratios are taken within a round, because a drift of the clocks affects both visits.
            ratios = [
                visits_of_round[first].seconds / visits_of_round[name].seconds
                for visits_of_round in rounds
            ]
            ratio[name] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return {
        "rounds": len(rounds),
        "seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": mfu,
        "ratio": ratio,
        "peak_bytes": peak_bytes,
        "first_visit_seconds": {name: rounds[0][name].warm_seconds for name in names},
        "loss": {name: rounds[-1][name].loss for name in names},
    }


def per_layer(
    deep: Mapping[str, float], shallow: Mapping[str, float], workload: Workload, peak: float
) -> dict[str, Any]:
    """Return seconds and MFU per layer, from the step times of two depths. See Note [FLOPs]."""
    layers = workload.layers - 1
    seconds = {}
    mfu = {}
    for name in deep:
        seconds[name] = (deep[name] - shallow[name]) / layers
        # Noise can make the deep model as fast as the shallow one.
        mfu[name] = float("nan")
        if seconds[name] > 0:
            mfu[name] = workload.layer_flops / seconds[name] / peak
    return {
        "seconds": seconds,
        "mfu": mfu,
        "seconds_with_one_layer": dict(shallow),
    }


def judge(numbers: Mapping[str, Any], contenders: Sequence[str]) -> Verdict:
    """Return a failed verdict if a contender does not run, or if Plait is too slow.

    Plait is too slow if it takes more than SLOWEST times as long as another contender.
    """
    problems = list(numbers.get("errors", {}).values())
    for peer in contenders[1:2]:
        ratio = numbers["ratio"][peer]["median"]
        if not ratio <= SLOWEST:
            problems.append(
                f"a step of {contenders[0]} takes {ratio:.2f} times as long as one of {peer},"
                f" allowed {SLOWEST} times"
            )
    return verdict(problems, **numbers)
