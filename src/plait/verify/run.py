"""Execution of a verification plan: the run of the layout, the references, and the comparison.

`plait.initialize` starts the layout as in any training run, so this module does not depend on any
technique. The first reference trains in one process with plain torch, and has the same weights,
data and optimizer. The independent reference (`verify.independent`) gets the layout's initial
weights as arrays; the comparison of the layout with the first reference checks that these weights
are correct.
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

import numpy as np
import torch
from torch import nn

from plait.cluster.process_groups import end_process
from plait.cluster.topology import place
from plait.config.resolving.resolve import Resolved
from plait.config.schema.optimization import OptimizerSpec
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.losses.balance_loss import with_balance_loss
from plait.losses.loss import causal_lm_loss
from plait.model.experts import enables_balance_loss
from plait.optim.optimizer import build_optimizer
from plait.parallel.micro_batches import to_device
from plait.sizes import dtype_of
from plait.verify import independent
from plait.verify.model_under_test import TestableModel, initialise_weights, transformers_model
from plait.verify.parity import ReferenceNumerics, Trace, engine_trace, reference_trace
from plait.verify.plan import Pass, VerificationPlan
from plait.verify.report import (
    INDEPENDENT,
    Report,
    Section,
    compare_configured,
    compare_float64,
    compare_independent,
)
from plait.verify.shrink import without_dropout

_KERNELS = {"fused", "foreach", "capturable"}
"""Options of torch's optimizers that do not change the update."""


PLAN = "plan.pickle"
TRACES = "traces.pickle"
Traces = dict[Pass, Trace]


def main(arguments: Sequence[str]) -> None:
    """Run the plan in one of the started processes.

    Args:
        arguments: FOLDER and SECONDS. FOLDER contains the plan, and rank 0 writes the traces to
            it. A run that takes longer than SECONDS is terminated, because an error in a layout
            may make ranks wait for each other.
    """
    folder = Path(arguments[0])
    seconds = float(arguments[1])
    with (folder / PLAN).open("rb") as file:
        plan: VerificationPlan = pickle.load(file)
    traces = run_watched(plan, seconds=seconds)
    if place().rank == 0:
        # Renamed when it is complete, so that its existence means that the run has succeeded.
        with (folder / f"{TRACES}.partial").open("wb") as file:
            pickle.dump(traces, file)
        (folder / f"{TRACES}.partial").rename(folder / TRACES)


def run_watched(plan: VerificationPlan, *, seconds: float) -> Traces:
    """Call `run_layout`, and terminate the process if the call takes longer than `seconds`.

    The stacks of all threads are printed before the process is terminated. Output of the engine
    goes to standard error, because standard output contains the report.
    """
    # torch warns that gathering full tensors of a layout of two axes takes two collectives, which
    # does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sys.stdout.flush()
    report = os.dup(1)
    # At the level of descriptors, because libraries in C and child processes write to them
    # directly.
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
            resolved, dtype = plan.settings(name)
            built = plan.build(dtype, rank=place().rank)
            with plan.pass_context(name, built.model):
                engine = start_engine(plan, built, resolved)
                engines.append(engine)
                traces[name] = engine_trace(engine, plan.data(built))
    finally:
        # The first engine created the process group that the others use.
        for engine in reversed(engines):
            engine.close()
    return traces


def start_engine(plan: VerificationPlan, built: TestableModel, resolved: Resolved) -> Engine:
    """Return the engine for a pass. The caller must close it. Collective."""
    return initialize(
        built.model, resolved, loss_fn=built.loss, forward=built.forward, total_steps=plan.steps
    )


@dataclass(frozen=True)
class References:
    """Traces of training in one process, with the initial weights that the layout has in a pass.

    `exact` is computed in float64, `single` in the precision of the pass.
    """

    exact: Trace
    single: Trace | None


def references(plan: VerificationPlan, name: Pass, trace: Trace) -> References:
    """Compute the references of a pass in this process.

    Args:
        plan: The plan.
        name: The pass.
        trace: Trace of the layout. The references skip the same steps and use the same loss scales.
    """
    _, dtype = plan.settings(name)
    built = plan.build(dtype)
    # The same seed as the layout, whose initial weights are compared.
    initialise_weights(built.model, blocks=plan.tested.blocks, seed=plan.resolved.seed)
    model = built.model.to(plan.device)
    data = _data_on_device(plan, built)
    exact_model = model
    if name != "float64":
        exact_model = _in_float64(plan, model)
    with plan.pass_context("float64", exact_model):
        exact = _trace(plan, built, exact_model, data, ReferenceNumerics(skipped=trace.skipped))
    if name == "float64":
        return References(exact, None)
    precision = plan.resolved.precision
    numerics = ReferenceNumerics(
        compute=dtype_of(precision.compute) if precision.compute else None,
        reduce=dtype_of(precision.reduction) if precision.reduction else None,
        scales=trace.scales,
        skipped=trace.skipped,
    )
    return References(exact, _trace(plan, built, model, data, numerics))


def _data_on_device(plan: VerificationPlan, built: TestableModel) -> list[list[Any]]:
    device = torch.device(plan.device)
    steps = []
    for step in plan.data(built):
        micro_batches = [to_device(batch, device) for batch in step]
        steps.append(micro_batches)
    return steps


def _in_float64(plan: VerificationPlan, model: nn.Module) -> nn.Module:
    """Return a float64 model with the weights and buffers of `model`.

    The model is built again, because some layers are constructed differently for float64.
    """
    if plan.tested.fields is None:
        return copy.deepcopy(model).double()
    # The seed of `initialise_weights` does not matter, because every value is copied below.
    wide = plan.build(torch.float64).model
    initialise_weights(wide, blocks=plan.tested.blocks, seed=0)
    wide = wide.to(plan.device)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.copy_(model.get_parameter(name))
        for name, buffer in wide.named_buffers():
            buffer.copy_(model.get_buffer(name))
    return wide


