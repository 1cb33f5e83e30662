"""Machines of a run and the ranks of this process, from the launcher's variables and this machine.

Only this module and `plait.cli` read environment variables. This module creates no process group.
The rank and size of an existing default group take precedence, and variables that contradict them
are errors. Nothing is guessed: if a value is not known, an error names the variable to set.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from plait.cluster import accelerator
from plait.cluster.accelerator import DeviceType
from plait.cluster.launchers import Claim, claim
from plait.cluster.machines import Node, Topology
from plait.errors import ConfigError, Problem, raise_problems
from plait.names import number_of

WATCH_FOLDER = "PLAIT_WATCH_FOLDER"
"""Variable with the folder in which ranks publish their progress. Plait's launcher sets it."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among all processes, and among those of its machine.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine.
        local_world_size: Number of processes of this machine.
        node_rank: Number of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


def place() -> RankInfo:
    """Return the ranks of this process and the numbers of processes.

    They come from the variables of torchrun, accelerate, deepspeed, OpenMPI, MPICH or srun. Without
    a launcher there is one process. An existing default process group determines rank and size.

    Raises:
        ConfigError: Variables contradict each other or the process group, or the place on this
            machine cannot be determined.
    """
    claimed = claim(os.environ)
    group = _existing_group()
    if group is not None:
        rank, world_size, backend = group
        claimed = _check_against_group(claimed, rank, world_size, backend)
        if backend == "fake":
            # The launcher's variables describe this process, not the simulated ranks.
            return RankInfo(rank=rank, world_size=world_size)
    if claimed is None:
        return RankInfo()
    return _complete(claimed, device_count())


