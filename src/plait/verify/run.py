"""Execution of a plan: the layout in all processes, the references in one, and the comparison.

The layout is started by `plait.initialize` as in any training, so no technique is named here. The
references are plain torch and use the same weights, data and optimizer.
"""

from __future__ import annotations

import copy
import faulthandler
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.cluster.ending import end_process
from plait.cluster.topology import place
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.losses.balance_loss import with_balance_loss
from plait.optim.optimizer import build_optimizer
from plait.parallel.micro_batches import to_device
from plait.units import dtype_of
from plait.verify.model_under_test import Built, give_weights
from plait.verify.parity import Trace, engine_trace, reference_trace
from plait.verify.plan import Pass, VerificationPlan
from plait.verify.report import (
    INDEPENDENT,
    Report,
    Section,
    compare_configured,
    compare_float64,
    compare_independent,
)
from plait.verify.second import second_trace

PLAN = "plan.pickle"
TRACES = "traces.pickle"
Traces = dict[Pass, Trace]


def main(arguments: Sequence[str]) -> None:
    """Run the plan in a started process. The arguments are FOLDER SECONDS.

    The folder contains the plan, and rank 0 writes the traces to it. A run that takes longer than
    SECONDS is ended, because a defect may make ranks wait for each other.
    """
    folder = Path(arguments[0])
    seconds = float(arguments[1])
    with (folder / PLAN).open("rb") as file:
        plan: VerificationPlan = pickle.load(file)
    traces = run_watched(plan, seconds=seconds)
    if place().rank == 0:
        with (folder / f"{TRACES}.partial").open("wb") as file:
            pickle.dump(traces, file)
        (folder / f"{TRACES}.partial").rename(folder / TRACES)


def run_watched(plan: VerificationPlan, *, seconds: float) -> Traces:
    """Call `run_layout`, and end the process with the stacks of all threads after `seconds`.

    Output of engines is sent to standard error, because standard output contains the report.
    """
    # torch warns that gathering full tensors of a layout of two axes takes two collectives, which
    # does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sys.stdout.flush()
    report = os.dup(1)
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        return run_layout(plan)
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        os.dup2(report, 1)
        os.close(report)


def run_layout(plan: VerificationPlan) -> Traces:
    """Run every pass of the plan in this process. Collective."""
    engines: list[Engine] = []
    traces: Traces = {}
    try:
        for name in plan.passes:
            traces[name] = _engine_trace(plan, name, engines)
    finally:
        # The first engine created the process group that the others use.
        for engine in reversed(engines):
            engine.close()
    return traces


def _engine_trace(plan: VerificationPlan, name: Pass, engines: list[Engine]) -> Trace:
    resolved, dtype = plan.settings(name)
    built = plan.build(dtype, rank=place().rank)
    with plan.lifting(name, built.model):
        engine = initialize(
            built.model, resolved, loss_fn=built.loss, forward=built.forward, total_steps=plan.steps
        )
        engines.append(engine)
        return engine_trace(engine, plan.data(built))


@dataclass(frozen=True)
class References:
    """Traces of training in a single process, with the initial weights of a pass.

    `exact` is computed in float64, `single` in the precision of the pass.
    """

    exact: Trace
    single: Trace | None


def references(plan: VerificationPlan, name: Pass, trace: Trace) -> References:
    """Compute the references of a pass in this process.

    Args:
        plan: The plan.
        name: The pass.
        trace: Trace of the layout, whose skipped steps and loss scales the references use.
    """
    _, dtype = plan.settings(name)
    built = plan.build(dtype)
    model = give_weights(built.model, blocks=plan.tested.blocks, seed=plan.resolved.seed).to(
        plan.device
    )
    data = [
        [to_device(piece, torch.device(plan.device)) for piece in step] for step in plan.data(built)
    ]
    exact_model = model if name == "float64" else _in_float64(plan, model)
    with plan.lifting("float64", exact_model):
        exact = _trace(plan, built, exact_model, data, trace)
    if name == "float64":
        return References(exact, None)
    precision = plan.resolved.precision
    single = _trace(
        plan,
        built,
        model,
        data,
        trace,
        compute=dtype_of(precision.compute) if precision.compute else None,
        reduce=dtype_of(precision.reduction) if precision.reduction else None,
        scales=trace.scales,
    )
    return References(exact, single)


def _in_float64(plan: VerificationPlan, model: nn.Module) -> nn.Module:
    """Return a float64 model with the same values.

    The model is built again, because some layers are constructed differently for float64.
    """
    if plan.tested.fields is None:
        return copy.deepcopy(model).double()
    wide = give_weights(plan.build(torch.float64).model, blocks=plan.tested.blocks, seed=0).to(
        plan.device
    )
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.copy_(model.get_parameter(name))
        for name, buffer in wide.named_buffers():
            buffer.copy_(model.get_buffer(name))
    return wide


def _trace(
    plan: VerificationPlan,
    built: Built,
    model: nn.Module,
    data: list[list[Any]],
    trace: Trace,
    **precision: Any,
) -> Trace:
    return reference_trace(
        model,
        data,
        loss_fn=with_balance_loss(built.loss, model) or built.loss,
        optimizer=lambda _: build_optimizer(
            plan.resolved.optimizer, list(model.named_parameters())
        ),
        clipping=plan.resolved.gradient_clipping,
        forward=built.forward,
        skipped=trace.skipped,
        **precision,
    )


def compare(plan: VerificationPlan, traces: Traces, *, tolerance: float | None = None) -> Report:
    """Compute the references of every pass, and compare.

    Args:
        plan: The plan.
        traces: Traces of the layout.
        tolerance: Largest relative error in float64, instead of the default.
    """
    sections = []
    for name, trace in traces.items():
        truth = references(plan, name, trace)
        if truth.single is None:
            sections.append(compare_float64(plan, truth.exact, trace, tolerance=tolerance))
            second, unchecked = second_trace(plan, trace)
            sections.append(
                compare_independent(plan, second, trace, unchecked=unchecked, tolerance=tolerance)
            )
        else:
            sections.append(compare_configured(plan, truth.exact, truth.single, trace))
    if "float64" not in traces:
        why = "not compared: it computes in float64, and that comparison was not asked for"
        sections.append(Section("independent", INDEPENDENT, (), (why,)))
    facts = {
        "processes": plan.world_size,
        "device": plan.device,
        "layout": plan.resolved.layout.degrees,
        "zero_stage": plan.resolved.data_parallel.stage,
        "steps": plan.steps,
        "notes": [f"{topic}: {line}" if topic else line for topic, line in plan.lines],
    }
    return Report(tuple(sections), plan.blocks, facts)


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
