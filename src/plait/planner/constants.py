"""Fitted constants for rates that datasheets do not state, with their uncertainty.

Every constant is a positive factor, whose logarithm has a normal prior. `data/constants.json`
contains the values that `python -m benchmarks.planner_accuracy --learn` fits to published runs;
`plait.planner.calibrate` adapts these values to one machine and framework.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np

from plait.planner.hardware import DEVICE_FAMILIES, DeviceSpec, Numbers
from plait.planner.job import Framework


@dataclass(frozen=True)
class Constant:
    """Prior of a constant.

    Attributes:
        median: Median value.
        width: Standard deviation of the logarithm over machines and frameworks.
        meaning: Description for reports.
        least: Smallest physically possible value.
        most: Largest physically possible value.
    """

    median: float
    width: float
    meaning: str
    least: float = 0.0
    most: float = math.inf


def of_kernels(name: str) -> Constant:
    """Return the prior of the constant `stack.NAME`, which is the speed of a framework's kernels.

    The prior is narrow, because speeds differ less between frameworks than between machines and
    authors of published runs (`benchmarks/planner_accuracy/learn.py`).
    """
    return Constant(1.0, 0.07, f"speed of the kernels of {name}")


CONSTANTS: dict[str, Constant] = {
    "gemm.volta": Constant(0.60, 0.2, "share of the peak that large matrix products reach", 0, 0.8),
    "gemm.ampere": Constant(
        0.78, 0.1, "share of the peak that large matrix products reach", 0, 0.9
    ),
    "gemm.hopper": Constant(
        0.70, 0.1, "share of the peak that large matrix products reach", 0, 0.85
    ),
    "gemm.blackwell": Constant(
        0.70, 0.12, "share of the peak that large matrix products reach", 0, 0.9
    ),
    "gemm.cdna3": Constant(0.50, 0.2, "share of the peak that large matrix products reach", 0, 0.8),
    "gemm.cpu": Constant(0.60, 0.5, "share of the peak that large matrix products reach"),
    "gemm.fp8": Constant(
        0.80, 0.15, "share of the peak that float8 products reach, relative to 16 bits"
    ),
    "gemm.fp4": Constant(
        0.60, 0.2, "share of the peak that float4 products reach, relative to 16 bits"
    ),
    "ramp": Constant(
        1e-5, 0.8, "seconds that a kernel takes beyond its work, to start and to end", 2e-6, 2e-5
    ),
    "attention.volta": Constant(
        0.40, 0.3, "share of the peak that attention reaches, causal FLOPs"
    ),
    "attention.ampere": Constant(
        0.50, 0.2, "share of the peak that attention reaches, causal FLOPs"
    ),
    "attention.hopper": Constant(
        0.42, 0.25, "share of the peak that attention reaches, causal FLOPs"
    ),
    "attention.blackwell": Constant(
        0.45, 0.25, "share of the peak that attention reaches, causal FLOPs"
    ),
    "attention.cdna3": Constant(
        0.30, 0.3, "share of the peak that attention reaches, causal FLOPs"
    ),
    "attention.cpu": Constant(0.40, 0.5, "share of the peak that attention reaches, causal FLOPs"),
    "memory": Constant(
        0.75, 0.1, "share of the memory's bandwidth that element-wise kernels reach", 0, 0.95
    ),
    "link": Constant(0.75, 0.1, "share of the link inside a node", 0, 0.95),
    "nic": Constant(0.75, 0.15, "share of the network between nodes", 0, 0.95),
    "congestion": Constant(
        0.1, 0.5, "the share of the network falls with the number of domains to this power"
    ),
    "latency": Constant(
        1.0,
        0.4,
        "time per step of a collective, relative to 3.4 us inside a node and 14 us between nodes",
    ),
    "p2p": Constant(1.0, 0.5, "exposed time of sends between stages"),
    "bubble": Constant(
        1.0, 0.05, "idle time of the pipeline, relative to the schedule's formula", 0.95, 1.5
    ),
    "contention": Constant(0.15, 0.3, "share of overlapped traffic that slows computation down"),
    "dp": Constant(1.0, 0.4, "exposed reductions and gathers of data parallelism"),
    "host": Constant(
        1.0, 0.7, "time of the host to launch kernels, relative to the framework's usual time"
    ),
    "optimizer": Constant(
        1.0, 0.4, "time of the optimizer step, relative to its bytes over the memory's bandwidth"
    ),
    "fixed": Constant(0.02, 1.0, "seconds of a step that nothing else explains"),
    "straggler": Constant(0.008, 0.8, "slowdown per doubling of the nodes"),
    "memory.cpu": Constant(
        0.50, 0.6, "share of a core's memory bandwidth that element-wise kernels reach"
    ),
    "link.cpu": Constant(
        0.30, 0.8, "share of the memory's bandwidth that processes of one machine exchange at"
    ),
    "latency.cpu": Constant(
        30.0, 1.0, "time per step of a collective between processes, relative to 3.4 us"
    ),
    "packing.cpu": Constant(
        3.0,
        0.6,
        "number of times that sharded gradients pass through memory for their collective",
    ),
    "crowding.cpu": Constant(
        0.10,
        0.8,
        "computation slows with the number of processes of a machine to this power",
    ),
    "overall": Constant(1.0, 0.08, "speed of all computation on one machine"),
    # Wide, because no run of Plait on a GPU was in the fit.
    "stack.plait": replace(of_kernels("plait"), width=0.2),
}
"""Priors by name, from datasheets and the literature. Fitted medians replace their values."""

MEMORY_CONSTANTS: dict[str, Constant] = {
    "states": Constant(1.0, 0.02, "bytes of model states, relative to the formula"),
    "activations": Constant(1.0, 0.25, "bytes of activations, relative to the formula"),
    "logits": Constant(1.0, 0.2, "bytes of logits and loss, relative to the formula"),
    "slack": Constant(
        1.0, 0.4, "unused bytes that the allocator reserves, relative to the framework's usual"
    ),
    "context": Constant(
        1.0, 0.4, "bytes of the device context and the communicators, relative to the formula"
    ),
}


@dataclass(frozen=True)
class Rates:
    """Values of all constants: scalars, or arrays with one entry per candidate of a job."""

    values: Mapping[str, Numbers]

    def __getitem__(self, name: str) -> Numbers:
        return self.values[name]

    def by_family(self, name: str, device: DeviceSpec) -> Numbers:
        """Return the value of the constant `name` for each candidate's device family."""
        return np.choose(
            np.asarray(device.family),
            [self.values[f"{name}.{family}"] for family in DEVICE_FAMILIES],
        )

    def on(self, name: str, device: DeviceSpec) -> Numbers:
        """Return the value of the constant `name` for GPUs or CPUs, whichever a candidate uses."""
        return np.where(device.on_cpu, self.values[f"{name}.cpu"], self.values[name])

    def by_stack(self, framework: Framework) -> Numbers:
        """Return the kernel speed constant of each candidate's framework."""
        names = np.asarray(framework.name)
        first = str(names.flat[0])
        # Every search has one framework, and sorting the names would take longer than all the rest.
        if np.all(names == first):
            return np.full(names.shape, self.values[f"stack.{first}"])
        names, index = np.unique(names, return_inverse=True)
        return np.array([self.values[f"stack.{name}"] for name in names])[index]