def discover() -> Topology:
    """Return the machines of this run and their devices.

    Under a launcher, the devices are those of the launched processes, and all machines are assumed
    to be like this one. Otherwise they are all GPUs of this machine, or one CPU device.

    Raises:
        ConfigError: The machines do not have equally many processes.
    """
    rank_info = place()
    gpus = device_count()
    per_node = rank_info.local_world_size if rank_info.world_size > 1 else max(gpus, 1)
    if rank_info.world_size % rank_info.local_world_size:
        raise ConfigError(
            Problem(
                "WORLD_SIZE",
                rank_info.world_size,
                f"not a multiple of the {rank_info.local_world_size} processes on this machine, and"
                " the other machines cannot be seen from here",
                "start equally many on every machine",
            )
        )
    nodes = []
    for index in range(rank_info.world_size // rank_info.local_world_size):
        name = socket.gethostname() if index == rank_info.node_rank else f"node{index}"
        nodes.append(Node(name, per_node))
    device_type: DeviceType = accelerator.NAME if gpus else "cpu"
    return Topology(tuple(nodes), device_type, _device_memory_bytes(gpus, per_node))


def share_gpus(count: int) -> bool:
    """Assign one GPU to this process if the launch has more processes than this machine has GPUs.

    The process then sees only the GPU `local rank % count`, as if it had a machine of its own. NCCL
    does not support two ranks on one GPU, so no code may see a second process of this machine. Call
    this before any code looks for GPUs, because CUDA reads its variable once.

    Args:
        count: Number of GPUs of this machine.

    Returns:
        Whether GPUs are shared.
    """
    claimed = claim(os.environ)
    if claimed is None or claimed.local_rank is None or claimed.world_size <= count:
        return False
    names = os.environ.get(accelerator.VISIBLE_DEVICES_VARIABLE, "").split(",")
    visible = [name.strip() for name in names if name.strip()]
    index = claimed.local_rank % count
    os.environ[accelerator.VISIBLE_DEVICES_VARIABLE] = (
        visible[index] if index < len(visible) else str(index)
    )
    # Each process is the only one of its machine from here on.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(claimed.rank)}
    return True


def keep_host_memory() -> bool:
    """Keep freed memory in this process, unless the environment configures the allocator.

    Returns:
        Whether `cluster.host_memory.keep_freed_memory` configured the allocator.
    """
    from plait.cluster.host_memory import keep_freed_memory

    return keep_freed_memory(os.environ)


def watch_folder() -> Path | None:
    """Return the folder in which Plait's launcher reads the progress of its ranks.

    The result is None without Plait's launcher.
    """
    folder = os.environ.get(WATCH_FOLDER)
    if not folder or not Path(folder).is_dir():
        return None
    return Path(folder)


def launchers_variable(name: str, default: str) -> str:
    """Return the value, in lower case, of a variable that a launcher sets for a library."""
    return os.environ.get(name, default).lower()


@contextmanager
def without_variable(name: str) -> Iterator[None]:
    """Hide a variable inside the block from a library that would act on it."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def cpu_count() -> int:
    """Return the number of cores that this process may use.

    This respects the affinity of the process and the quota of its container.
    """
    # `os.cpu_count` includes cores that the process may not use.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def processor_name() -> str:
    """Return the name of the processor from the kernel, with the platform as a fallback."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_name(processes: int) -> str:
    """Return a text with the processor's name and the number of threads per process.

    The number is that of OMP_NUM_THREADS, or else an equal share of the cores. The text identifies
    measurements, so it must not change.

    Args:
        processes: Number of processes on this machine.
    """
    configured = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(configured) if configured.isdigit() else 0
    threads = threads or thread_count(processes)
    return f"{processor_name()}, {number_of(threads, 'thread')} a process"


def thread_count(processes: int) -> int:
    """Return the threads per process on a machine: an equal share of the cores, at least 1."""
    return max(1, cpu_count() // processes)


def device_count() -> int:
    """Return the number of visible GPUs."""
    return accelerator.count()


def default_processes() -> int:
    """Return the default number of processes on this machine.

    It is one per GPU. Without GPUs it is two, or one on a single core.
    """
    return device_count() or min(2, cpu_count())


def init_method() -> str:
    """Return the `init_method` for torch's `init_process_group` in this launch.

    It is `env://` if MASTER_ADDR and MASTER_PORT are set. Under srun without either of them it is a
    TCP address of the first host of the job step, with a port that is derived from the job.

    Raises:
        ConfigError: A variable is missing, and the launcher does not imply an address.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return "env://"
    claimed = claim(os.environ)
    # If one of the variables is set, the other one was forgotten, and a derived address would not
    # fit.
    if claimed is not None and claimed.rendezvous_address is not None and len(missing) == 2:
        return f"tcp://{claimed.rendezvous_address}"
    raise ConfigError(
        Problem(
            missing[0],
            None,
            "not set, so the processes have no rendezvous address",
            "start the script with `plait launch` or `torchrun`, or set MASTER_ADDR to rank 0's"
            " host and MASTER_PORT to a free port there",
        )
    )


def address_of_method(method: str) -> str:
    """Return the address in an `init_method`."""
    if method != "env://":
        return method
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _existing_group() -> tuple[int, int, str] | None:
    """Return (rank, size, backend) of the default process group, or None if there is none."""
    # Without an import of torch.distributed there is no group. This does not import it, which takes
    # long.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def _check_against_group(claimed: Claim | None, rank: int, world_size: int, backend: str) -> Claim:
    """Check the launcher's rank and world size against an existing process group.

    Args:
        claimed: Values of the launcher, or None if no launcher is recognized.
        rank: Rank in the existing process group.
        world_size: Size of the group.
        backend: Backend of the group.

    Returns:
        `claimed`, or without a launcher a claim with the rank and size of the group.

    Raises:
        ConfigError: The launcher and the process group contradict each other.
    """
    if claimed is None:
        # LOCAL_RANK and LOCAL_WORLD_SIZE count without RANK and WORLD_SIZE, which the group knows.
        variables = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        placed = claim(variables) or Claim("the process group", rank, world_size)
        return replace(placed, launcher="the process group")
    if (claimed.rank, claimed.world_size) != (rank, world_size) and backend != "fake":
        raise ConfigError(
            Problem(
                claimed.names[0],
                claimed.rank,
                f"{claimed.launcher} says rank {claimed.rank} of {claimed.world_size}, but the"
                f" existing {backend} process group says rank {rank} of {world_size}",
                "create the process group with the launcher's rank and world size, or unset the"
                " launcher's variables",
            )
        )
    return claimed


def _complete(claimed: Claim, devices: int) -> RankInfo:
    """Add each value that the launcher did not set, if this machine allows only one value."""
    local_rank = claimed.local_rank
    local_world_size = claimed.local_world_size
    if local_rank is None:
        if devices == 0 or claimed.world_size <= devices:
            # All processes fit on this machine.
            local_rank = claimed.rank
            local_world_size = local_world_size or claimed.world_size
        elif devices == 1:
            # Each machine has one process.
            local_rank = 0
            local_world_size = local_world_size or 1
        else:
            raise ConfigError(
                Problem(
                    "LOCAL_RANK",
                    None,
                    f"not set, and {claimed.world_size} processes cannot all be on this machine"
                    f" with its {devices} GPUs",
                    "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `plait launch` or"
                    " `torchrun`",
                )
            )

    if local_world_size is None:
        local_world_size = min(claimed.world_size, devices or claimed.world_size)
    node_rank = claimed.node_rank
    if node_rank is None:
        node_rank = (claimed.rank - local_rank) // local_world_size
    rank_info = RankInfo(claimed.rank, claimed.world_size, local_rank, local_world_size, node_rank)
    _check_ranges(rank_info, claimed)
    return rank_info


def _check_ranges(rank_info: RankInfo, claimed: Claim) -> None:
    """Raise ConfigError if the ranks and numbers of processes contradict each other."""
    rank, world, local, local_world = claimed.names
    rules = (
        (
            0 <= rank_info.rank < rank_info.world_size,
            Problem(
                rank,
                rank_info.rank,
                f"is not below {world} = {rank_info.world_size}",
                "number ranks from 0",
            ),
        ),
        (
            0 <= rank_info.local_rank < rank_info.local_world_size,
            Problem(
                local,
                rank_info.local_rank,
                f"is not below {local_world} = {rank_info.local_world_size}, the number of"
                " processes on this machine",
                "number local ranks from 0 on every machine",
            ),
        ),
        (
            rank_info.local_world_size <= rank_info.world_size,
            Problem(
                local_world,
                rank_info.local_world_size,
                f"is above {world} = {rank_info.world_size}, the number of all processes",
                f"set {world} to the number of all processes",
            ),
        ),
        (
            rank_info.local_rank <= rank_info.rank,
            Problem(
                local,
                rank_info.local_rank,
                f"is above {rank} = {rank_info.rank}, which also counts the processes of earlier"
                " machines",
                "check that both come from the same launcher",
            ),
        ),
    )
    raise_problems(problem for is_met, problem in rules if not is_met)


def _device_memory_bytes(gpus: int, processes: int) -> int | None:
    """Return the memory of the smallest GPU, or without GPUs a process's share of host memory."""
    if gpus:
        return min(map(accelerator.capacity_bytes, range(gpus)))
    if not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Without a limit of the container the file is missing or has the text `max`.
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // processes
