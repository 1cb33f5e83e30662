"""Accelerator: the type of device that Plait supports besides the CPU.

No other module names this type, so that support for another type only changes this file. Functions
of `torch.accelerator` are used where they exist, and otherwise those of the type's module,
`torch.cuda`. Functions import torch themselves, because the command line starts without it.

The algorithm that NCCL selects for a call is not predicted. The constants of NCCL's tuning model
depend on the release, the architecture and the transport, and a tuner plugin may replace the model.
The authors of NCCL say that there is no easy rule (NVIDIA/nccl issue 754). NCCL can log the
selection for every call (`library_report`).

`HostCopy` copies a small tensor to the host without waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    import torch

NAME: Final = "cuda"
"""torch's device type. Files and options use the same name."""
DeviceType = Literal["cpu", "cuda"]
"""Type of the device that a process runs on."""
BACKEND: Final = "nccl"
"""torch's backend for collectives on accelerators."""
VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that a process may use."""
PREFIXES: Final = ("NCCL_", "TORCH_NCCL_")
"""Prefixes of environment variables that the collectives read."""
SETTINGS: Final = ("CUDA_", *PREFIXES, "PYTORCH_", "TORCH_CUDNN_")
"""Prefixes of environment variables that affect kernels, memory or collectives."""
LOST_PEER: Final = "ncclRemoteError"
"""Text in the error of a collective if another process has ended."""
LIBRARY_VARIABLES: Final = {
    "NCCL_ALGO": "algorithms that NCCL may use, such as Ring or ^Tree",
    "NCCL_PROTO": "protocols that NCCL may use: LL, LL128, Simple",
    "NCCL_NVLS_ENABLE": "whether NVLink switches may reduce",
    "NCCL_TUNER_PLUGIN": "a plugin that selects algorithm and protocol instead of NCCL",
    "NCCL_DEBUG": "INFO: NCCL logs what it does",
    "NCCL_DEBUG_SUBSYS": "TUNING: NCCL logs the algorithm and protocol of every call",
}
"""Variables of NCCL for the algorithm and protocol of collectives, with their meanings.

NCCL reads them when it creates a communicator, so set them before the launch.
"""


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator rather than the CPU or meta."""
    return device.type == NAME


def count() -> int:
    """Return the number of accelerators that this process may use.

    Unlike `torch.accelerator` this does not initialise a device, so processes can still be forked.
    """
    module = _module()
    return int(module.device_count()) if module.is_available() else 0


def available_type() -> DeviceType:
    """Return the type of device that a process uses by default."""
    return NAME if _module().is_available() else "cpu"


def use(device: torch.device) -> None:
    """Make an accelerator the current device of this process."""
    import torch

    torch.accelerator.set_device_index(device)


def backend(device: torch.device, *, host_tensors: bool) -> str:
    """Return the torch.distributed backend of the default process group.

    Args:
        device: Device of the process.
        host_tensors: Whether the group also supports tensors in host memory.
    """
    if not is_accelerator(device):
        return "gloo"
    if host_tensors:
        return f"cpu:gloo,{NAME}:{BACKEND}"
    return BACKEND


def model_name(device: torch.device | int | None = None) -> str:
    """Return the model of an accelerator, by default of the current one."""
    return str(_module().get_device_name(device))


def capacity_bytes(index: int) -> int:
    """Return the total memory of an accelerator."""
    return int(_module().get_device_properties(index).total_memory)


def describe(index: int) -> str:
    """Return a description of an accelerator for the user."""
    properties = _module().get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory} bytes, compute capability"
        f" {properties.major}.{properties.minor}"
    )


def built_for() -> str:
    """Return the devices that this build of torch supports, for the user."""
    import torch

    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream, which runs independently of the computation."""
    import torch

    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which this thread queues work."""
    import torch

    return torch.accelerator.current_stream(device)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Queue work to `stream` inside the block. None does not change the stream."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work. No-op on a CPU."""
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


