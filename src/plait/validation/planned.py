"""One real rank of a planned layout of eight devices, alone on this one, against the planner's time for what the rank computes."""

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
from plait.validation.context import Context, require, sized, timed
from plait.validation.links import assumed
from plait.validation.memory import LARGE, MEDIUM, SMALL, TINY, built, fields_of
from plait.validation.rows import Found, NotRun, compared

FACTOR = 1.5
"""The time may be so many times the prediction, or the prediction so many times the time."""
DEVICES, BATCH = 8, 32
COMPUTED = ("products", "attention", "elementwise", "recompute", "head", "host", "accumulate", "optimizer", "fixed")
"""Terms of a step that a rank spends whoever its peers are; a rank alone waits for nobody and sends nothing."""
HUGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32, "vocab_size": 32000}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "huge": {"model": HUGE, "length": 4096},
    "large": {"model": LARGE, "length": 2048},
    "medium": {"model": MEDIUM, "length": 1024},
    "small": {"model": SMALL, "length": 512},
    "tiny": {"model": TINY, "length": 64},
}
NEEDED = {"huge": 40 * GIB, "large": 20 * GIB, "medium": 8 * GIB, "small": 3 * GIB, "tiny": 1 * GIB}


def rank_of_plan(context: Context, settings: Mapping[str, Any]) -> Found:
    """The best layout with the degrees in `settings["fixed"]`, its first rank, a step after one that warms up."""
    require("transformers")
    figures = assumed(context)
    size = sized(context, SIZES, least_bytes=NEEDED)
    memory = 80 * GIB if context.simulated else context.free_bytes()
    cluster: Cluster = cluster_of(str(figures.name), DEVICES, devices_per_node=DEVICES, memory_bytes=memory)
    precision = "bf16" if "bf16" in figures.flops else "fp16"
    fields = fields_of(size["model"], size["length"])
    request = Request(Model(from_config(fields, source="the planned model"), {"config": fields}), cluster, BATCH, size["length"], precision)
    found = plan(request, fixed=settings["fixed"], best=1)
    if not found.best:
        raise NotRun(f"no layout with {settings['fixed']} fits into {memory / GIB:.1f} GiB")
    choice = found.best[0]
    tree = config_of(request, choice, {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}})
    for section in ("model", "data"):
        del tree[section]
    resolved = resolve(load(tree), world_size=DEVICES)
    runs = []
    for _ in range(2):  # the first loads kernels
        runs.append(
            run_single_rank(
                built(size["model"], size["length"]),
                resolved,
                rank=0,
                samples=resolved.batch.micro_batch_size,
                length=size["length"],
                real=True,
            )
        )
        gc.collect()
    predicted = sum(choice.terms[name] for name in COMPUTED if name in choice.terms)
    layout = {name: float(value) for name, value in choice.layout.items()}
    memories = {"peak": runs[-1].peak, "peak_planned": choice.allocated}
    found_ratio = against(runs[-1].step_seconds, predicted, layout=layout, terms=dict(choice.terms), size=dict(size), **memories)
    return timed(context, found_ratio)


def against(measured: float, predicted: float, **numbers: Any) -> Found:
    """Within the factor."""
    ratio = measured / predicted if predicted else float("inf")
    problem = f"{measured:.4g} s, planned {predicted:.4g} s: {ratio:.2f} times, allowed {1 / FACTOR:.2f} to {FACTOR}"
    problems = [] if 1 / FACTOR <= ratio <= FACTOR else [problem]
    return compared(problems, seconds=measured, planned_seconds=predicted, ratio=ratio, allowed=FACTOR, **numbers)
