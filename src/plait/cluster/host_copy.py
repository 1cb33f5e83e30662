"""Asynchronous copies of small tensors from a device to the host."""

from __future__ import annotations

import torch

from plait.cluster import accelerator


class HostCopy:
    """Copy of a small tensor in host memory.

    The copy is queued on the current stream, and an event after it. `values` therefore waits for
    the work that computes the tensor only, whereas `.item()` would also wait for work that was
    queued later.

    Args:
        tensor: A tensor on any device. A tensor in host memory is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._event: torch.Event | None = None
        if not accelerator.is_accelerator(tensor.device):
            return
        # A copy to memory that is not pinned blocks the host even with non_blocking=True.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._values = host.copy_(tensor, non_blocking=True)
        self._event = accelerator.current_stream(tensor.device).record_event()

    def is_ready(self) -> bool:
        """Return whether `values` would return without waiting."""
        return self._event is None or self._event.query()

    def values(self) -> torch.Tensor:
        """Wait for the copy and return the tensor in host memory."""
        if self._event is not None:
            if not self.is_ready():
                self._event.synchronize()
            self._event = None
        return self._values
