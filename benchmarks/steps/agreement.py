"""Check that all baselines trained: compare their losses and gradient norms with the reference's.

Equal losses in the first step show equal weights, data and forwards; in the second, equal updates.
Equal norms show that gradients are complete means before clipping. Different orders of addition in
float32 drift apart slowly, hence two limits for losses.
"""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.steps.rounds import Record

EARLY_STEPS = 4
LIMITS = {"early_loss": 1e-4, "late_loss": 3e-2, "early_norm": 1e-3}
"""Largest differences: of the loss in the first steps and in any step, and of the norm, relative,
in the first steps."""


def compare(record: Record, reference: Record) -> dict[str, Any]:
    """Return the largest differences, and whether all are within `LIMITS`."""
    losses = [_distance(*pair) for pair in zip(record.losses, reference.losses, strict=False)]
    pairs = zip(record.norms[:EARLY_STEPS], reference.norms[:EARLY_STEPS], strict=False)
    norms = [_distance(a, b) / b for a, b in pairs if a is not None and b]
    differences = {
        "early_loss": max(losses[:EARLY_STEPS], default=0.0),
        "late_loss": max(losses, default=0.0),
        "early_norm": max(norms, default=0.0),
    }
    holds = bool(losses) and all(differences[name] <= limit for name, limit in LIMITS.items())
    return {"steps": len(losses), **differences, "holds": holds}


def _distance(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a - b) else math.inf


def check(records: Mapping[str, Record], *, reference: str) -> dict[str, dict[str, Any]]:
    agreements = {}
    for name, record in records.items():
        if record.losses:
            agreements[name] = compare(record, records[reference])
    return agreements
