"""How much wider or narrower the constants' widths must be, that intervals of seconds hold nine times in ten on sources that were left out.

From predictions of sources by constants that were learned without them; the widths for a source are from the other sources only.
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
"""Of a constant's width, where what is left of the interval is the rest alone."""


@dataclass(frozen=True)
class Scales:
    """Factors on widths."""

    constants: float = 1.0
    """Of the constants that were measured; at least 1."""
    kernels: float = 1.0
    """Of the speed of the kernels of frameworks in the table of which no run was measured; at most 1."""


_SCALES = tuple(
    chain(
        (Scales(kernels=factor) for factor in np.arange(0.3, 1.0, 0.01)),
        (Scales(constants=factor) for factor in np.arange(1.0, 3.0, 0.01)),
    )
)
"""From the narrowest to the widest. The rows that show whether intervals hold are of frameworks that were left out with their source, so
that where they are too wide, it is what is believed of a framework's kernels that is too wide, and not the constants."""


@dataclass(frozen=True)
class Residuals:
    """Rows of one family of sources: logarithm of measured over predicted, its deviation by the constants that were measured, by the
    kernels of a framework that was not, and by all else."""

    size: Array
    constants: Array
    kernels: Array
    noise: Array

    def inside(self, scales: Scales) -> float:
        """How many rows lie in their intervals."""
        deviation = np.sqrt(
            (scales.constants * self.constants) ** 2
            + (scales.kernels * self.kernels) ** 2
            + self.noise**2
        )
        return float((self.size <= NINETY * deviation).sum())


def residuals(rows: Sequence[Row], priors: Priors) -> Residuals:
    """Of the seconds of `rows`, predicted by `priors`, which was learned without them."""
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
    """The least scales with which COVERAGE of the rows lie in their intervals; a family counts as in `learn`, little more the more rows it
    has."""
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
    """`priors` with the widths of its constants of time times `scales`. A constant of which nothing was measured stays as wide as it was
    believed to be, but for the kernels of a framework whose other facts are in the table."""
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
