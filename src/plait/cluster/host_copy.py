"""Asynchronous copies of small tensors from a device to the host."""

from __future__ import annotations

import torch

from plait.cluster import accelerator


class HostCopy:
    """Copy of a small tensor in host memory.

    The copy is queued on the current stream, and an event after it. `values` therefore waits for the
    work that computes the tensor only, whereas `.item()` would also wait for work that was queued later.

    Args:
        tensor: A tensor on any device. A tensor in host memory is not copied.
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
        """Wait for the copy and return the tensor in host memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._values