@contextmanager
def warning_of_waits(device: torch.device) -> Iterator[None]:
    """Make torch warn about operations in the block that make the host wait for the device.

    It detects copies to and from memory that is not pinned, reads of a number such as `.item()`,
    and waits for a stream. It does not detect `synchronize` of a device or an event. No-op on a
    CPU.
    """
    if not is_accelerator(device):
        yield
        return
    module = _module()
    mode = module.get_sync_debug_mode()
    module.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        module.set_sync_debug_mode(mode)


def profiler_activities() -> list[Any]:
    """Return the activities that torch's profiler records."""
    import torch

    return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


def tensor_of(numbers: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return Python numbers as a tensor on a device, without waiting for the device.

    `torch.tensor(..., device=device)` copies from memory that is not pinned, and therefore waits
    until the device has finished all queued work.

    Args:
        numbers: A number, or nested sequences of numbers.
        dtype: Dtype of the tensor.
        device: Device of the tensor.
    """
    import torch

    return torch.tensor(numbers, dtype=dtype, pin_memory=is_accelerator(device)).to(
        device, non_blocking=True
    )


def peak_bytes(device: torch.device) -> int:
    """Return the peak allocated memory since `reset_peak`, or since the start of the process."""
    import torch

    return int(torch.accelerator.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Reset the statistics of peak memory. No-op on a CPU."""
    import torch

    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def allocation_retries(device: torch.device) -> int:
    """Return how often the allocator freed its cache because the device had no memory left."""
    import torch

    if not is_accelerator(device):
        return 0
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))


def allocated_bytes(device: torch.device) -> int:
    """Return the memory of existing tensors, and of libraries that use torch's allocator."""
    import torch

    return int(torch.accelerator.memory_allocated(device))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, without memory that torch's allocator has cached."""
    free, _ = _module().mem_get_info(device)
    return int(free)


def release_cached_memory(device: torch.device) -> None:
    """Free the memory that torch's allocator caches for reuse. No-op on a CPU."""
    if is_accelerator(device):
        _module().empty_cache()


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Make allocations fail if this process would use more than `nbytes` of a device."""
    # torch takes the limit as a fraction of the device's memory.
    _module().set_per_process_memory_fraction(nbytes / capacity_bytes(device.index), device)


def generator(device: torch.device) -> torch.Generator:
    """Return the default random generator of an accelerator.

    Its seed and offset are in host memory.
    """
    default: torch.Generator = _module().default_generators[device.index]
    return default


def _module() -> Any:
    """Return torch's module for the accelerator, `torch.cuda`."""
    import torch

    return torch.get_device_module(NAME)


def library_version() -> tuple[int, ...] | None:
    """Return the version of NCCL in this torch, or None if torch has no NCCL."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return tuple(torch.cuda.nccl.version())


def library_report(environment: Mapping[str, str], *, version: tuple[int, ...] | None) -> list[str]:
    """Return lines about the version and the variables of NCCL, for the user.

    Args:
        environment: Environment variables.
        version: Result of `library_version`.
    """
    if version:
        lines = [f"NCCL {'.'.join(map(str, version))}"]
    else:
        lines = ["this torch has no NCCL, and nothing below is read"]
    for name, meaning in LIBRARY_VARIABLES.items():
        lines.append(f"{name:<18} {environment.get(name, 'not set'):<16} {meaning}")
    return [
        *lines,
        "",
        (
            "Which algorithm NCCL selects for a call cannot be predicted (see"
            " docs/explanation/communication.md). NCCL logs it with:"
        ),
        "  NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING plait train FILE",
    ]


class HostCopy:
    """Asynchronous copy of a small tensor to host memory.

    The copy is queued on the current stream, and an event is recorded after it. `values` therefore
    waits only for the work that computes the tensor, whereas `.item()` would also wait for work
    that was queued later.

    Args:
        tensor: A tensor on any device. A tensor in host memory is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self._values = tensor
        self._event: torch.Event | None = None
        if not is_accelerator(tensor.device):
            return
        # A copy to memory that is not pinned blocks the host even with non_blocking=True.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._values = host.copy_(tensor, non_blocking=True)
        self._event = current_stream(tensor.device).record_event()

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
