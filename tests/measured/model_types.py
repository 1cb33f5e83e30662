"""Every causal language model type of Transformers, made small, under one layout at a time.

A cell of the table trains two steps of ragged micro-batches and is compared with the reference that
shares no code. The result is exact, refused or failed. The global batch is the same for every
layout, so each type needs one reference. `tools/model_types.py` starts the processes and writes the
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from plait.cluster.layout import Layout
from plait.config.resolving.resolve import load, resolve
from plait.engine.build import initialize
from plait.errors import PlaitError
from plait.model.blocks import find_blocks
from plait.model.plans import make_plan
from plait.verify.choose import choose
from plait.verify.model_under_test import TestedModel, build, initialise_weights
from plait.verify.parity import Trace, compare, engine_trace, worst
from plait.verify.plan import VerificationPlan
from plait.verify.report import EXACT_BAR, ROUNDED_BAR
from plait.verify.run import second_trace

LAYOUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tp 2": {
            "gradient_accumulation_steps": 2,
            "parallel": {"tp": 2, "sequence_parallel": False},
        },
        "tp 2 + sequence": {
            "gradient_accumulation_steps": 2,
            "parallel": {"tp": 2, "sequence_parallel": True},
        },
        "pp 2": {"gradient_accumulation_steps": 2, "parallel": {"pp": 2}},
        "ZeRO 3": {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}},
    }
)
"""Layouts that each type runs, on two processes with two micro-batches per step."""
PROCESSES = 2
STEPS = 2
_FILE: Mapping[str, Any] = MappingProxyType(
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}},
        "run": {"seed": 5},
    }
)
_BUCKET_BYTES = 16384
"""Size that gives a small model several buckets."""

LATE = "refused in the first step"
"""Start of the reason if a model is refused at its first micro-batch."""

Outcome = Literal["exact", "refused", "failed"]


@dataclass(frozen=True)
class Small:
    """A model type made small.

    Attributes:
        tested: The model and its data.
        lines: Sizes that were reduced, and parts that are omitted.
        split: Share of the parameters that tensor parallelism splits, or 0 without a plan.
    """

    tested: TestedModel
    lines: tuple[str, ...]
    split: float


@dataclass(frozen=True)
class Cell:
    """Result of one layout of one type.

    Attributes:
        outcome: Kind of result.
        error: Largest relative error of all compared values.
        reason: Reason of a refusal or failure.
    """

    outcome: Outcome
    error: float | None = None
    reason: str = ""


class CellFailed(Exception):
    """A rank failed in a step while others may wait for it. The message is the reason."""


def model_types():
    """Return the names of all types that `AutoModelForCausalLM` builds."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def make_small(name):
    """Return the small version of a type, which is the same for all layouts.

    Errors of its construction are raised.
    """
    config = load({**_FILE, "model": {"config": {"model_type": name}}})
    choice = choose(config, None, layout=Layout(pp=2, dp_shard=2, tp=2))
    model = build(choice.tested, dtype=torch.float64).model
    return Small(choice.tested, choice.lines, _split_share(model))


def _split_share(model):
    try:
        plan = make_plan(model, tp=PROCESSES, blocks=find_blocks(model, None))
    except PlaitError:
        return 0.0
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    split = sum(size for name, size in sizes.items() if plan.dims[name] is not None)
    return split / max(sum(sizes.values()), 1)


def planned(tested, layout):
    """Return the comparison of one cell."""
    resolved = resolve(load({**_FILE, **LAYOUTS[layout]}), world_size=PROCESSES)
    buckets = resolved.data_parallel.model_copy(
        update={"bucket_bytes": _BUCKET_BYTES, "bucket_by_links": False}
    )
    certain = resolved.compression.model_copy(update={"candidates": ()})
    resolved = resolved.model_copy(update={"data_parallel": buckets, "compression": certain})
    return VerificationPlan(
        tested, resolved, ("float64",), steps=STEPS, dtype="float32", blocks=(), lines=()
    )


def run_cell(rank, world, tested, layout):
    """Run one cell, and compare it on rank 0. Collective over two processes.

    Raises:
        CellFailed: A step raised an error.
    """
    plan = planned(tested, layout)
    resolved, dtype = plan.settings("float64")
    built = plan.build(dtype, rank=rank)
    with plan.pass_context("float64", built.model):
        try:
            engine = initialize(
                built.model,
                resolved,
                loss_fn=built.loss,
                forward=built.forward,
                total_steps=plan.steps,
            )
        except PlaitError as error:
            return Cell("refused", reason=str(error))
        except Exception as error:  # models of Transformers raise errors of any type
            return Cell("failed", reason=f"in building: {_described(error)}")
        try:
            trace = engine_trace(engine, plan.data(built))
        except Exception as error:
            where = LATE if isinstance(error, PlaitError) else "in training"
            raise CellFailed(f"{where}: {_described(error)}") from error
        finally:
            engine.close()
    return _compared(plan, trace) if rank == 0 else Cell("exact")


def _described(error):
    if isinstance(error, PlaitError):
        text = str(error)
    else:
        first_line = str(error).partition("\n")[0]
        text = f"{type(error).__name__}: {first_line}"
    cause = error.__cause__
    return f"{text} <- {type(cause).__name__}: {cause}" if cause else text


def _compared(plan, trace):
    largest = worst(compare(_reference(plan.tested), trace))
    bar = EXACT_BAR if plan.tested.exact else ROUNDED_BAR
    if largest.ok(bar):
        return Cell("exact", largest.error)
    reason = f"{largest.name}: error {largest.error:.1e}, allowed {bar:.0e}"
    return Cell("failed", largest.error, reason)


_LAST_REFERENCE: list[tuple[TestedModel, Trace]] = []
"""Reference of the previous cell, for the next layout of the same type."""


def _reference(tested):
    """Return the trace of one process, with the weights that it draws."""
    if _LAST_REFERENCE and _LAST_REFERENCE[0][0] == tested:
        return _LAST_REFERENCE[0][1]
    plan = planned(tested, next(iter(LAYOUTS)))
    model = initialise_weights(
        plan.build(torch.float64).model, blocks=plan.tested.blocks, seed=plan.resolved.seed
    )
    drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trace, unchecked = second_trace(plan, Trace((), (), (), {}, initial=drawn))
    assert trace is not None and not unchecked
    _LAST_REFERENCE[:] = [(tested, replace(trace, initial=drawn))]
    return _LAST_REFERENCE[0][1]
