"""Scales of the widths of constants with which nine in ten rows of held-out sources are in their
intervals.

A source is predicted by constants that were learned without it. Its widths are from other sources.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.frameworks import datasheet_priors, open_kernels
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


_SCALES = tuple(
    chain(
        (Scales(kernels=factor) for factor in np.arange(0.3, 1.0, 0.01)),
        (Scales(constants=factor) for factor in np.arange(1.0, 3.0, 0.01)),
    )
)
"""Scales from the narrowest to the widest. Scored rows are of frameworks that were held out with
their source, so intervals that are too wide come from the kernels and not from other constants."""


@dataclass(frozen=True)
class Residuals:
    """Rows of one family of sources: the absolute logarithm of measured / predicted, and the parts of
    its deviation by measured constants, by kernels without a measurement, and by the rest."""

    size: Array
    constants: Array
    kernels: Array
    noise: Array

    def inside(self, scales: Scales) -> float:
        """Return the number of rows in their intervals."""
        deviation = np.sqrt(
            (scales.constants * self.constants) ** 2
            + (scales.kernels * self.kernels) ** 2
            + self.noise**2
        )
        return float((self.size <= NINETY * deviation).sum())


def residuals(rows: Sequence[Row], priors: Priors) -> Residuals:
    """Return the residuals of seconds that `priors`, learned without the rows, predicts."""
    narrowed = (Scales(), Scales(constants=_NARROW), Scales(kernels=_NARROW))
    found = [
        [
            one
            for p in evaluate(rows, priors=scaled(priors, scales)).predictions
            if (one := interval_of_time(p))
        ]
        for scales in narrowed
    ]
    size = np.array([abs(math.log(measured / predicted)) for predicted, measured, _, _ in found[0]])
    whole, without_constants, without_kernels = (
        np.array([math.log(high / low) / 2 / NINETY for _, _, low, high in values]) ** 2
        for values in found
    )
    constants, kernels = (
        np.maximum(whole - without_constants, 0),
        np.maximum(whole - without_kernels, 0),
    )
    return Residuals(
        size,
        np.sqrt(constants),
        np.sqrt(kernels),
        np.sqrt(np.maximum(whole - constants - kernels, 0)),
    )


def scales_of(families: Iterable[Residuals]) -> Scales:
    """Return the least scales with which COVERAGE of the rows, weighted as in `learn`, are inside."""
    parts = [part for part in families if len(part.size)]
    weights = [min(1.0, 40 / len(part.size)) ** 0.7 for part in parts]
    total = sum(weight * len(part.size) for weight, part in zip(weights, parts, strict=True))
    for scales in _SCALES:
        if (
            sum(weight * part.inside(scales) for weight, part in zip(weights, parts, strict=True))
            >= COVERAGE * total
        ):
            return scales
    return _SCALES[-1]


def scaled(priors: Priors, scales: Scales) -> Priors:
    """Return `priors` with scaled widths of constants of time.

    A constant without a measurement keeps its width, except for kernels of frameworks of the table.
    """
    believed = datasheet_priors().constants
    kept = {"stack.plait", *open_kernels()}
    constants = {}
    for name, constant in priors.constants.items():
        if name.startswith("memory:"):
            continue
        measured = constant.width != believed[name].width
        if measured:
            constants[name] = replace(constant, width=constant.width * scales.constants)
        elif name.startswith("stack.") and name not in kept:
            constants[name] = replace(constant, width=constant.width * scales.kernels)
    return replace(priors, constants={**priors.constants, **constants})
