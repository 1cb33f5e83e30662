"""Scales of the widths of constants with which nine in ten rows of held-out sources are in their
intervals.

A source is predicted by constants that were learned without it. Its widths are from other sources.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.frameworks import datasheet_priors, open_kernels
from benchmarks.planner_accuracy.learn import source_weight
from benchmarks.planner_accuracy.predict import evaluate, interval_of_time
from benchmarks.planner_accuracy.runs import Row
from plait.planner.constants import Priors
from plait.planner.search import NINETY

Array = NDArray[np.float64]
COVERAGE = 0.90
_NARROW = 1e-3
"""Scale that removes the share of constants from an interval."""


@dataclass(frozen=True)
class Scales:
    """Factors on widths."""

    constants: float = 1.0
    """Factor on constants that were measured, at least 1."""
    kernels: float = 1.0
    """Factor on the speed of kernels of frameworks without a measured run, at most 1."""


_SCALES = (
    *(Scales(kernels=factor) for factor in np.arange(0.3, 1.0, 0.01)),
    *(Scales(constants=factor) for factor in np.arange(1.0, 3.0, 0.01)),
)
"""Scales from the narrowest to the widest. Scored rows are of frameworks that were held out with
their source, so intervals that are too wide come from the kernels and not from other constants."""


@dataclass(frozen=True)
class Residuals:
    """Rows of a family of sources: the absolute logarithm of measured / predicted, and the parts
    of its deviation by measured constants, by kernels without a measurement, and by the rest."""

    size: Array
    constants: Array
    kernels: Array
    noise: Array

    def inside(self, scales: Scales) -> float:
        scaled_constants = scales.constants * self.constants
        scaled_kernels = scales.kernels * self.kernels
        deviation = np.sqrt(scaled_constants**2 + scaled_kernels**2 + self.noise**2)
        return float((self.size <= NINETY * deviation).sum())


def residuals(rows: Sequence[Row], priors: Priors) -> Residuals:
    """Return the residuals of seconds that `priors`, learned without the rows, predicts."""
    size = np.zeros(0)
    variances = []
    for scales in (Scales(), Scales(constants=_NARROW), Scales(kernels=_NARROW)):
        evaluation = evaluate(rows, priors=scaled(priors, scales))
        intervals = filter(None, map(interval_of_time, evaluation.predictions))
        predicted, measured, low, high = np.array(list(intervals)).reshape(-1, 4).T
        size = np.abs(np.log(measured / predicted))
        variances.append((np.log(high / low) / 2 / NINETY) ** 2)
    total, without_constants, without_kernels = variances
    constants = np.maximum(total - without_constants, 0)
    kernels = np.maximum(total - without_kernels, 0)
    noise = np.maximum(total - constants - kernels, 0)
    return Residuals(size, np.sqrt(constants), np.sqrt(kernels), np.sqrt(noise))


def scales_of(families: Iterable[Residuals]) -> Scales:
    """Return the least scales that cover COVERAGE of the rows, weighted as in `learn`."""
    weighted = [(source_weight(len(rows.size)), rows) for rows in families if len(rows.size)]
    total = sum(weight * len(rows.size) for weight, rows in weighted)
    for scales in _SCALES:
        inside = sum(weight * rows.inside(scales) for weight, rows in weighted)
        if inside >= COVERAGE * total:
            return scales
    return _SCALES[-1]


def scaled(priors: Priors, scales: Scales) -> Priors:
    """Return `priors` with scaled widths of constants of time.

    A constant without a measurement keeps its width, except for kernels of frameworks of the table.
    """
    believed = datasheet_priors().constants
    unscaled = {"stack.plait", *open_kernels()}
    constants = dict(priors.constants)
    for name, constant in priors.constants.items():
        if name.startswith("memory:"):
            continue
        factor = 1.0
        if constant.width != believed[name].width:
            factor = scales.constants
        elif name.startswith("stack.") and name not in unscaled:
            factor = scales.kernels
        constants[name] = replace(constant, width=constant.width * factor)
    return replace(priors, constants=constants)
