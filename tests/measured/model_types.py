"""Every model type that Transformers knows as a causal language model, made small, under one layout at a time: exact, refused or failed.

A cell trains two steps of ragged micro-batches and is compared with the reference that shares no code. The global batch is the same for
every layout, so each type needs one reference. `tools/model_types.py` starts the processes and writes the table.
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
"""What is run of each type, on two processes; two micro-batches a step."""
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
"""Several buckets in a small model."""

LATE = "refused in the first step"
"""How the reason of a refusal begins that came with the first micro-batch."""

Outcome = Literal["exact", "refused", "failed"]


@dataclass(frozen=True)
class Small:
    """A type made small."""

    tested: TestedModel
    lines: tuple[str, ...]
    """What was made small, and what is left out."""
    split: float
    """Share of its parameters that tensor parallelism splits; 0 where there is no plan."""


@dataclass(frozen=True)
class Cell:
    """What one layout of one type came to."""

    outcome: Outcome
    error: float | None = None
    """Largest relative error of all compared values."""
    reason: str = ""
    """Why it was refused, or what went wrong."""


class CellFailed(Exception):
    """One rank gave up in a step, where others may wait for it; the message is the reason."""


def model_types():
    """All that `AutoModelForCausalLM` builds, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def make_small(name):
    """The small version of a type, one for all layouts. Raises what building it raises."""
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
    return sum(size for name, size in sizes.items() if plan.dims[name] is not None) / max(
        sum(sizes.values()), 1
    )


def planned(tested, layout):
    """The comparison of one cell."""
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
    """Collective over the two processes of the default group; rank 0 compares. Raises CellFailed for an error in a step."""
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
        except Exception as error:  # whatever a model's or torch's code raises
            return Cell("failed", reason=f"in building: {_described(error)}")
        try:
            found = engine_trace(engine, plan.data(built))
        except Exception as error:
            where = LATE if isinstance(error, PlaitError) else "in training"
            raise CellFailed(f"{where}: {_described(error)}") from error
        finally:
            engine.close()
    return _compared(plan, found) if rank == 0 else Cell("exact")


def _described(error):
    lines = str(error).splitlines()
    text = (
        str(error)
        if isinstance(error, PlaitError)
        else f"{type(error).__name__}: {lines[0] if lines else ''}"
    )
    return (
        f"{text} <- {type(error.__cause__).__name__}: {error.__cause__}"
        if error.__cause__
        else text
    )


def _compared(plan, found):
    reference = _reference(plan.tested)
    largest = worst(compare(reference, found))
    bar = EXACT_BAR if plan.tested.exact else ROUNDED_BAR
    if largest.ok(bar):
        return Cell("exact", largest.error)
    return Cell(
        "failed", largest.error, f"{largest.name}: error {largest.error:.1e}, allowed {bar:.0e}"
    )


_KEPT: list[tuple[TestedModel, Trace]] = []
"""The last reference, for the next layout of the same type."""


def _reference(tested):
    """One process, from the weights that it would draw."""
    if _KEPT and _KEPT[0][0] == tested:
        return _KEPT[0][1]
    plan = planned(tested, next(iter(LAYOUTS)))
    model = initialise_weights(
        plan.build(torch.float64).model, blocks=plan.tested.blocks, seed=plan.resolved.seed
    )
    drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trace, unchecked = second_trace(plan, Trace((), (), (), {}, initial=drawn))
    assert trace is not None and not unchecked
    _KEPT[:] = [(tested, replace(trace, initial=drawn))]
    return _KEPT[0][1]
