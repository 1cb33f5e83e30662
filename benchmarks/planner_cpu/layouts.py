"""Layouts that the planner is calibrated on, and those whose times it predicts.

They were selected before anything was measured. Every kind of traffic of a predicted layout occurs
in a calibrated one with another micro-batch, stage or schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.engine.calibration import ON_CPU, time_layout
from plait.planner.hardware import cluster
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.models import Model, from_config
from plait.planner.request import Request

BATCH = 8


@dataclass(frozen=True)
class Case:
    """A layout, and whether the planner is calibrated on it."""

    name: str
    processes: int
    layout: dict[str, Any]
    seen: bool


def request(processes: int) -> Request:
    """Return the request: a Llama of 17 M parameters, 8 sequences of 128 tokens, float32."""
    model = Model(from_config(dict(ON_CPU), source="benchmark"), {"config": dict(ON_CPU)})
    return Request(
        model,
        cluster("cpu", processes, devices_per_node=processes),
        BATCH,
        int(ON_CPU["max_position_embeddings"]),
        "fp32",
    )


def _case(
    processes: int,
    *,
    seen: bool = False,
    micro: int,
    stage: int = 0,
    tp: int = 1,
    sp: int = 0,
    pp: str = "none",
    recompute: str = "none",
) -> Case:
    stages = 1 if pp == "none" else 2
    dp = processes // (tp * stages)
    accumulation = BATCH // dp // micro
    layout = {"pp": stages, "schedule": SCHEDULES.index(pp), "tp": tp, "sp": sp, "stage": stage}
    layout |= {"recompute": RECOMPUTE.index(recompute), "dp_replicate": dp, "dp_shard": 1}
    if stage:
        layout |= {"dp_replicate": 1, "dp_shard": dp}
    layout |= {"micro_batch": micro, "accumulation": accumulation}
    # The configuration calls this mode `selective`.
    mode = recompute.replace("operators", "selective")
    techniques = {
        f"tp {tp} + sp": sp,
        f"tp {tp}": tp > 1 and not sp,
        f"pp 2 {pp}": stages > 1,
        f"dp {dp} ZeRO {stage}": dp > 1,
        f"{micro} x {accumulation}": True,
        f"recompute {mode}": mode != "none",
    }
    name = ", ".join(text for text, is_used in techniques.items() if is_used)
    return Case(name, processes, layout, seen)


CASES = (
    _case(1, micro=8, seen=True),
    _case(1, micro=1, seen=True),
    _case(1, micro=4, recompute="full", seen=True),
    _case(2, micro=4, seen=True),
    _case(2, micro=1, stage=2, seen=True),
    _case(2, micro=4, stage=3, seen=True),
    _case(2, micro=8, tp=2, seen=True),
    _case(2, micro=1, tp=2, seen=True),
    _case(2, micro=2, pp="1f1b", seen=True),
    _case(1, micro=2),
    _case(1, micro=4, recompute="operators"),
    _case(2, micro=1),
    _case(2, micro=4, stage=1),
    _case(2, micro=2, stage=2),
    _case(2, micro=1, stage=3),
    _case(2, micro=4, recompute="full"),
    _case(2, micro=2, stage=3, recompute="full"),
    _case(2, micro=2, tp=2),
    _case(2, micro=4, tp=2, sp=1),
    _case(2, micro=4, tp=2, recompute="full"),
    _case(2, micro=1, pp="1f1b"),
    _case(2, micro=2, pp="gpipe"),
)
QUICK = ("8 x 1", "1 x 8", "dp 2 ZeRO 0, 4 x 1", "dp 2 ZeRO 3, 4 x 1", "dp 2 ZeRO 1, 4 x 1")
"""Names that show that the benchmark runs."""


def start(processes: int) -> Callable[[tuple[dict[str, Any], int]], list[float]]:
    """Make the process group of all layouts, and return what answers (layout, steps)."""
    torch.set_num_threads(1)
    mesh = build_mesh(Layout(dp_replicate=processes))
    assert mesh.device.type == "cpu", "this benchmark is about CPU cores"

    def turn(message: tuple[dict[str, Any], int]) -> list[float]:
        layout, steps = message
        return list(time_layout(request(processes), layout, steps=steps).seconds)

    return turn
