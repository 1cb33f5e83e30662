"""Measurement of one rank of a planned layout of eight devices, and the planner's time for it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from plait.config.resolving.resolve import load, resolve
from plait.engine.single_rank import run_single_rank
from plait.planner.hardware import Cluster
from plait.planner.hardware import cluster as cluster_of
from plait.planner.models import Model, from_config
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import plan
from plait.units import GIB
from plait.validation.ceilings import datasheet
from plait.validation.context import Context, largest_size, require, timed
from plait.validation.models import MEDIUM, TINY, Workload, on_meta
from plait.validation.rows import NotRun, Verdict, verdict

FACTOR = 1.5
"""The time may be this many times the prediction, or the prediction this many times the time."""
DEVICES = 8
GLOBAL_BATCH = 32
COMPUTED_TERMS = (
    "products",
    "attention",
    "elementwise",
    "recompute",
    "head",
    "host",
    "accumulate",
    "optimizer",
    "fixed",
)
"""Terms of a step that do not depend on other ranks. A rank alone waits for none and sends nothing.
"""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "medium": {"workload": MEDIUM},
    "tiny": {"workload": TINY},
}
REQUIRED_BYTES = {"medium": 20 * GIB, "tiny": 1 * GIB}


def rank_of_plan(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Run the first rank of the best layout with the degrees in `settings["fixed"]`."""
    require("transformers")
    figures = datasheet(context)
    workload: Workload = largest_size(context, SIZES, required_bytes=REQUIRED_BYTES)["workload"]
    memory = 80 * GIB if context.is_small else context.free_bytes()
    cluster: Cluster = cluster_of(
        str(figures.name), DEVICES, devices_per_node=DEVICES, memory_bytes=memory
    )
    precision = "bf16" if "bf16" in figures.flops else "fp16"
    model = Model(
        from_config(workload.fields, source="the planned model"), {"config": workload.fields}
    )
    request = Request(model, cluster, GLOBAL_BATCH, workload.length, precision)
    planned = plan(request, fixed=settings["fixed"], best=1)
    if not planned.best:
        raise NotRun(f"no layout with {settings['fixed']} fits into {memory / GIB:.1f} GiB")

    choice = planned.best[0]
    tree = config_of(request, choice, {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}})
    for section in ("model", "data"):
        del tree[section]
    resolved = resolve(load(tree), world_size=DEVICES)
    for _ in range(2):  # The first run loads kernels.
        run = run_single_rank(
            on_meta(workload),
            resolved,
            rank=0,
            samples=resolved.batch.micro_batch_size,
            length=workload.length,
            real=True,
        )
        gc.collect()
    terms = dict(choice.terms)
    prediction = sum(terms[name] for name in COMPUTED_TERMS if name in terms)
    result = judge(
        run.step_seconds,
        prediction,
        layout={name: float(value) for name, value in choice.layout.items()},
        terms=terms,
        workload=workload.as_dict(),
        peak=run.peak,
        peak_planned=choice.allocated,
    )
    return timed(context, result)


def judge(measured: float, prediction: float, **numbers: Any) -> Verdict:
    """Fail if measured and planned seconds differ by more than FACTOR."""
    ratio = measured / prediction if prediction else float("inf")
    problem = (
        f"{measured:.4g} s, planned {prediction:.4g} s: {ratio:.2f} times, allowed {1 / FACTOR:.2f}"
        f" to {FACTOR}"
    )
    problems = [] if 1 / FACTOR <= ratio <= FACTOR else [problem]
    return verdict(
        problems,
        seconds=measured,
        planned_seconds=prediction,
        ratio=ratio,
        allowed=FACTOR,
        **numbers,
    )
