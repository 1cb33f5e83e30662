"""Process groups: backends, timeouts, names, single-tensor collectives, and unfinished collectives.

Patched behaviour: `delivered_at_once` and `consistent_split_names` replace functions of torch
within their `with` blocks.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single`. The function is looked up in every call, because other code may have
replaced it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha1
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

from plait._torch.operators import replaced

GroupClass = TypeVar("GroupClass", bound=type)
_NAMES_BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of process group methods before torch 2.13, keyed by the names since then."""
_RENAMED = hasattr(dist, "all_gather_single")
_DUMP_FUNCTIONS = tuple(
    name
    for name in dir(_distributed_c10d)
    if name.startswith("_dump_") and name.endswith("_trace_json")
)
"""Names of the functions that return the entries of a recorder, one function per backend."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
}
"""Names of dtypes, keyed by the names in the entries of recorders."""


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with all ranks of `mesh` in one dimension, and create its group. Collective."""
    return mesh._flatten()


@contextmanager
def consistent_split_names(number: int) -> Iterator[None]:
    """Give process groups that are split inside the block the same name on all of their ranks.

    torch derives the name from the number of groups of the process. This number differs between
    ranks that are in different groups. The ranks of a gloo group connect under its name, so they
    would wait for each other until the timeout. Inside the block, the name is derived from the
    ranks, `number` and the position of the split.

    Args:
        number: A number that is equal on all ranks and has not been used before.
    """
    positions = count()

    def hash_ranks_and_position(ranks: list[int]) -> str:
        identity = f"{ranks} {number} {next(positions)}"
        return sha1(identity.encode(), usedforsecurity=False).hexdigest()

    with replaced(distributed_c10d, "_hash_ranks_to_str", hash_ranks_and_position):
        yield


def process_group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group in the arguments of a collective operator.

    Operators of `c10d` receive a process group object. Functional collectives receive the name of
    the group as last argument.
    """
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            # Other script objects, for example the reduction, cannot be unboxed as a group.
            with suppress(RuntimeError):
                return dist.ProcessGroup.unbox(argument)
    return _resolve_process_group(args[-1])


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's collectives in seconds.

    A group with several backends has one timeout per backend. The result is that of the first
    one.
    """
    return float(_backend_options(group)[0]._timeout.total_seconds())


def default_store() -> dist.Store:
    """Return the rendezvous store of the default group."""
    return distributed_c10d._get_default_store()


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of a group's collectives."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


def copy_timeout(group: dist.ProcessGroup, source: dist.ProcessGroup) -> None:
    """Set the timeout of `group` to that of the group `source`.

    torch gives every new group the default timeout of its backend, not that of the default group.
    """
    options = _backend_options(source)
    if not options:
        # The backend of a fake group has no options.
        return
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(options[0]._timeout)


def _backend_options(group: dist.ProcessGroup) -> list[Any]:
    """Return the options of the group's backends. A backend without options is left out."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return [backend.options for backend in backends if hasattr(backend, "options")]


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a gloo backend for a process group that is written in Python."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def add_legacy_names(group_class: GroupClass) -> GroupClass:
    """Add methods under the names that torch 2.11 and 2.12 call. Class decorator.

    Args:
        group_class: Process group that is written in Python, with the method names of torch 2.13.
    """
    for name, earlier_name in _NAMES_BEFORE_2_13.items():
        if not hasattr(dist.ProcessGroup, name):
            setattr(group_class, earlier_name, getattr(group_class, name))
    return group_class


def register_cpu_backend(group: dist.ProcessGroup, backend: Any) -> None:
    """Register the CPU backend of a process group that is written in Python.

    torch reads the name and the timeout of the group from the backend.
    """
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def finished_work() -> Any:
    """Return the work object of a collective operator that was not executed."""
    return FakeWork().boxed()


def delivered_at_once() -> AbstractContextManager[None]:
    """Make messages of a fake group count as delivered inside the block.

    torch's `is_completed` never returns True for them, and `plait.comm.messages` polls it.
    """
    return replaced(FakeWork, "is_completed", lambda _work: True)


def all_gather_single(
    output: torch.Tensor,
    shard: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather the `shard` of every rank into `output`, in the order of the ranks. Collective."""
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    full: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum `full` over the ranks and write this rank's shard of the sum to `output`. Collective."""
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    return scatter(output, full, group=group, async_op=async_op)


@dataclass(frozen=True)
class UnfinishedCollective:
    """A collective of this process that has started and has not finished.

    Attributes:
        operation: Name of the operation without its backend, for example `all_reduce`.
        group: torch's name of the process group.
        description: Purpose of the group, for example `mesh_dp_shard`.
        ranks: Global ranks of the group.
        sequence: Number of the collective in its group. 0 for a message between two ranks.
        shapes: Shapes and dtypes of the inputs, for example `[1000] float32`.
        time_ns: Time at which it began, as `time.time_ns` returns it.
    """

    operation: str
    group: str
    description: str
    ranks: tuple[int, ...]
    sequence: int
    shapes: str
    time_ns: int


def unfinished_collectives() -> list[UnfinishedCollective]:
    """Return the unfinished collectives of this process, oldest first.

    torch records the most recent collectives of every backend, including gloo. A call takes about a
    millisecond per hundred recorded collectives.
    """
    collectives = [entry for name in _DUMP_FUNCTIONS for entry in _unfinished(name)]
    return sorted(collectives, key=attrgetter("time_ns"))


def _unfinished(dump_function: str) -> Iterator[UnfinishedCollective]:
    """Yield the unfinished collectives of one recorder."""
    dump = getattr(_distributed_c10d, dump_function, None)
    if dump is None:
        return
    recorded = json.loads(dump(includeCollectives=True, onlyActive=True))
    groups = {name: group for group, name in distributed_c10d._world.pg_names.items()}

    for entry in recorded.get("entries") or ():
        if entry.get("retired") or entry.get("state") == "completed":
            continue

        name, _ = entry["process_group"]
        group = groups.get(name)
        description = ""
        ranks: tuple[int, ...] = ()
        if group is not None:
            description = group.group_desc
            ranks = tuple(distributed_c10d._world.pg_group_ranks[group])

        is_message = bool(entry.get("is_p2p"))
        yield UnfinishedCollective(
            operation=str(entry["profiling_name"]).rpartition(":")[2],
            group=name,
            description=description,
            ranks=ranks,
            sequence=0 if is_message else int(entry["collective_seq_id"]),
            shapes=_shapes(entry),
            time_ns=int(entry["time_created_ns"]),
        )


def _shapes(entry: dict[str, Any]) -> str:
    """Return shapes and dtypes of a recorded collective's inputs."""
    inputs = []
    for size, dtype in zip(
        entry.get("input_sizes", ()), entry.get("input_dtypes", ()), strict=False
    ):
        inputs.append(f"{size} {_DTYPES.get(dtype, dtype.lower())}")
    return " and ".join(inputs)
