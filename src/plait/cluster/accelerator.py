"""The kind of device besides the CPU that Plait runs on: what it is called, and all that is asked
of torch for it.

Nothing else in the package names it, but for its collectives' own settings (`cluster.nccl`), so
another kind is a change of this file. torch's words for any accelerator are used where it has some
(`torch.accelerator`), the module of the kind (`torch.cuda`) where it has none. torch is imported
inside: the command starts without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    import torch

NAME: Final = "cuda"
"""torch's device type, and the word in files and options."""
DeviceType = Literal["cpu", "cuda"]
"""Where a process may run."""
BACKEND: Final = "nccl"
"""torch's backend for its collectives."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that says which of them a process may use."""
PREFIXES: Final = ("NCCL_", "TORCH_NCCL_")
"""Of the variables that its collectives read."""
SETTINGS: Final = ("CUDA_", *PREFIXES, "PYTORCH_", "TORCH_CUDNN_")
"""Beginnings of variables that change how its kernels, its memory or its collectives work."""
LOST_PEER: Final = "ncclRemoteError"
"""What its collectives say when another process is gone."""


def is_one(device: torch.device) -> bool:
    """Whether a device is one, and not the CPU or meta."""
    return device.type == NAME


def count() -> int:
    """Those that this process may use. Begins to use none, so that processes can still be forked:
    `torch.accelerator` would.
    """
    module = _module()
    return int(module.device_count()) if module.is_available() else 0


def available_type() -> DeviceType:
    """Where a process runs that is not told: on one, else on the CPU."""
    return NAME if _module().is_available() else "cpu"


def use(device: torch.device) -> None:
    """This process's work goes there from here on."""
    import torch

    torch.accelerator.set_device_index(device)


def backend(device: torch.device, *, host_tensors: bool) -> str:
    """Of the default process group. `host_tensors`: it takes tensors in host memory too."""
    if not is_one(device):
        return "gloo"
    return f"cpu:gloo,{NAME}:{BACKEND}" if host_tensors else BACKEND


def model_name(device: torch.device | int | None = None) -> str:
    """What one calls itself; by default the current one."""
    return str(_module().get_device_name(device))


def capacity_bytes(index: int) -> int:
    """Memory of one, free or not."""
    return int(_module().get_device_properties(index).total_memory)


def described(index: int) -> str:
    """One, for a person."""
    properties = _module().get_device_properties(index)
    return (
        f"{properties.name}, {properties.total_memory} bytes, compute capability"
        f" {properties.major}.{properties.minor}"
    )


def built_for() -> str:
    """What this torch can use."""
    import torch

    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of its own, beside the one of the computation."""
    import torch

    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Where this thread's work goes."""
    import torch

    return torch.accelerator.current_stream(device)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work goes to `stream` inside; with None nothing changes."""
    with stream if stream is not None else nullcontext():
        yield


def synchronize(device: torch.device) -> None:
    """Wait until it has done all that it was given; a CPU has."""
    import torch

    if is_one(device):
        torch.accelerator.synchronize(device)


@contextmanager
def warning_of_waits(device: torch.device) -> Iterator[None]:
    """Inside the block torch warns of operations that make the host wait for the device.

    It detects copies to and from memory that is not pinned, reading a number, and waits for a
    stream. It does not detect `synchronize` of a device or an event. Nothing on a CPU.
    """
    if not is_one(device):
        yield
        return
    module = _module()
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


def profiled() -> list[Any]:
    """What torch's profiler shall watch."""
    import torch

    return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


def tensor_of(numbers: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the program (one, or nested sequences) as a tensor there. `torch.tensor(...,
    device=device)` copies from memory that is not pinned, and so waits until the device has done
    all that it was given.
    """
    import torch

    return torch.tensor(numbers, dtype=dtype, pin_memory=is_one(device)).to(
        device, non_blocking=True
    )


def peak_bytes(device: torch.device) -> int:
    """The most that tensors held since `reset_peak`, or since the start."""
    import torch

    return int(torch.accelerator.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin anew; nothing on a CPU."""
    import torch

    if is_one(device):
        torch.accelerator.reset_peak_memory_stats(device)


def allocation_retries(device: torch.device) -> int:
    """Return how often the allocator freed its cache because the device had no memory left."""
    import torch

    return (
        int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))
        if is_one(device)
        else 0
    )


def held_bytes(device: torch.device) -> int:
    """What tensors hold now, and what libraries hold in torch's memory."""
    import torch

    return int(torch.accelerator.memory_allocated(device))


def free_bytes(device: torch.device) -> int:
    """What no process holds of its memory."""
    free, _ = _module().mem_get_info(device)
    return int(free)


def release_cached_memory(device: torch.device) -> None:
    """Return memory that torch's allocator keeps for reuse to the device. Nothing on a CPU."""
    if is_one(device):
        _module().empty_cache()


def limit_memory(device: torch.device, nbytes: int) -> None:
    """This process runs out of memory when it holds more."""
    _module().set_per_process_memory_fraction(nbytes / capacity_bytes(device.index), device)


def generator(device: torch.device) -> torch.Generator:
    """What kernels draw from. Its seed and offset are on the host."""
    found: torch.Generator = _module().default_generators[device.index]
    return found


def _module() -> Any:
    import torch

    return torch.get_device_module(NAME)
