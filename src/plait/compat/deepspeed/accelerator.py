"""`deepspeed.accelerator`: what scripts ask of the devices, whichever kind there is."""

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


class Accelerator:
    """The GPUs of this machine, or its CPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing(
            "get_accelerator()",
            name,
            _REMEDIES,
            otherwise="call torch.accelerator, or torch's module of the device",
        )

    def is_available(self) -> bool:
        """Always: a CPU is one of them."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """What `torch.device` takes."""
        kind = accelerator.available_type()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device_count(self) -> int:
        """Those of this machine; of CPUs one."""
        return accelerator.count() or 1

    def set_device(self, device_index: int) -> None:
        """This process's work goes there from here on; nothing on a CPU."""
        if accelerator.count():
            accelerator.use(torch.device(self.device_name(device_index)))

    def current_device(self) -> int:
        """The index of this process's."""
        return torch.accelerator.current_device_index() if accelerator.count() else 0

    def current_device_name(self) -> str:
        """The same for `torch.device`."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """torch's backend for collectives of these devices."""
        return accelerator.backend(self._device(), host_tensors=False)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until it has done all that it was given."""
        accelerator.synchronize(self._device(device_index))

    def empty_cache(self) -> None:
        """Return memory that torch keeps for later; nothing on a CPU."""
        if accelerator.count():
            torch.accelerator.memory.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors there; 0 on a CPU."""
        return accelerator.held_bytes(self._device(device_index)) if accelerator.count() else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most since the start or `reset_peak_memory_stats`; 0 on a CPU."""
        return accelerator.peak_bytes(self._device(device_index)) if accelerator.count() else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin anew."""
        accelerator.reset_peak(self._device(device_index))

    def manual_seed(self, seed: int) -> None:
        """Of all of torch's generators."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self) -> bool:
        """Always."""
        return True

    def is_fp16_supported(self) -> bool:
        """Always."""
        return True

    def _device(self, device_index: int | None = None) -> torch.device:
        return torch.device(
            self.device_name(place().local_rank if device_index is None else device_index)
        )


_THERE: Final = Accelerator()


def get_accelerator() -> Accelerator:
    """The one there is."""
    return _THERE
