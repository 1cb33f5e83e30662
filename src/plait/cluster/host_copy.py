"""Numbers of a device that the program reads later, without a wait for the work that follows."""

from __future__ import annotations

import torch

from plait.cluster import accelerator


class HostCopy:
    """Copy of a small tensor in host memory.

    The copy is queued behind the work that computes the tensor, and an event behind the copy. Reading
    therefore waits for that work only, and not for what the device was given afterwards, as `.item()`
    would.

    Args:
        tensor: A tensor on any device. One in host memory is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._arrived: torch.Event | None = None
        if not accelerator.is_one(tensor.device):
            return
        # From or to memory that is not pinned, the copy would block whatever it is asked for.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._values = host.copy_(tensor, non_blocking=True)
        self._arrived = accelerator.current_stream(tensor.device).record_event()

    def values(self) -> torch.Tensor:
        """Return the values in host memory, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._values