def _trace(
    plan: VerificationPlan,
    built: TestableModel,
    model: nn.Module,
    data: list[list[Any]],
    numerics: ReferenceNumerics,
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
        numerics=numerics,
    )


def compare(plan: VerificationPlan, traces: Traces, *, tolerance: float | None = None) -> Report:
    """Compute the references of every pass, and compare the traces of the layout with them.

    Args:
        plan: The plan.
        traces: Traces of the layout.
        tolerance: Largest relative error in float64, instead of the default.
    """
    sections = []
    for name, trace in traces.items():
        truth = references(plan, name, trace)
        if truth.single is not None:
            sections.append(compare_configured(plan, truth.exact, truth.single, trace))
            continue
        sections.append(compare_float64(plan, truth.exact, trace, tolerance=tolerance))
        second, unchecked = second_trace(plan, trace)
        sections.append(
            compare_independent(plan, second, trace, unchecked=unchecked, tolerance=tolerance)
        )
    if "float64" not in traces:
        why = "not compared: this reference computes in float64, and that pass was not selected"
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


def second_trace(plan: VerificationPlan, trace: Trace) -> tuple[Trace | None, str]:
    """Train with the independent reference in float64.

    If the optimizer is not AdamW, the reference ends with the gradients of the first step.

    Returns:
        The trace (None if nothing can be checked), and a description of what is not checked.
    """
    built = plan.build(torch.float64)
    model = _model_with_buffers(plan)
    unmatched = sorted({name for name, _ in model.named_parameters()} ^ set(trace.initial))
    unchecked = ""
    if built.loss is not causal_lm_loss:
        unchecked = (
            "this reference only has cross entropy over tokens, but the model has its own loss"
        )
    elif enables_balance_loss(built.model):
        unchecked = (
            "this reference has no balance loss, which model.config.output_router_logits enables"
        )
    elif unmatched:
        # The first reference reports these weights as a difference.
        unchecked = (
            f"{len(unmatched)} weights are only in the model or only in the layout:"
            f" {', '.join(unmatched[:3])}"
        )
    if unchecked:
        return None, f"not compared: {unchecked}"

    data = _data_on_device(plan, built)
    adamw = adamw_of(plan.resolved.optimizer)
    if isinstance(adamw, str):
        unchecked = (
            "compared: loss, norm and gradients of the first step; not compared: everything after"
            f" it, because {adamw}"
        )
        data = data[:1]
        # A learning rate of 0: the update is computed and changes nothing.
        adamw = independent.AdamW(0.0, 0.0, 0.0, 1.0, 0.0)
    with plan.pass_context("float64", model):
        result = independent.train(
            model,
            {name: tensor.double().numpy() for name, tensor in trace.initial.items()},
            data,
            optimizer=adamw,
            clipping=plan.resolved.gradient_clipping,
            skipped=trace.skipped,
        )
    gradients: list[dict[str, torch.Tensor | None]] = []
    for step in result.gradients:
        tensors = {}
        for name, gradient in step.items():
            tensors[name] = None if gradient is None else torch.from_numpy(gradient)
        gradients.append(tensors)
    parameters = {}
    if not unchecked:
        for name, value in result.parameters.items():
            # The update of a scalar returns a number instead of an array.
            parameters[name] = torch.from_numpy(np.asarray(value))
    second = Trace(tuple(result.losses), tuple(result.norms), tuple(gradients), parameters)
    return second, unchecked


def adamw_of(spec: OptimizerSpec) -> independent.AdamW | str:
    """Return the hyperparameters of AdamW, or the reason why the optimizer is not compared.

    Defaults are those of DeepSpeed: weight decay 0, or torch's 0.01 with `torch_adam`.
    """
    spec = spec.resolved()
    params = {name: value for name, value in spec.params.items() if name not in _KERNELS}
    decoupled = spec.type == "AdamW" or (spec.type == "Adam" and params.get("adam_w_mode", True))
    if not decoupled:
        return f"this reference only has AdamW, but the optimizer is {spec.type}"
    if spec.states is not None:
        return f"this reference has exact moments, but optimizer.states is {spec.states}"
    for name in ("amsgrad", "maximize"):
        if params.get(name):
            return f"this reference does not support {name}"
    beta1, beta2 = params.get("betas", (0.9, 0.999))
    default_decay = 0.01 if params.get("torch_adam", False) else 0.0
    return independent.AdamW(
        lr=params.get("lr", 1e-3),
        beta1=beta1,
        beta2=beta2,
        eps=params.get("eps", 1e-8),
        weight_decay=params.get("weight_decay", default_decay),
    )


def _model_with_buffers(plan: VerificationPlan) -> nn.Module:
    """Return the model in float64, with the buffers that the model's own code initialises."""
    if plan.tested.fields is None:
        return plan.build(torch.float64).model.to(plan.device)
    model = transformers_model(plan.tested.fields, dtype=torch.float64, device="cpu")
    without_dropout(model)
    # Constructors compute tables (GPT-J's sines) in the current default dtype, so a model that is
    # built for float64 has other tables than one that is built on meta. Transformers'
    # `_init_weights` computes them again, as `from_pretrained` does.
    with torch.no_grad():
        for module in model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                model._init_weights(module)  # type: ignore[operator]
    return model.train().to(plan.device)


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
