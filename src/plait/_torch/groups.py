"""Process groups: what they are made of, and those that do not exist. `delivered_at_once` and
`splits_named_alike` patch torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha1
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

Group = TypeVar("Group", bound=type)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of one axis with all ranks of `mesh`. Collective: it makes a process group."""
    return mesh._flatten()


@contextmanager
def splits_named_alike(number: int) -> Iterator[None]:
    """Groups that are split from another inside are named by their ranks, `number` and their order.
    torch takes the number of groups that this process is in instead, which is another one on a rank
    that is in more of them; gloo's ranks meet under the name, and would wait for each other for
    ever. `number` is the same on all ranks, and was not used before.
    """
    before = distributed_c10d._hash_ranks_to_str
    order = count()

    def name(ranks: list[int]) -> str:
        return sha1(f"{ranks} {number} {next(order)}".encode(), usedforsecurity=False).hexdigest()

    distributed_c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


def process_group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group that a collective operator is called with: a process group object, or the name of
    one as last argument.
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # another kind of object, e.g. the reduction
                return dist.ProcessGroup.unbox(argument)
    return _resolve_process_group(args[-1])


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective of a group gives up; NCCL's where it has no gloo."""
    return float(_options(group)[0]._timeout.total_seconds())


def default_store() -> dist.Store:
    """The store in which the default group's ranks met."""
    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let collectives of a group give up after so many seconds."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


def give_timeout(group: dist.ProcessGroup, of: dist.ProcessGroup) -> None:
    """Let collectives of `group` give up after the time of `of`. torch gives every new group its
    own default, not the first group's.
    """
    for options in _options(of)[:1]:  # none of a fake group
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(options._timeout)


def _options(group: dist.ProcessGroup) -> list[Any]:
    """Of the backends of a group, which need not have one for every device."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return [backend.options for backend in backends if hasattr(backend, "options")]


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """gloo's backend, for a group that uses it inside."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


_NAMES_BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of process group methods before torch 2.13, keyed by the names since then."""


def with_called_names(group: Group) -> Group:
    """Decorate a process group class written in Python: add its methods under the names that this
    torch calls.
    """
    for name, earlier in _NAMES_BEFORE_2_13.items():
        if not hasattr(dist.ProcessGroup, name):
            setattr(group, earlier, getattr(group, name))
    return group


def give_backend(group: dist.ProcessGroup, backend: Any) -> None:
    """Let `backend` be what a group written in Python names as its own for tensors on the CPU: its
    name and its timeout are read there.
    """
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def finished_work() -> Any:
    """What a collective operator returns beside its tensors, for one that was not carried out."""
    return FakeWork().boxed()


@contextmanager
def delivered_at_once() -> Iterator[None]:
    """Messages to ranks that do not exist count as delivered: a fake group's works never say that
    they are complete.
    """
    before = FakeWork.is_completed
    FakeWork.is_completed = lambda self: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeWork.is_completed = before  # type: ignore[method-assign]
