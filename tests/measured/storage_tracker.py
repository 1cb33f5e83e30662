"""Peak memory as torch's memory tracker counts it."""

from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode


class StorageTracker(MemTracker):
    """torch's memory tracker without its tables by module.

    The tables refuse a module that runs for several micro-batches. Storages, resizes and the peak
    are counted by torch's code.
    """

    def __enter__(self):
        self._fake_mode_on_entry = active_fake_mode()
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error):
        TorchDispatchMode.__exit__(self, *error)
        self._restore_resize()

    def peak_bytes(self, device_type):
        """Return the peak on devices of a type."""
        return max(
            int(snapshot["Total"])
            for device, snapshot in self._peak_mem_snap.items()
            if device.type == device_type
        )
