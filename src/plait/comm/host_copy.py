"""A tensor of the device that the program reads: copied while the program goes on, and waited for when it is read."""

from __future__ import annotations

import torch

from plait.cluster import accelerator


class HostCopy:
    """A copy of a tensor in host memory. The copy starts when the object is made, behind the work that the device has by
    then; reading it waits for that work alone, not for what the device is given later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._event = tensor, None
        if accelerator.is_one(tensor.device):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy = pinned.copy_(tensor, non_blocking=True)
            self._event = accelerator.current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy
