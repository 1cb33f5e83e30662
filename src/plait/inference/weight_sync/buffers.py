"""Memory for messages whose pieces do not lie in one stretch, kept from one version to the next."""

from __future__ import annotations

import torch

from plait.inference.weight_sync.route import PIECE


class Buffers:
    """Each is taken by one message at a time. The kernel takes as long to give new memory as a copy takes, so it is kept."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}

    def take(self, device: torch.device) -> torch.Tensor:
        """[PIECE], uint8."""
        free = self._free.get(device)
        return free.pop() if free else torch.empty(PIECE, dtype=torch.uint8, device=device)

    def put_back(self, buffer: torch.Tensor) -> None:
        """It may be taken again."""
        self._free.setdefault(buffer.device, []).append(buffer)
