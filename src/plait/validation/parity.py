"""Comparison of layouts on the device with training in one process, as in `plait verify`.

In float64 the reference is one process on the CPU, which uses no kernel of the device. In the
configured precision, errors are differences from float64. The layout's errors may be at most 1.2
times those of one process on the device (`verify.report`).

References depend on the model, the data and the optimizer, not on the layout. Rows with one process
and the same model, data and optimizer share the references, so the trace on the CPU is computed
once.
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
from plait.validation.context import Context, require, require_compiler
from plait.validation.rows import Verdict, verdict
from plait.verify.parity import Trace, micro_batches_of_rank
from plait.verify.plan import Pass, VerificationPlan, prepare
from plait.verify.report import Section, compare_configured, compare_float64
from plait.verify.run import References, references, run_layout, start_engine

MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
STEPS = 2
COMPRESSED_LOSS = 0.02
COMPRESSED_NORM = 0.15
"""Largest relative differences of a loss and of a norm in four steps with compressed gradients."""
RESUMED = 1e-9
"""Largest relative difference of float64 losses after a checkpoint.

The losses are not bitwise equal, because another layout sums in another order.
"""
_REFERENCES = "references"
"""Entry of `Context.results`: references, keyed by everything that they depend on."""
_SHOWN_DIFFERENCES = 3


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `settings`, for the small model that all parity rows train."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZER,
        "model": {"config": dict(MODEL)},
    }
    return {**base, **settings}


def planned(
    context: Context, settings: Mapping[str, Any], *, passes: tuple[Pass, ...], steps: int
) -> VerificationPlan:
    """Create the verification plan on rank 0, and return it on all ranks. Collective."""
    require("transformers")
    context.group()
    plan: VerificationPlan | None = None
    if context.rank == 0:
        on_gpu = accelerator.is_accelerator(context.device)
        plan = prepare(
            load(configuration(settings)),
            model=None,
            steps=steps,
            passes=passes,
            device=accelerator.NAME if on_gpu else "cpu",
            processes=context.world,
            most_processes=context.world,
            gpus=context.world,
        )
    return context.from_first_rank(plan)


def layout(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Compare one layout with one process, in the passes of `settings["passes"]` (default: all)."""
    if settings["config"].get("compile", {}).get("enabled"):
        require_compiler(context)
    passes = tuple(settings.get("passes", ("float64", "configured")))
    plan = planned(context, settings["config"], passes=passes, steps=STEPS)
    traces = run_layout(plan)
    if context.rank:
        return verdict([])
    numbers = {}
    problems = []
    for name, trace in traces.items():
        section = section_of(context, plan, name, trace)
        numbers[section.name] = numbers_of(section)
        if section.different:
            problems.append(problem_of(section))
    layout_text = str(plan.resolved.layout)
    return verdict(problems, computes_in=plan.computes_in, layout=layout_text, **numbers)


def section_of(context: Context, plan: VerificationPlan, name: Pass, trace: Trace) -> Section:
    """Compare the trace of one pass with its references."""
    if name == "float64":
        exact = shared_references(context, replace(plan, device="cpu"), name, trace).exact
        return compare_float64(plan, exact, trace)
    # The exact trace starts from the weights that the configured dtype draws.
    reference = shared_references(context, plan, name, trace)
    assert reference.single is not None
    return compare_configured(plan, reference.exact, reference.single, trace)


def shared_references(
    context: Context, plan: VerificationPlan, name: Pass, trace: Trace
) -> References:
    """Return the references of a pass. The first row computes them, and later rows reuse them."""
    resolved = plan.resolved
    key = repr(
        (
            name,
            plan.device,
            plan.tested,
            plan.steps,
            plan.dtype,
            plan.micro_batches,
            resolved.batch.micro_batch_size,
            resolved.seed,
            resolved.optimizer,
            resolved.gradient_clipping,
            # References in float64 do not use the configured precision.
            resolved.precision if name == "configured" else None,
            # References use the scales of the layout and leave out the steps that it skipped.
            trace.scales,
            trace.skipped,
        )
    )
    known: dict[str, References] = context.results.setdefault(_REFERENCES, {})
    if key not in known:
        known[key] = references(plan, name, trace)
    return known[key]


def numbers_of(section: Section) -> dict[str, Any]:
    """Return the largest error of a comparison, and the largest ratio of error to allowed error."""
    shares = [row.error / row.allowed for row in section.rows if row.allowed]
    return {
        "compared": len(section.rows),
        "largest_error": max((row.error for row in section.rows), default=0.0),
        "largest_share_of_allowed": max(shares, default=0.0),
    }


