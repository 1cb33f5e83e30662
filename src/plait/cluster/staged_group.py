"""Process group for several ranks on one GPU, which NCCL does not support.

Tensors are copied to host memory, sent by gloo, and the results are copied to the device. This is
slow, because every call waits for the device. It is for checks on machines with fewer GPUs than a
layout has ranks, see `topology.share_gpus`. A collective is complete when its call returns. A
message between two ranks is complete after `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist

from plait._torch.groups import add_legacy_names, make_gloo, register_cpu_backend
from plait.cluster import accelerator
from plait.cluster.mesh import DEFAULT_TIMEOUT
from plait.cluster.process_groups import store_of_next_group
from plait.cluster.topology import place

BACKEND = "plait_staged"
"""Name of the backend."""

Tensors = Sequence[torch.Tensor]
# torch's stubs describe process groups in C++, with an overload for each form of a call.
_PythonGroup: Any = dist.ProcessGroup


def make_default_group() -> None:
    """Create the default group of this launch with this backend. Collective.

    Groups that are created later have the same backend.
    """
    rank_info = place()
    register_backend()
    dist.init_process_group(
        BACKEND,
        store=store_of_next_group(rank_info, DEFAULT_TIMEOUT),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=DEFAULT_TIMEOUT,
    )


def register_backend() -> None:
    """Register this backend with torch.distributed. Later calls do nothing."""
    if BACKEND.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", accelerator.NAME])


class StagedWork(dist.Work):
    """Work handle of a call: a completed collective, or a message.

    Args:
        result: Tensors of the caller.
        message: gloo's work handle of a message.
        on_arrival: Called after the message has arrived.
    """

    def __init__(
        self,
        result: list[torch.Tensor],
        message: Any = None,
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._message = message
        self._on_arrival = on_arrival

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._message is not None:
            self._message.wait()
            self._message = None
            if self._on_arrival is not None:
                self._on_arrival()
        return True

    def is_completed(self) -> bool:
        return self._message is None or bool(self._message.is_completed())

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


@add_legacy_names
class StagedGroup(_PythonGroup):
    """Process group that stages tensors in host memory.

    Its methods have the names and arguments with which torch.distributed calls them.

    Args:
        store: Store in which the ranks meet.
        rank: Rank of this process in the group.
        size: Number of ranks.
        timeout: Timeout of gloo's calls.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        # The base class has two constructors. The one with these arguments is for Python.
        super().__init__(rank, size)
        self._gloo = make_gloo(store, rank, size, timeout)
        register_cpu_backend(cast(dist.ProcessGroup, self), self._gloo)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors)
        staged = _to_host(tensors)
        # gloo treats the tensors of a list as addends of one sum.
        for tensor in staged:
            self._gloo.allreduce([tensor], _reduction(opts)).wait()
        return _finish(tensors, staged)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        staged = _to_host(tensors)
        self._gloo.reduce(staged, opts).wait()
        return _finish(list(tensors), staged)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        staged = _to_host(tensors)
        self._gloo.broadcast(staged, opts).wait()
        return _finish(list(tensors), staged)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = list(chain.from_iterable(outputs))
        staged = [_empty_on_host(output) for output in flat]
        count = self.size()
        for index, tensor in enumerate(_to_host(inputs)):
            row = staged[index * count : (index + 1) * count]
            self._gloo.allgather([row], [tensor]).wait()
        return _finish(flat, staged)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        # `outputs` has a row per rank here, and a row per input in `allgather`.
        columns = list(zip(*outputs, strict=True))
        return self.allgather(columns, inputs)

    def all_gather_single(
        self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        staged = _empty_on_host(output)
        # One view per rank, [ranks][numel of a shard].
        rows = list(staged.view(self.size(), -1))
        (host_shard,) = _to_host([shard])
        self._gloo.allgather([rows], [host_shard.view(-1)]).wait()
        return _finish([output], [staged])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, shard in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, shard)
        return StagedWork(list(outputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, row in zip(outputs, inputs, strict=True):
            (staged,) = _to_host([_concatenated(row)])
            self._gloo.allreduce([staged], _reduction(opts)).wait()
            # Shards may have different sizes.
            start = sum(tensor.numel() for tensor in row[: self.rank()])
            _finish([output], [staged[start : start + output.numel()].view(output.shape)])
        return StagedWork(list(outputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, full: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        (staged,) = _to_host([full])
        self._gloo.allreduce([staged], _reduction(opts)).wait()
        # [ranks x n, ...] -> [n, ...]
        shard = staged.view(self.size(), -1)[self.rank()]
        return _finish([output], [shard.view(output.shape)])

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        for output, full in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, full, opts)
        return StagedWork(list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        received_sizes: Any,
        sent_sizes: Any,
        opts: Any = None,
    ) -> dist.Work:
        staged = _empty_on_host(output)
        (host_rows,) = _to_host([rows])
        self._gloo.alltoall_base(staged, host_rows, list(received_sizes), list(sent_sizes)).wait()
        return _finish([output], [staged])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        received_sizes = [output.numel() for output in outputs]
        sent_sizes = [tensor.numel() for tensor in inputs]
        staged = torch.empty(sum(received_sizes), dtype=outputs[0].dtype)
        (host_inputs,) = _to_host([_concatenated(inputs)])
        self._gloo.alltoall_base(staged, host_inputs, received_sizes, sent_sizes).wait()
        host_outputs = [
            part.view(output.shape)
            for part, output in zip(staged.split(received_sizes), outputs, strict=True)
        ]
        return _finish(list(outputs), host_outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        flat = list(chain.from_iterable(outputs))
        staged = [_empty_on_host(output) for output in flat]
        # Only the root has outputs.
        self._gloo.gather([staged] if staged else [], _to_host(inputs), opts).wait()
        return _finish(flat, staged)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        staged = [_empty_on_host(output) for output in outputs]
        self._gloo.scatter(staged, [_to_host(row) for row in inputs], opts).wait()
        return _finish(list(outputs), staged)

    def send(self, tensors: Any, to: int, tag: int = 0) -> dist.Work:
        staged = _to_host(tensors)
        # The work references the copies, which must exist until they are delivered.
        return StagedWork(staged, self._gloo.send(staged, to, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        tensors = list(tensors)
        staged = [_empty_on_host(tensor) for tensor in tensors]
        message = self._gloo.recv(staged, source, tag)
        return StagedWork(tensors, message, partial(_copy, tensors, staged))

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return StagedWork([])


def _to_host(tensors: Any) -> list[torch.Tensor]:
    """Return contiguous copies in host memory. Waits for the current stream."""
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def _empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _concatenated(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _copy(tensors: Tensors, staged: Tensors) -> None:
    with torch.no_grad():
        for tensor, host_tensor in zip(tensors, staged, strict=True):
            tensor.copy_(host_tensor)


def _finish(tensors: list[torch.Tensor], staged: Tensors) -> dist.Work:
    """Copy the results to the tensors of the caller, and return the finished work."""
    _copy(tensors, staged)
    return StagedWork(tensors)


def _reduction(opts: Any) -> Any:
    """Return gloo's all-reduce options with the reduction of another call's options."""
    options = dist.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options
