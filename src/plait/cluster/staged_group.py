"""A process group for several ranks on one GPU, which NCCL refuses: tensors are copied to host
memory, gloo moves them, the results are copied to the device.

Slow, because every call waits for the device, and right: it is for checks on machines with fewer
GPUs than a layout has ranks. A call has ended when it returns; messages between two ranks end when
they are waited for. See `topology.share_gpus`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from plait._torch.groups import give_backend, make_gloo, with_called_names
from plait.cluster import accelerator
from plait.cluster.meeting import store_of_next_group
from plait.cluster.mesh import DEFAULT_TIMEOUT
from plait.cluster.topology import place

BACKEND = "plait_staged"

Tensors = Sequence[torch.Tensor]


def make_default_group(*, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """The default group of this launch, with this backend; groups that are made later have it too.
    Collective.
    """
    here = place()
    register_backend()
    store = store_of_next_group(here, timeout)
    dist.init_process_group(
        BACKEND, store=store, rank=here.rank, world_size=here.world_size, timeout=timeout
    )


def register_backend() -> None:
    """Register this backend with torch.distributed. Later calls do nothing."""
    if BACKEND.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", accelerator.NAME])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


class StagedWork(dist.Work):
    """A call that has ended, or a message that ends when it is waited for."""

    def __init__(
        self,
        result: list[torch.Tensor],
        message: Any = None,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._result = result
        self._message = message
        self._arrived = arrived

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._message is not None:
            self._message.wait()
            self._message = None
            if self._arrived is not None:
                self._arrived()
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


_PythonGroup: Any = dist.ProcessGroup
"""Its stubs are those of groups in C++, with an overload for each form of a call."""


@with_called_names
class StagedGroup(_PythonGroup):
    """The group. Methods are those that torch.distributed calls, with its names and arguments."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # of the two constructors the one for Python
        self._gloo = make_gloo(store, rank, size, timeout)
        give_backend(cast(dist.ProcessGroup, self), self._gloo)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = list(tensors)
        staged = _to_host(tensors)
        for one in staged:
            self._gloo.allreduce([one], _reduction(opts)).wait()
        return _arrived(tensors, staged)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        staged = _to_host(tensors)
        self._gloo.reduce(staged, opts).wait()
        return _arrived(list(tensors), staged)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        staged = _to_host(tensors)
        self._gloo.broadcast(staged, opts).wait()
        return _arrived(list(tensors), staged)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flat = [one for row in outputs for one in row]
        staged = [_host_like(one) for one in flat]
        count = self.size()
        for index, one in enumerate(_to_host(inputs)):
            self._gloo.allgather([staged[index * count : (index + 1) * count]], [one]).wait()
        return _arrived(flat, staged)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        return self.allgather(columns, inputs)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        staged = _host_like(output)
        self._gloo.allgather(
            [list(staged.view(self.size(), -1))], [_to_host([given])[0].view(-1)]
        ).wait()
        return _arrived([output], [staged])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return StagedWork(list(outputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output, row in zip(outputs, inputs, strict=True):
            staged = _to_host([torch.cat([one.reshape(-1) for one in row])])[0]
            self._gloo.allreduce([staged], _reduction(opts)).wait()
            begin = sum(one.numel() for one in row[: self.rank()])
            _arrived([output], [staged[begin : begin + output.numel()].view(output.shape)])
        return StagedWork(list(outputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        staged = _to_host([given])[0]
        self._gloo.allreduce([staged], _reduction(opts)).wait()
        return _arrived([output], [staged.view(self.size(), -1)[self.rank()].view(output.shape)])

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return StagedWork(list(outputs))

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, to: Any, source: Any, opts: Any = None
    ) -> dist.Work:
        staged = _host_like(output)
        self._gloo.alltoall_base(staged, _to_host([given])[0], list(to), list(source)).wait()
        return _arrived([output], [staged])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        sizes = [[one.numel() for one in row] for row in (outputs, inputs)]
        staged = torch.empty(sum(sizes[0]), dtype=outputs[0].dtype)
        given = _to_host([torch.cat([one.reshape(-1) for one in inputs])])[0]
        self._gloo.alltoall_base(staged, given, *sizes).wait()
        return _arrived(
            list(outputs),
            [one.view(out.shape) for one, out in zip(staged.split(sizes[0]), outputs, strict=True)],
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        flat = [one for row in outputs for one in row]
        staged = [_host_like(one) for one in flat]
        self._gloo.gather([staged] if staged else [], _to_host(inputs), opts).wait()
        return _arrived(flat, staged)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        staged = [_host_like(one) for one in outputs]
        self._gloo.scatter(staged, [_to_host(row) for row in inputs], opts).wait()
        return _arrived(list(outputs), staged)

    def send(self, tensors: Any, to: int, tag: int = 0) -> dist.Work:
        staged = _to_host(tensors)
        return StagedWork(staged, self._gloo.send(staged, to, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        tensors = list(tensors)
        staged = [_host_like(one) for one in tensors]
        message = self._gloo.recv(staged, source, tag)
        return StagedWork(tensors, message, lambda: _copy(tensors, staged))

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return StagedWork([])


def _to_host(tensors: Any) -> list[torch.Tensor]:
    """Contiguous copies in host memory; the device has finished what it was asked for before on
    this stream.
    """
    return [one.detach().to("cpu", copy=True).contiguous() for one in tensors]


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy(tensors: Tensors, staged: Tensors) -> None:
    with torch.no_grad():
        for tensor, one in zip(tensors, staged, strict=True):
            tensor.copy_(one)


def _arrived(tensors: list[torch.Tensor], staged: Tensors) -> dist.Work:
    _copy(tensors, staged)
    return StagedWork(tensors)


def _reduction(opts: Any) -> Any:
    """gloo's options with the reduction of another call's."""
    found = dist.AllreduceOptions()
    if opts is not None:
        found.reduceOp = opts.reduceOp
    return found
