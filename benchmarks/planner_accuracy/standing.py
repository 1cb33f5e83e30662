"""Where one layout, such as a published one, stands in the order of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.planner.calibrate import Calibration, merged, uncalibrated
from plait.planner.search import Choice, Request, price, price_space, space_of


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
    seconds, needed = price_space(request, space, merged(calibration))
    fitting = seconds[needed <= float(request.cluster.device.memory_bytes)]
    choice = price(request, [layout], calibration=calibration)[0]
    return Standing(choice, int((fitting < choice.seconds * (1 - 1e-9)).sum()) + 1, len(fitting))
