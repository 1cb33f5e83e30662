"""What runs inside a worker process: an engine for the layout that is asked for, some steps, and the engine closed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.planner_cpu.layouts import request
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.engine.calibration import time_layout


def start(processes: int) -> Callable[[tuple[dict[str, Any], int]], dict[str, list[float]]]:
    """The process group that all layouts share, and what answers (layout, steps)."""
    torch.set_num_threads(1)
    mesh = build_mesh(Layout(dp_replicate=processes))
    assert mesh.device.type == "cpu", "this benchmark is about CPU cores"

    def turn(message: tuple[dict[str, Any], int]) -> dict[str, list[float]]:
        layout, steps = message
        found = time_layout(request(processes), layout, steps=steps)
        return {"seconds": list(found.seconds), "processor_seconds": list(found.processor_seconds)}

    return turn