@dataclass(frozen=True)
class Priors:
    """Priors of all constants, before a fit to the machine's own runs."""

    constants: Mapping[str, Constant]
    time_spread: float
    """Standard deviation of log(measured / predicted seconds) that constants do not explain."""
    memory_spread: float
    """Standard deviation of log(measured / predicted bytes) that constants do not explain."""

    @property
    def rates(self) -> Rates:
        """Medians of the priors of all constants."""
        return Rates({name: constant.median for name, constant in self.constants.items()})

    @property
    def time_names(self) -> tuple[str, ...]:
        """Names of the constants that the predicted time of a step depends on."""
        return tuple(name for name in self.constants if not name.startswith("memory:"))


def datasheet_priors() -> Priors:
    """Return the priors from datasheets and the literature, without fitted constants."""
    memory = {f"memory:{name}": constant for name, constant in MEMORY_CONSTANTS.items()}
    return Priors({**CONSTANTS, **memory}, time_spread=0.10, memory_spread=0.12)


@cache
def fitted_priors() -> Priors:
    """Return the priors with the constants fitted to published runs (`data/constants.json`)."""
    base = datasheet_priors()
    file = files("plait.planner") / "data" / "constants.json"
    if not file.is_file():
        return base
    learned = json.loads(file.read_text(encoding="utf-8"))
    return replace(
        with_learned(base, learned["constants"]),
        time_spread=learned["time_spread"],
        memory_spread=learned["memory_spread"],
    )


@dataclass(frozen=True)
class IntervalCoverage:
    """Fraction of measurements within the 90 % intervals of their predictions."""

    rows: int
    share: float


@cache
def interval_coverage() -> Mapping[str, IntervalCoverage]:
    """Return the coverage of 90 % intervals for published runs that were not in the fit.

    Keys are "time", "time_experts" and "memory" (`data/unseen.json`).
    """
    file = files("plait.planner") / "data" / "unseen.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    return {name: IntervalCoverage(*entry) for name, entry in content["held"].items()}


def with_learned(base: Priors, learned: Mapping[str, tuple[float, float]]) -> Priors:
    """Return `base` with the (median, width) of the constants in `learned`.

    Constants that `base` does not have are ignored.
    """
    constants = dict(base.constants)
    for name, (median, width) in learned.items():
        if name in constants:
            constants[name] = replace(constants[name], median=median, width=width)
    return replace(base, constants=constants)


def coverage_of_intervals(*, experts: bool) -> str:
    """Return a sentence with the coverage of 90 % intervals for runs that were not in the fit."""
    coverage = interval_coverage()
    time = coverage["time_experts" if experts else "time"]
    memory = coverage["memory"]
    return (
        "90 %: measured on the sources that the planner was fitted to. Of published runs of other "
        f"sources, {time.share:.0%} of {time.rows} step times and {memory.share:.0%} of "
        f"{memory.rows} peaks of memory lay in the interval; plait calibrate fits it to your "
        "machine"
    )
