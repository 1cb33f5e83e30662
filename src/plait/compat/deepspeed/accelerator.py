"""`deepspeed.accelerator`: queries of the devices, independent of their type."""

from __future__ import annotations

from typing import Any, Final

import torch

from plait.cluster import accelerator
from plait.cluster.topology import place
from plait.compat.deepspeed.refused import missing

_REMEDIES = {
    "Stream": "call torch.Stream(device)",
    "Event": "call torch.Event(device)",
    "amp": 'write "bf16": {"enabled": true} in the configuration',
    "device": "call torch.device(get_accelerator().device_name(index))",
    "pin_memory": "call tensor.pin_memory()",
    "random": "call torch.get_rng_state() and torch.set_rng_state()",
}


class DeviceAccelerator:
    """DeepSpeed's accelerator interface to the GPUs of this machine, or to its CPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing(
            "get_accelerator()",
            name,
            _REMEDIES,
            default="call torch.accelerator, or torch's module of the device",
        )

    def is_available(self) -> bool:
        """Return True, because a machine without GPUs still has a CPU."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of a device for `torch.device`."""
        kind = accelerator.available_type()
        if device_index is None or kind == "cpu":
            return kind
        return f"{kind}:{device_index}"

    def device_count(self) -> int:
        """Return the number of devices of this machine. The CPU counts as one."""
        return accelerator.count() or 1

    def set_device(self, device_index: int) -> None:
        """Select the device of this process. This has no effect on a CPU."""
        if accelerator.count():
            accelerator.use(torch.device(self.device_name(device_index)))

    def current_device(self) -> int:
        """Return the index of this process's device."""
        if not accelerator.count():
            return 0
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of this process's device for `torch.device`."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return torch's backend for collectives of these devices."""
        return accelerator.backend(self._device(), host_tensors=False)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished all its work."""
        accelerator.synchronize(self._device(device_index))

    def empty_cache(self) -> None:
        """Free the memory that torch's allocator caches. This has no effect on a CPU."""
        if accelerator.count():
            torch.accelerator.memory.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of the tensors on a device; 0 on a CPU."""
        if not accelerator.count():
            return 0
        return accelerator.allocated_bytes(self._device(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated` since the last reset; 0 on a CPU."""
        if not accelerator.count():
            return 0
        return accelerator.peak_bytes(self._device(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak of `max_memory_allocated`."""
        accelerator.reset_peak(self._device(device_index))

    def manual_seed(self, seed: int) -> None:
        """Seed all random number generators of torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self) -> bool:
        """Return True, because every supported device computes in bfloat16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Return True, because every supported device computes in float16."""
        return True

    def _device(self, device_index: int | None = None) -> torch.device:
        if device_index is None:
            device_index = place().local_rank
        return torch.device(self.device_name(device_index))


_ACCELERATOR: Final = DeviceAccelerator()


def get_accelerator() -> DeviceAccelerator:
    """Return the accelerator of this process."""
    return _ACCELERATOR
