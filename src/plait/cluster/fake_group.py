"""Process groups without other ranks, for dry runs.

A dry run has the layout of thousands of processes and sends nothing.
"""

from __future__ import annotations

import torch.distributed as dist

FAKE = "fake"
"""torch's name of the backend."""


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group has no other ranks. None means the default group.

    The result is False if there is no process group.
    """
    return dist.is_initialized() and dist.get_backend(group) == FAKE
