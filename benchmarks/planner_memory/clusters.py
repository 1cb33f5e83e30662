"""Published clusters: where the published layout stands in the plan's order, and the chosen layout tried on one rank without its peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.planner_accuracy.published import LAYOUTS
from benchmarks.planner_accuracy.standing import standing
from plait.cli.planning.dry_run import dry_run
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.models import Model, find_model
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import plan

STANDINGS = ("gpt3-175b", "turing-nlg-530b", "llama-2-70b")
TRIED = [
    # (model, gpu, gpus, samples, tokens of a sample)
    ("gpt3-175b", "a100", 1024, 1536, 2048),
    ("turing-nlg-530b", "a100", 2240, 1920, 2048),
    ("llama-2-70b", "a100", 1024, 1024, 4096),
    ("llama-3-405b", "h100", 16384, 2048, 8192),
]
"""Clusters of the published runs; Llama-2's with its published batch of 4 Mi tokens (arXiv 2307.09288), on 1,024 of its GPUs."""


def _request(model: str, gpu: str, gpus: int, batch: int, sequence: int, *, everything: bool = False) -> Request:
    found = find_model(model, sequence=sequence)
    section = dict(found.section)
    if section["config"]["model_type"] == "gpt2":  # as the engine's memory is predicted: without dropout
        section["config"] = section["config"] | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return Request(Model(found.architecture, section), cluster(gpu, gpus), batch, sequence, everything=everything)


def standings() -> list[dict[str, Any]]:
    """The published layouts in the order of what Plait runs."""
    rows = []
    for one in LAYOUTS:
        if one.model not in STANDINGS:
            continue
        request = _request(one.model, one.gpu, one.gpus, one.batch, one.sequence)
        where = standing(request, one.layout)
        best = plan(request, best=1).best[0]
        rows.append({
            "model": one.model, "gpus": one.gpus, "gpu": one.gpu, "source": one.source, "published": describe(where.choice.layout),
            "place": where.place, "fitting": where.fitting, "seconds": where.choice.seconds, "measured_seconds": one.seconds,
            "best": describe(best.layout), "best_seconds": best.seconds,
        })  # fmt: skip
    return rows


def tried(tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The chosen layout of every cluster, one rank of it run."""
    rows = []
    for model, gpu, gpus, batch, sequence in TRIED:
        request = _request(model, gpu, gpus, batch, sequence)
        best = plan(request, best=1).best[0]
        began = time.perf_counter()
        run = dry_run(request, config_of(request, best))
        row = {
            "model": model, "gpus": gpus, "gpu": gpu, "layout": describe(best.layout), "rank": run.rank, "stage": run.stage,
            "predicted": run.predicted["peak"], "dry_run": run.found.peak, "ratio": run.predicted["peak"] / run.found.peak,
            "walked": run.walked, "accumulation": run.accumulation, "seconds": time.perf_counter() - began,
        }  # fmt: skip
        tell(str(row))
        rows.append(row)
    return rows
