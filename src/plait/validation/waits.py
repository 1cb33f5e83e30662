"""How often the host waits for the device in a training step.

Every wait empties the queue of kernels: the device then idles until the host has launched the next
ones. torch warns of such operations (`torch.cuda.set_sync_debug_mode`). The warnings are Python
warnings, those of the backward's threads included, which autograd repeats on the calling thread.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.cluster import accelerator
from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.validation.context import Context, require
from plait.validation.models import STRUCTURE, TINY, on_device, random_batch, step_settings
from plait.validation.rows import Verdict, verdict

STEPS = 5
_WARM_STEPS = 2
NO_WARNINGS = "a simulated device does not warn of waits; the steps ran to their end"
_MESSAGE = "called a synchronizing CUDA operation"
_PLACES = 10
"""Number of places that are reported, those with the most waits first."""


def per_step(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Count the waits of five steps of `settings["config"]`, and compare with
    `settings["expected"]`.

    A step of float16 reads one number, because the loss scale decides whether the update happens.
    """
    require("transformers")
    context.group()
    places = waits_of_config(context, settings["config"])
    if context.is_small:
        return Verdict("not run", NO_WARNINGS)
    return judge(places, STEPS, settings["expected"])


def waits_of_config(context: Context, config: Mapping[str, Any]) -> Counter[str]:
    """Train a few steps of a configuration and return the waits of STEPS of them by place."""
    workload = TINY if context.is_small else STRUCTURE
    resolved = step_settings(config, workload, world=context.world)
    model = on_device(workload, context.device)
    engine = initialize(model, resolved, loss_fn=causal_lm_loss, total_steps=100)
    # The batch is on the device: what a data loader does is not part of the step.
    batch = random_batch(workload, context.device, seed=context.rank)
    try:
        for _ in range(_WARM_STEPS):
            engine.train_batch(batch)
        context.synchronize()
        return waits_of(lambda: engine.train_batch(batch), STEPS, context.device)
    finally:
        engine.close()


def waits_of(step: Callable[[], object], steps: int, device: torch.device) -> Counter[str]:
    """Run steps and return how many waits there were at each place (`file:line`)."""
    with warnings.catch_warnings(record=True) as caught, accelerator.warning_of_waits(device):
        warnings.simplefilter("always")
        for _ in range(steps):
            step()
    return count_waits(caught)


def count_waits(caught: list[warnings.WarningMessage]) -> Counter[str]:
    """Count the warnings of waits by place; other warnings are left out."""
    return Counter(
        f"{_below_package(warning.filename)}:{warning.lineno}"
        for warning in caught
        if _MESSAGE in str(warning.message)
    )


def judge(places: Counter[str], steps: int, expected: int) -> Verdict:
    """Fail if a step waits more often than expected."""
    per_step = places.total() / steps
    numbers = {
        "waits_per_step": per_step,
        "expected_per_step": expected,
        "places": dict(places.most_common(_PLACES)),
    }
    where = ", ".join(f"{place} ({count})" for place, count in places.most_common(3))
    problem = f"{per_step:g} waits per step, {expected} expected; in {steps} steps: {where}"
    return verdict([problem] if per_step > expected else [], **numbers)


def _below_package(filename: str) -> str:
    for folder in ("/plait/", "/torch/", "/transformers/"):
        if folder in filename:
            return folder.strip("/") + "/" + filename.rsplit(folder, 1)[1]
    return filename.rsplit("/", 1)[-1]
