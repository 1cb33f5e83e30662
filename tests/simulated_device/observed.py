"""A task in a worker with a simulated GPU, and what was seen of it."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from dataclasses import dataclass
from typing import Any

LONG = 60
"""Seconds after which a worker says where it is."""


@dataclass(frozen=True)
class Seen:
    """What one rank did."""

    value: Any
    failed: str
    """A traceback."""
    races: list[str]
    journal: list[dict[str, Any]]
    copies: dict[str, int]


def observed(rank, world, function, args):
    """Runs in a worker."""
    device: Any = sys.modules["simulated_device.on_torch"]
    device.clear()
    value, failed, before = None, "", device.copies()
    faulthandler.dump_traceback_later(LONG)
    try:
        value = function(rank, world, *args)
    except BaseException:
        failed = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    copies = {way: count - before[way] for way, count in device.copies().items()}
    return Seen(value, failed, device.races(), device.journal(), copies)
