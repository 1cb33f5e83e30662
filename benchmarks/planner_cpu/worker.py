"""The worker: it builds an engine for a layout, times some steps, and closes the engine."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.planner_cpu.layouts import request
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.engine.calibration import time_layout


def start(processes: int) -> Callable[[tuple[dict[str, Any], int]], list[float]]:
    """Make the process group of all layouts, and return what answers (layout, steps)."""
    torch.set_num_threads(1)
    mesh = build_mesh(Layout(dp_replicate=processes))
    assert mesh.device.type == "cpu", "this benchmark is about CPU cores"

    def turn(message: tuple[dict[str, Any], int]) -> list[float]:
        layout, steps = message
        return list(time_layout(request(processes), layout, steps=steps).seconds)

    return turn
