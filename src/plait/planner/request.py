"""What is planned for: a model, devices and a batch, and what candidates of it are as jobs to
price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.errors import InputError, Problem, refuse
from plait.planner.constants import Rates
from plait.planner.counted import counted, not_counted
from plait.planner.estimate import Estimate, estimate
from plait.planner.frameworks import plait, with_compiled_blocks
from plait.planner.hardware import PRECISIONS, Cluster
from plait.planner.job import Job, Layouts
from plait.planner.memory import States
from plait.planner.models import Model
from plait.planner.offers import EVERYTHING, Offers, offered
from plait.planner.space import Space, build_space
from plait.planner.splits import Split, split_of
from plait.planner.states import account_states


@dataclass(frozen=True)
class Request:
    """What is planned."""

    model: Model
    cluster: Cluster
    global_batch: int
    """Samples of an optimizer step."""
    sequence: int
    """Tokens of a sample."""
    precision: str = "bf16"
    compile: bool = False
    everything: bool = False
    """Also what this version does not run."""
    optimizer_states: str | None = None
    """The form of AdamW's averages (`optimizer.states`)."""
    reduce: str = "fp32"
    """What gradients are reduced in: bf16, fp16 or fp32."""

    @property
    def offers(self) -> Offers:
        """What the search may propose."""
        found = EVERYTHING if self.everything else offered(compiled=self.compile)
        return found if self.optimizer_states is None else replace(found, offload=False)

    @property
    def split(self) -> Split:
        """What tensor parallelism may do to the model."""
        return split_of(self.model.architecture)


def check(request: Request) -> None:
    """Raise ConfigError for a batch that is none, InputError for a precision that the device does
    not compute in.
    """
    device = request.cluster.device
    problems = []
    if request.global_batch < 1:
        problems.append(
            Problem(
                "--batch",
                request.global_batch,
                "a step has at least one sample",
                "give the samples of an optimizer step",
            )
        )
    if request.sequence < 1:
        problems.append(
            Problem(
                "--seq",
                request.sequence,
                "a sample has at least one token",
                "give the tokens of a sample",
            )
        )
    refuse(problems)
    if np.isnan(device.flops.get(request.precision, np.nan)):
        has = ", ".join(p for p in ("bf16", "fp16", "fp32") if p in device.flops)
        raise InputError(
            f"--precision {request.precision}: {device.title} does not compute so; it has {has}"
        )


def space_of(request: Request, fixed: Mapping[str, int] | None = None) -> Space:
    """Every candidate of a request. Raises ConfigError where the rules leave none."""
    return build_space(
        request.model.architecture,
        request.cluster,
        global_batch=request.global_batch,
        sequence=request.sequence,
        offers=request.offers,
        split=Split() if request.everything else request.split,
        fixed=fixed,
    )


def job_of(request: Request, layouts: Layouts) -> Job:
    """Candidates of a request as something to price."""
    model = request.model.architecture
    found = plait(precision=request.precision)
    if request.compile:
        found = with_compiled_blocks(found)
    found = replace(found, wire_reduce=4 if request.reduce == "fp32" else 2)
    return Job(
        model=model,
        device=request.cluster.device,
        framework=found,
        layouts=layouts,
        sequence=request.sequence,
        precision=PRECISIONS.index(request.precision),
        own=not request.compile and model.is_counted,
        whole_attention=request.split.whole_attention,
        counted=(
            None
            if request.compile
            else counted(request.model.section, str(model.model_type), **_counting(request))
        ),
    )


def formula_notes(request: Request) -> list[str]:
    """What to tell of a model that formulas do not price as it runs: blocks that are not counted,
    scores of attention in memory, and dropout on CPU cores.
    """
    model = request.model.architecture
    counting = _counting(request)
    kind = str(model.model_type)
    notes = [not_counted(request.model.section, kind, compiled=request.compile, **counting)]
    found = None if request.compile else counted(request.model.section, kind, **counting)
    if found is not None and found.none.scores > float(model.heads) * request.sequence:
        notes.append(
            f"{kind}: its attention has scores in memory, of {found.none.scores / 1024:.4g} KiB a"
            " token and block: they are in the bytes, and the time to write and read them is not"
            " in the seconds, which are those of one kernel and too low; measure a step first"
        )
    if counting["on_cores"] and float(model.dropout):
        notes.append(
            f"{kind} drops hidden states: the random numbers that CPU cores draw for it are not in"
            " the seconds"
        )
    return [note for note in notes if note]


def _counting(request: Request) -> dict[str, Any]:
    on_cores = bool(np.all(request.cluster.device.on_cpu))
    return {"sequence": request.sequence, "precision": request.precision, "on_cores": on_cores}


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def estimate_of(request: Request, layouts: Layouts, rates: Rates) -> Estimate:
    """What candidates of a request cost."""
    job = job_of(request, layouts)
    return estimate(job, rates, states_of(request, job))


def states_of(
    request: Request, job: Job, *, inner: int | None = None, every_moment: bool = True
) -> States:
    """Bytes of model states of its candidates, from the techniques' own accounts; `inner` is the
    rank to price between the ends of a pipeline, by default the one that keeps most. Without
    `every_moment` a peak is of few moments of a step: it may be too low, never too high, and takes
    a fraction of the time.
    """
    compute = _DTYPES[request.precision] if request.precision != "fp32" else None
    reduce = _DTYPES[request.reduce]
    form = request.optimizer_states
    return account_states(
        job, compute=compute, reduce=reduce, inner=inner, form=form, every_moment=every_moment
    )
