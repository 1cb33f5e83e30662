"""Plan request (model, devices, batch), and its conversion to a job for the planner's formulas.

`estimate` computes time and memory of all candidates in one call, with closed-form expressions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.errors import InputError, Problem, raise_problems
from plait.planner.built import CountedBytes, counted, not_counted
from plait.planner.constants import Rates, fitted_priors
from plait.planner.hardware import PRECISIONS, Cluster, Numbers
from plait.planner.job import Job, Layouts, plait
from plait.planner.memory import Memory, States, memory_bytes
from plait.planner.models import Model
from plait.planner.states import account_states
from plait.planner.step_time import Step, step_seconds
from plait.planner.techniques import AvailableTechniques, Split, available_techniques, split_of
from plait.sizes import SHORT_NAMES


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory: arrays with one entry per candidate."""

    step: Step
    memory: Memory

    @property
    def seconds(self) -> Numbers:
        """Seconds per optimizer step."""
        return self.step.seconds


def estimate(job: Job, rates: Rates | None = None, states: States | None = None) -> Estimate:
    """Predict time and memory of every candidate.

    Args:
        job: The candidates.
        rates: Constants. None uses those of the package.
        states: Bytes of model states. None computes them from the framework's bytes per parameter.
    """
    rates = rates or fitted_priors().rates
    return Estimate(step_seconds(job, rates), memory_bytes(job, rates, states))


def lower_end(value: float, high: float) -> float:
    """Return the lower end of an interval around `value` with the upper end `high`.

    Intervals are symmetric in the logarithm.
    """
    return value**2 / high


@dataclass(frozen=True)
class Request:
    """Model, cluster and batch to plan for."""

    model: Model
    cluster: Cluster
    global_batch: int
    """Samples per optimizer step."""
    sequence: int
    """Tokens per sample."""
    precision: str = "bf16"
    compile: bool = False
    optimizer_states: str | None = None
    """Form of AdamW's moments (`optimizer.states`)."""
    reduce: str = "fp32"
    """Dtype of the gradient reduction: bf16, fp16 or fp32."""

    @property
    def techniques(self) -> AvailableTechniques:
        """Techniques that the search may propose."""
        techniques = available_techniques(compiled=self.compile)
        if self.optimizer_states is not None:
            techniques = replace(techniques, offload=False)
        return techniques

    @property
    def split(self) -> Split:
        """Restrictions of tensor, sequence, context and pipeline parallelism for the model."""
        return split_of(self.model.architecture)


def check(request: Request) -> None:
    """Validate a request.

    Raises:
        ConfigError: Batch or sequence is smaller than 1.
        InputError: The device does not support the precision.
    """
    device = request.cluster.device
    problems = []
    if request.global_batch < 1:
        problems.append(
            Problem(
                "--batch",
                request.global_batch,
                "a step has at least one sample",
                "set it to the number of samples per optimizer step",
            )
        )

    if request.sequence < 1:
        problems.append(
            Problem(
                "--seq",
                request.sequence,
                "a sample has at least one token",
                "set it to the number of tokens per sample",
            )
        )

    raise_problems(problems)
    if np.isnan(device.flops.get(request.precision, np.nan)):
        supported = ", ".join(p for p in ("bf16", "fp16", "fp32") if p in device.flops)
        raise InputError(
            f"--precision {request.precision}: {device.title} does not support it; use one of"
            f" {supported}"
        )


def job_of(request: Request, layouts: Layouts) -> Job:
    """Return the job for candidate layouts of a request."""
    framework = plait(precision=request.precision, compiled=request.compile)
    framework = replace(framework, wire_reduce=4 if request.reduce == "fp32" else 2)
    model = request.model.architecture
    return Job(
        model=model,
        device=request.cluster.device,
        framework=framework,
        layouts=layouts,
        sequence=request.sequence,
        precision=PRECISIONS.index(request.precision),
        has_exact_blocks=not request.compile and model.is_counted,
        replicates_attention=request.split.replicates_attention,
        counted=_count(request),
    )


def formula_notes(request: Request) -> list[str]:
    """Return notes on properties of a model that the formulas only approximate.

    These are blocks whose saved bytes were not measured, attention scores that are written to
    memory, and dropout on CPU cores.
    """
    model = request.model.architecture
    counting = _counting(request)
    kind = str(model.model_type)
    notes = [not_counted(request.model.section, kind, compiled=request.compile, **counting)]
    saved = _count(request)
    if saved is not None and saved.none.scores > float(model.heads) * request.sequence:
        notes.append(
            f"{kind}: its attention writes scores of {saved.none.scores / 1024:.4g} KiB per token"
            " and block to memory. The bytes include them, but the seconds are those of a kernel"
            " without them and are too low; measure a step first"
        )

    if counting["on_cores"] and float(model.dropout):
        notes.append(
            f"{kind} has dropout of hidden states: the seconds do not include the time in which CPU"
            " cores draw its random numbers"
        )

    return [note for note in notes if note]


def _count(request: Request) -> CountedBytes | None:
    # Compiled blocks save other tensors than the eager ones that are counted.
    if request.compile:
        return None
    kind = str(request.model.architecture.model_type)
    return counted(request.model.section, kind, **_counting(request))


def _counting(request: Request) -> dict[str, Any]:
    """Return keyword arguments of `built.counted` for a request."""
    on_cores = bool(np.all(request.cluster.device.on_cpu))
    return {"sequence": request.sequence, "precision": request.precision, "on_cores": on_cores}


def states_of(request: Request, job: Job, *, every_moment: bool = True) -> States:
    """Return the bytes of model states of candidates, from the ledger of the techniques.

    Args:
        request: The request.
        job: Its candidates.
        every_moment: False considers only a few points in time of a step. This takes a fraction of
            the time. The resulting peak may be too low, but is never too high.
    """
    return account_states(
        job,
        reduce=SHORT_NAMES[request.reduce],
        form=request.optimizer_states,
        every_moment=every_moment,
    )
