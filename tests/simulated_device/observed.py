"""Runs a task on a rank with a simulated GPU and observes it."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from dataclasses import dataclass
from typing import Any

LONG = 60
"""Seconds after which a worker prints its stacks."""


@dataclass(frozen=True)
class Seen:
    """Observations of one rank. `failed` is a traceback or empty."""

    value: Any
    failed: str
    races: list[str]
    journal: list[dict[str, Any]]
    copies: dict[str, int]


def observed(rank, world, function, args):
    """Runs on every rank."""
    device: Any = sys.modules["simulated_device.on_torch"]
    device.clear()
    value = None
    failed = ""
    before = device.copies()
    faulthandler.dump_traceback_later(LONG)
    try:
        value = function(rank, world, *args)
    except BaseException:
        failed = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    copies = {kind: count - before[kind] for kind, count in device.copies().items()}
    return Seen(value, failed, device.races(), device.journal(), copies)