def problem_of(section: Section) -> str:
    """Return a description of the first differences, in the order of the computation."""
    shown = "; ".join(str(row) for row in section.different[:_SHOWN_DIFFERENCES])
    more = len(section.different) - _SHOWN_DIFFERENCES
    rest = f"; {more} more" if more > 0 else ""
    return f"{section.name}: {shown}{rest}"


def compression(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Compare losses and norms of a compressed run with those of an uncompressed single process."""
    plan = planned(context, settings["config"], passes=("configured",), steps=4)
    trace = run_layout(plan)["configured"]
    if context.rank:
        return verdict([])
    # The CPU shares no kernel with the device.
    exact = references(replace(plan, device="cpu"), "configured", trace).exact
    return judge_compressed(trace, exact)


def judge_compressed(trace: Trace, exact: Trace) -> Verdict:
    """Return a failed verdict if a loss or norm differs from the exact one by more than allowed."""
    series = (
        ("loss", trace.losses, exact.losses, COMPRESSED_LOSS),
        ("gradient norm", trace.grad_norms, exact.grad_norms, COMPRESSED_NORM),
    )
    numbers = {}
    problems = []
    for name, values, exact_values, allowed in series:
        errors = [
            abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, exact_values, strict=True)
        ]
        worst = max(errors)
        numbers[name.replace(" ", "_")] = {"largest_error": worst, "allowed": allowed}
        # Negated, so that an error of NaN fails.
        if not worst <= allowed:
            problems.append(f"{name}: error {worst:.1e}, allowed {allowed:.1e}")
    return verdict(problems, **numbers)


def checkpoint(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Save a checkpoint asynchronously, load it in another layout, and compare the next losses."""
    saving = planned(context, settings["saving"], passes=("float64",), steps=4)
    loading = planned(context, settings["loading"], passes=("float64",), steps=4)
    # Each plan has the smallest model that its layout supports. Both use that of the layout that
    # splits the model more.
    larger = max(
        (saving, loading), key=lambda plan: plan.resolved.layout.pp * plan.resolved.layout.tp
    )
    saving = replace(saving, tested=larger.tested, blocks=larger.blocks)
    loading = replace(loading, tested=larger.tested, blocks=larger.blocks)
    if saving.micro_batches != loading.micro_batches:
        numbers = f"{saving.micro_batches} and {loading.micro_batches}"
        raise AssertionError(
            f"the two layouts of the check have {numbers} micro-batches per step, which cannot be"
            " compared; this is a bug in Plait: report it with the output of `plait doctor`"
        )
    with TemporaryDirectory(prefix="plait-checkpoint-") as name:
        # Each rank has made a folder. All use the one of rank 0.
        folder = Path(context.from_first_rank(name))
        straight = _losses_of(saving, slice(0, 4), folder, save_after=2)
        resumed = _losses_of(loading, slice(2, 4), folder, load_first=True)
        # Rank 0 removes the folder, which other ranks may still read.
        dist.barrier()
    problems = []
    for step, before, after in zip((3, 4), straight[2:], resumed, strict=True):
        if not abs(before - after) <= RESUMED * abs(before):
            problems.append(f"step {step}: loss {after!r}, and {before!r} without a checkpoint")
    return verdict(problems, losses=straight, resumed=resumed, allowed=RESUMED)


def _losses_of(
    plan: VerificationPlan,
    steps: slice,
    folder: Path,
    *,
    save_after: int | None = None,
    load_first: bool = False,
) -> list[float]:
    """Return the losses of some of the plan's steps in float64."""
    resolved, dtype = plan.settings("float64")
    built = plan.build(dtype)
    with plan.pass_context("float64", built.model):
        engine = start_engine(plan, built, resolved)
        losses = []
        try:
            if load_first and engine.load_checkpoint(folder) is None:
                raise AssertionError(
                    f"{folder} has no checkpoint, although the check has saved one; this is a bug"
                    " in Plait: report it with the output of `plait doctor`"
                )
            for step in plan.data(built)[steps]:
                result = engine.train_batch(micro_batches_of_rank(engine, step))
                losses.append(float(result.loss))
                if save_after == len(losses):
                    # The next steps run while the files are written, which must not change what is
                    # saved.
                    engine.save_checkpoint(folder, wait=False)
            if save_after is not None:
                engine.checkpoint_written(wait=True)
            return losses
        finally:
            engine.close()
