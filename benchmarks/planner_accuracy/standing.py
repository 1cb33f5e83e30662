"""Where one layout, such as a published one, stands in the order of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.planner.calibrate import Calibration, uncalibrated
from plait.planner.choice import Choice, price
from plait.planner.request import Request, space_of
from plait.planner.search import price_space


@dataclass(frozen=True)
class Standing:
    """Where one layout stands in a plan's order."""

    choice: Choice
    place: int
    """1 is the fastest of those that fit."""
    fitting: int


def standing(request: Request, layout: Mapping[str, Any], *, calibration: Calibration | None = None) -> Standing:
    """Where `layout` stands among all candidates that fit, priced as they are; it need not be one of them."""
    calibration = calibration or uncalibrated()
    space = space_of(request)
    priced = price_space(request, space, calibration)
    fitting = priced.seconds[priced.needed <= float(request.cluster.device.memory_bytes)]
    choice = price(request, [layout], calibration=calibration)[0]
    return Standing(choice, int((fitting < choice.seconds * (1 - 1e-9)).sum()) + 1, len(fitting))
