"""Python side of torch.cuda on the simulated device, and functions for tests.

It runs once, after the import of torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.cuda.nccl

library = sys.modules["simulated_device.library"].load()
cuda: Any = torch.cuda
core: Any = torch._C
COUNT = library.simulated_devices()
_NOW, _PEAK, _RESERVED, _RESERVED_PEAK, _CAPACITY, _PINNED = range(6)


def races():
    """Return the unordered accesses to the same memory since `clear`."""
    return [library.simulated_race(index).decode() for index in range(library.simulated_races())]


def journal():
    """Return the calls of all communicators of this process since `clear`, in order."""
    return [json.loads(line) for line in sys.modules["simulated_nccl"].journal()]


def clear():
    """Forget races and calls."""
    library.simulated_clear_races()
    sys.modules["simulated_nccl"].clear_journal()


def copies():
    """Return the numbers of copies between host and device so far.

    Deferred copies overlap with the host. Pageable ones should, and block nevertheless.
    """
    names = ("deferred", "pageable", "waited")
    return {name: library.simulated_copies(index) for index, name in enumerate(names)}


def blocked():
    """Return how often the program has waited for a stream so far.

    Queries that do not block are not counted. `drained` counts the waits with nothing queued behind
    the point that was waited for, after which the device has no work.
    """
    return {"all": library.simulated_blocked(0), "drained": library.simulated_blocked(1)}


def behind():
    """Return the number of streams with work that the host has not waited for."""
    return int(library.simulated_behind(_index()))


def set_clock(seconds):
    """Set the time that events read. A negative value selects the host's clock."""
    library.simulated_set_clock(seconds)


def pinned_bytes():
    """Return the bytes of pinned host memory in use."""
    return int(library.simulated_memory(0, _PINNED))


def _index(device=None):
    if device is None:
        return int(library.simulated_current_device())
    if isinstance(device, int):
        return device if device >= 0 else _index()
    parsed = torch.device(device)
    if parsed.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {parsed}")
    return _index() if parsed.index is None else parsed.index


def _set_device(index):
    if index >= COUNT:
        raise RuntimeError("CUDA error: invalid device ordinal")
    library.simulated_set_device(index)


def _exchange(index):
    before = _index()
    if index >= 0:
        _set_device(index)
    return before


class _Properties:
    """Properties of a large GPU."""

    name = "simulated device (host memory)"
    major = 9
    minor = 0
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    L2_cache_size = 50 << 20
    is_integrated = is_multi_gpu_board = False
    uuid = "simulated"
    gcnArchName = ""

    @property
    def total_memory(self):
        return int(library.simulated_memory(0, _CAPACITY))


def _devices():
    cuda.is_available = cuda._is_compiled = torch.backends.cuda.is_built = lambda: True
    cuda.device_count = core._cuda_getDeviceCount = lambda: COUNT
    cuda._lazy_init = cuda.init = core._cuda_init = lambda: None
    cuda.is_initialized = lambda: True
    cuda._is_in_bad_fork = core._cuda_isInBadFork = lambda: False
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    core._cuda_getDevice = _index
    core._cuda_setDevice = _set_device
    core._cuda_exchangeDevice = core._cuda_maybeExchangeDevice = _exchange
    core._cuda_hasPrimaryContext = lambda device: True
    core._cuda_canDeviceAccessPeer = lambda first, second: True
    core._cuda_getArchFlags = lambda: "sm_90"
    core._cuda_getCompiledVersion = lambda: 12080
    core._cuda_get_sync_debug_mode = lambda: 0
    core._cuda_set_sync_debug_mode = lambda mode: None
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.get_device_name = lambda device=None: _Properties.name
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    library.simulated_default_generators(1)
    cuda.default_generators = tuple(
        torch.Generator(device=f"cuda:{index}") for index in range(COUNT)
    )
    library.simulated_default_generators(0)


class Stream(torch.Stream):
    """A torch.cuda.Stream whose base class has the simulated streams."""

    def __new__(cls, device=None, priority=0, **of):
        if "stream_id" in of:
            return super().__new__(
                cls, stream_id=of["stream_id"], device_index=of["device_index"], device_type=1
            )
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    @property
    def cuda_stream(self):
        return self.stream_id

    @property
    def priority(self):
        return 0

    def __eq__(self, other):
        if not isinstance(other, torch.Stream):
            return False
        return self.stream_id == other.stream_id and self.device == other.device

    def __hash__(self):
        return hash((self.stream_id, self.device))


