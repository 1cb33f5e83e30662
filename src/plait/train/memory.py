"""The most memory this process has held, for the progress line. Reading it never waits for a
device.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from plait.cluster import accelerator


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the peak of the allocator since the process began; on a CPU the peak resident size
    of the process.
    """
    if accelerator.is_one(device):
        return accelerator.peak_bytes(device)
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    try:
        # getrusage would do, but on Linux it starts from the size of the parent that started this
        # process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
