"""Layouts on real kernels against one process: losses, norms, every gradient and every parameter, as `plait verify` compares them.

In float64 the one process is on the CPU, which shares no kernel with the device, within 1e-10. In the configured precision the layout may
be 1.2 times as far from float64 as one process on the device is (`verify.report`). Compressed gradients are another sum, so there losses
and norms have tolerances of their own; and a checkpoint that goes on under another layout has to give the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from plait.cluster import accelerator
from plait.config.resolving.resolve import load
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.validation.context import Context, require
from plait.validation.rows import Found, compared
from plait.verify.parity import Trace
from plait.verify.plan import Pass, Plan, prepare
from plait.verify.report import failure
from plait.verify.run import compare, references, run_layout

MODEL: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
COMPRESSED_LOSS, COMPRESSED_NORM = 0.02, 0.15
"""Relative differences that compressed gradients may make to a loss and to a norm, in four steps."""
RESUMED = 1e-9
"""Relative difference in float64 of losses after a checkpoint: sums are in another order under another layout."""


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration file of `settings`, for the small model of these checks."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZER,
        "model": {"config": dict(MODEL)},
    }
    return {**base, **settings}


def planned(context: Context, settings: Mapping[str, Any], *, passes: tuple[Pass, ...], steps: int) -> Plan:
    """What will be compared, decided by the first rank. Collective."""
    require("transformers")
    context.group()
    found: list[Any] = [None]
    if context.rank == 0:
        config = load(configuration(settings))
        counts = {"processes": context.world, "most_processes": context.world, "gpus": context.world}
        found = [prepare(config, model=None, steps=steps, passes=passes, device=accelerator.NAME, **counts)]  # type: ignore[arg-type]
    if context.world > 1:
        dist.broadcast_object_list(found)
    plan: Plan = found[0]
    return plan


def layout(context: Context, settings: Mapping[str, Any]) -> Found:
    """One layout in float64 and in its configured precision."""
    plan = planned(context, settings["config"], passes=("float64", "configured"), steps=2)
    traces = run_layout(plan)
    if context.rank:
        return compared([])
    exact = compare(replace(plan, device="cpu"), {"float64": traces["float64"]})
    rounded = compare(plan, {"configured": traces["configured"]})
    sections = [section for report in (exact, rounded) for section in report.sections if section.rows]
    reports = [report for report in (exact, rounded) if not report.equal]
    numbers = {
        section.name: {
            "compared": len(section.rows),
            "largest_error": max(row.error for row in section.rows),
            "largest_share_of_allowed": max((row.error / row.allowed for row in section.rows if row.allowed), default=0.0),
        }
        for section in sections
    }
    problems = [failure(report).replace("\n", ";") for report in reports]
    return compared(problems, computes_in=plan.computes_in, layout=str(plan.resolved.layout), **numbers)


def compression(context: Context, settings: Mapping[str, Any]) -> Found:
    """Compressed gradients: losses and norms near those of one uncompressed process."""
    plan = planned(context, settings["config"], passes=("configured",), steps=4)
    found = run_layout(plan)["configured"]
    if context.rank:
        return compared([])
    exact = references(replace(plan, device="cpu"), "configured", found).exact
    return compressed(found, exact)


def compressed(found: Trace, exact: Trace) -> Found:
    """Within the tolerances."""
    rows = (("loss", found.losses, exact.losses, COMPRESSED_LOSS), ("gradient norm", found.grad_norms, exact.grad_norms, COMPRESSED_NORM))
    numbers, problems = {}, []
    for name, ours, theirs, allowed in rows:
        worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))
        numbers[name.replace(" ", "_")] = {"largest_error": worst, "allowed": allowed}
        if not worst <= allowed:
            problems.append(f"{name}: error {worst:.1e}, allowed {allowed:.1e}")
    return compared(problems, **numbers)


def checkpoint(context: Context, settings: Mapping[str, Any]) -> Found:
    """A checkpoint that is written beside two further steps, and the same steps from it under another layout."""
    saving, loading = (planned(context, settings[name], passes=("float64",), steps=4) for name in ("saving", "loading"))
    # Each plan has the smallest model that its layout takes; both take that of the layout that splits most.
    larger = max((saving, loading), key=lambda plan: plan.resolved.layout.pp * plan.resolved.layout.tp)
    saving, loading = (replace(plan, tested=larger.tested, blocks=larger.blocks) for plan in (saving, loading))
    if saving.micro_batches != loading.micro_batches:
        raise AssertionError(f"{saving.micro_batches} and {loading.micro_batches} micro-batches of a step cannot be compared")
    with TemporaryDirectory(prefix="plait-checkpoint-") as name:
        folder = Path(_first(context, name))
        straight = _steps(saving, slice(0, 4), save_after=2, folder=folder)
        resumed = _steps(loading, slice(2, 4), folder=folder, load=True)
        dist.barrier()  # the folder is the first rank's
    problems = [
        f"step {step + 3}: loss {after!r}, and {before!r} without a checkpoint"
        for step, (before, after) in enumerate(zip(straight[2:], resumed, strict=True))
        if not abs(before - after) <= RESUMED * abs(before)
    ]
    return compared(problems, losses=straight, resumed=resumed, allowed=RESUMED)


def _first(context: Context, value: str) -> str:
    found: str = context.gathered(value)[0]
    return found


def _steps(plan: Plan, which: slice, *, folder: Path, save_after: int | None = None, load: bool = False) -> list[float]:
    """Losses of some of the plan's steps in float64."""
    resolved, dtype = plan.settings("float64")
    built = plan.build(dtype)
    with plan.lifting("float64", built.model):
        engine = initialize(built.model, resolved, loss_fn=built.loss, forward=built.forward, total_steps=plan.steps)
        try:
            if load and engine.load_checkpoint(folder) is None:
                raise AssertionError(f"{folder} has no checkpoint")
            return _losses(engine, plan.data(built)[which], save_after, folder)
        finally:
            engine.close()


def _losses(engine: Engine, steps: list[Any], save_after: int | None, folder: Path) -> list[float]:
    count = engine.gradient_accumulation_steps()
    losses = []
    for index, step in enumerate(steps):
        losses.append(float(engine.train_batch(list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count])).loss))
        if save_after == index + 1:
            engine.save_checkpoint(folder, wait=False)
    if save_after is not None:
        engine.checkpoint_written(wait=True)
    return losses
