"""Layouts that were trained with, set in the order of a plan for the same cluster: models of MISSION M4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.planner_accuracy.standing import standing
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan
from plait.units import GIB


@dataclass(frozen=True)
class Published:
    """One layout that a source prints."""

    model: str
    gpu: str
    gpus: int
    batch: int
    sequence: int
    layout: dict[str, Any]
    seconds: float | None
    source: str


def _pipeline(tp: int, pp: int, vpp: int, dp: int, micro: int, batch: int, **others: Any) -> dict[str, Any]:
    schedule = "none" if pp == 1 else "interleaved" if vpp > 1 else "1f1b"
    shard = dp if others.get("stage") else 1
    common = {"tp": tp, "pp": pp, "vpp": vpp, "schedule": SCHEDULES.index(schedule), "dp_replicate": dp // shard, "dp_shard": shard}
    return common | {"micro_batch": micro, "accumulation": batch // dp // micro, **others}


_FULL = RECOMPUTE.index("full")
LAYOUTS = (
    Published(
        "gpt3-175b",
        "a100",
        1024,
        1536,
        2048,
        _pipeline(8, 16, 1, 8, 1, 1536, recompute=_FULL),
        32.0,
        "NVIDIA/Megatron-LM README: about 32 s",
    ),
    Published(
        "turing-nlg-530b",
        "a100",
        2240,
        1920,
        2048,
        _pipeline(8, 35, 1, 8, 1, 1920, recompute=_FULL),
        60.1,
        "arXiv 2201.11990, 280 DGX A100",
    ),
    Published(
        "turing-nlg-530b",
        "a100",
        3360,
        1920,
        2048,
        _pipeline(8, 35, 1, 12, 1, 1920, recompute=_FULL),
        44.4,
        "arXiv 2201.11990, 420 DGX A100",
    ),
    Published(
        "llama-2-70b",
        "h100",
        64,
        128,
        4096,
        _pipeline(4, 4, 20, 4, 1, 128, sp=1, stage=1),
        None,
        "NeMo 24.07 performance summary, in float8 there",
    ),
    Published("llama-3-405b", "h100", 8192, 2048, 8192, _pipeline(8, 16, 1, 64, 1, 2048, sp=1, stage=1), None, "arXiv 2407.21783 table 4"),
)


def rows() -> list[dict[str, Any]]:
    """Every published layout with its place."""
    found = []
    for one in LAYOUTS:
        request = Request(
            find_model(one.model, sequence=one.sequence), cluster(one.gpu, one.gpus), one.batch, one.sequence, everything=True
        )
        where = standing(request, one.layout)
        best = plan(request, best=1).best[0]
        found.append({
            "model": one.model, "gpus": one.gpus, "source": one.source, "published": describe(where.choice.layout), "place": where.place,
            "fitting": where.fitting, "predicted_seconds": where.choice.seconds, "measured_seconds": one.seconds,
            "needed_gib": where.choice.needed / GIB, "fit_probability": where.choice.fit_probability,
            "best": describe(best.layout), "best_seconds": best.seconds,
        })  # fmt: skip
    return found
