"""Process groups whose other ranks do not exist: a dry run has the layout of thousands and sends
nothing.
"""

from __future__ import annotations

import torch.distributed as dist

FAKE = "fake"
"""torch's name of the backend."""


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group (None is the default one) is such a one. Without any process group it is
    False.
    """
    return dist.is_initialized() and dist.get_backend(group) == FAKE