class Event(torch.Event):
    """A torch.cuda.Event. Its time is that of the host when the work before it was done."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        if interprocess:
            raise RuntimeError("the simulated device has no events between processes")
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end):
        milliseconds = library.simulated_elapsed(self.event_id, end.event_id)
        if milliseconds != milliseconds:
            raise RuntimeError(
                "CUDA error: both events must be recorded with enable_timing=True, and be reached, "
                "before the time is asked"
            )
        return float(milliseconds)

    def record(self, stream=None):
        super().record(cuda.current_stream() if stream is None else stream)

    def wait(self, stream=None):
        super().wait(cuda.current_stream() if stream is None else stream)


def _stream(device, stream_id):
    return Stream(stream_id=stream_id, device_index=device)


class _NoGraph:
    """Refuses CUDA graphs, because the simulated device runs kernels when they are called."""

    def __init__(self, *args, **options):
        raise RuntimeError("the simulated device has no CUDA graphs")


def _streams():
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream = lambda device=None: _stream(
        _index(device), library.simulated_current_stream(_index(device))
    )
    cuda.default_stream = lambda device=None: _stream(_index(device), 0)
    cuda.synchronize = lambda device=None: library.simulated_synchronize(_index(device))
    core._cuda_synchronize = lambda: library.simulated_synchronize(_index())
    core._cuda_getCurrentStream = lambda device: (
        library.simulated_current_stream(device),
        device,
        1,
    )
    core._cuda_getCurrentRawStream = lambda device: library.simulated_current_stream(device)
    core._cuda_getDefaultStream = lambda device: (0, device, 1)
    core._cuda_setStream = lambda stream_id, device_index, device_type: (
        library.simulated_set_stream(device_index, stream_id)
    )
    cuda.is_current_stream_capturing = core._cuda_isCurrentStreamCapturing = lambda: False
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = cuda.graph = cuda.graphs.graph = (
        cuda.make_graphed_callables
    ) = _NoGraph


def _statistics(device):
    now, peak, reserved, most = (
        library.simulated_memory(device, which)
        for which in (_NOW, _PEAK, _RESERVED, _RESERVED_PEAK)
    )
    return {
        "allocated_bytes": {"all": {"current": now, "peak": peak}},
        "reserved_bytes": {"all": {"current": reserved, "peak": most}},
    }


def _memory():
    def asks(which):
        return lambda device=None: library.simulated_memory(_index(device), which)

    for module in (cuda, cuda.memory):
        module.memory_allocated = asks(_NOW)
        module.max_memory_allocated = asks(_PEAK)
        module.memory_reserved = asks(_RESERVED)
        module.max_memory_reserved = asks(_RESERVED_PEAK)
        module.reset_peak_memory_stats = lambda device=None: library.simulated_reset_peak(
            _index(device)
        )
        module.empty_cache = lambda: library.simulated_empty_cache(_index())
        module.mem_get_info = lambda device=None: (
            asks(_CAPACITY)(device) - asks(_NOW)(device),
            asks(_CAPACITY)(device),
        )
    core._cuda_emptyCache = lambda *pool: library.simulated_empty_cache(_index())
    core._cuda_memoryStats = _statistics
    core._cuda_resetPeakMemoryStats = lambda device: library.simulated_reset_peak(device)
    core._cuda_resetAccumulatedMemoryStats = lambda device: None
    core._cuda_getAllocatorBackend = lambda: "native"
    core._cuda_ipc_collect = lambda: None


def _storages():
    """Replace methods of storages that torch refuses for CUDA in builds without it."""
    resize = torch.UntypedStorage.resize_
    to_host = torch.UntypedStorage.cpu

    def moved(storage, device):
        bytes_of_it = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return bytes_of_it.to(device, copy=True).untyped_storage()

    def resize_(self, size):
        if self.device.type != "cuda":
            return resize(self, size)
        with cuda.device(self.device):
            library.simulated_resize_storage(self._cdata, int(size))
        return self

    def to(self, *, device, non_blocking=False):
        return self if torch.device(device) == self.device else moved(self, device)

    storage: Any = torch.UntypedStorage
    storage.resize_ = resize_
    torch.storage._StorageBase.to = storage.to = to
    storage.cuda = lambda self, device=None, non_blocking=False: moved(
        self, torch.device("cuda", _index(device))
    )
    torch.storage._StorageBase.cuda = storage.cuda
    storage.cpu = lambda self: moved(self, "cpu") if self.device.type == "cuda" else to_host(self)


def _nccl():
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def gloo(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    file = os.path.join(os.environ["SIMULATED_DEVICE"], "simulated_nccl.so")
    spec = importlib.util.spec_from_file_location("simulated_nccl", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["simulated_nccl"] = module
    module.set_gloo(gloo)
    for where in (core._distributed_c10d, distributed_c10d, dist):
        where.ProcessGroupNCCL = module.ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    cuda.nccl.version = lambda: (2, 28, 9)


def put():
    """Make torch see the device."""
    _devices()
    _streams()
    _memory()
    _storages()
    _nccl()
