"""How much wider or narrower the constants' widths must be, that intervals of seconds hold nine times in ten on sources that were left out.

From predictions of sources by constants that were learned without them; the widths for a source are from the other sources only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner_accuracy.frameworks import unlearned
from benchmarks.planner_accuracy.predict import evaluate, interval_of_time
from plait.planner.choice import NINETY
from plait.planner.constants import Knowledge
from plait.planner.runs import Row

COVERAGE = 0.90
_SCALES = np.arange(1.0, 3.0, 0.01)
"""Not below 1: the rows are of frameworks of whose kernels nothing is known, and it may be that alone which makes intervals too wide."""
_NARROW = 1e-3
"""Of a constant's width, where what is left of the interval is the noise alone."""


@dataclass(frozen=True)
class Residuals:
    """Rows of one family of sources: logarithm of measured over predicted, its deviation by the constants that were measured, and by
    all else."""

    size: NDArray[np.float64]
    constants: NDArray[np.float64]
    noise: NDArray[np.float64]


def residuals(rows: Sequence[Row], known: Knowledge) -> Residuals:
    """Of the seconds of `rows`, predicted by `known`, which was learned without them."""
    found = [interval_of_time(p) for p in evaluate(rows, known=known).predictions]
    narrow = [interval_of_time(p) for p in evaluate(rows, known=scaled(known, _NARROW)).predictions]
    pairs = [(a, b) for a, b in zip(found, narrow, strict=True) if a is not None and b is not None]
    size = np.array([abs(math.log(measured / predicted)) for (predicted, measured, _, _), _ in pairs])
    whole, noise = (np.array([math.log(p[which][3] / p[which][2]) / 2 / NINETY for p in pairs]) for which in (0, 1))
    return Residuals(size, np.sqrt(np.maximum(whole**2 - noise**2, 0)), noise)


def scale_of(families: Iterable[Residuals]) -> float:
    """The least factor on the widths of constants with which COVERAGE of the rows lie in their intervals; a family counts as in `learn`,
    little more the more rows it has."""
    parts = [part for part in families if len(part.size)]
    weights = [min(1.0, 40 / len(part.size)) ** 0.7 for part in parts]
    total = sum(weight * len(part.size) for weight, part in zip(weights, parts, strict=True))
    for scale in _SCALES:
        inside = sum(
            weight * float((part.size <= NINETY * np.hypot(scale * part.constants, part.noise)).sum())
            for weight, part in zip(weights, parts, strict=True)
        )
        if inside >= COVERAGE * total:
            return float(scale)
    return float(_SCALES[-1])


def scaled(known: Knowledge, factor: float) -> Knowledge:
    """`known` with the widths of its constants of time times `factor`. A constant of which nothing was measured stays as wide as it was
    believed to be."""
    believed = unlearned().constants
    constants = {
        name: replace(constant, width=constant.width * factor)
        for name, constant in known.constants.items()
        if constant.width != believed[name].width and not name.startswith("memory:")
    }
    return replace(known, constants={**known.constants, **constants})
