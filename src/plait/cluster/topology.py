"""Which machines there are, and where in them this process sits: read from the launcher's variables
and the machine itself.

This module and `plait.cli` are the only readers of the environment. It makes no process group;
where a default group already exists, its rank and size are the truth and variables that contradict
it are refused. Nothing is guessed: what cannot be known is an error that names the variable to set.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.cluster import accelerator, allocator
from plait.cluster.accelerator import DeviceType
from plait.cluster.launchers import Claim, claim
from plait.cluster.machines import Node, Topology
from plait.cluster.nccl import Library
from plait.errors import ConfigError, Problem, refuse

WATCH_FOLDER = "PLAIT_WATCH_FOLDER"
"""Set by the launcher for its ranks."""


@dataclass(frozen=True)
class RankInfo:
    """Where this process sits: of all processes, and of those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


def place() -> RankInfo:
    """This process's place: from torchrun, accelerate, deepspeed, OpenMPI, MPICH or srun, else a
    world of one process.

    A default process group that exists already decides rank and size. Raises ConfigError for
    variables that contradict each other or the group, and where the place on this machine cannot be
    known.
    """
    found = claim(os.environ)
    group = _existing_group()
    if group is None and found is None:
        return RankInfo()
    if group is not None:
        found = _agree(found, *group)
        if group[2] == "fake":
            return RankInfo(rank=group[0], world_size=group[1])
    assert found is not None
    return _complete(found, device_count())


def discover() -> Topology:
    """The machines of this run. Under a launcher: the devices that the launched processes drive,
    with every machine like this one. Otherwise: every GPU of this machine, or one CPU device.

    Raises ConfigError where the launched processes do not spread evenly over machines; describe
    those in a file and `load` it.
    """
    here = place()
    gpus = device_count()
    per_node = here.local_world_size if here.world_size > 1 else max(gpus, 1)
    if here.world_size % here.local_world_size:
        rule = (
            f"not a multiple of the {here.local_world_size} processes on this machine, and the"
            " other machines cannot be seen from here"
        )
        raise ConfigError(
            Problem("WORLD_SIZE", here.world_size, rule, "describe the machines in a cluster file")
        )
    count = here.world_size // here.local_world_size
    names = [
        socket.gethostname() if index == here.node_rank else f"node{index}"
        for index in range(count)
    ]
    device_type: DeviceType = accelerator.NAME if gpus else "cpu"
    return Topology(
        tuple(Node(name, per_node) for name in names),
        device_type,
        _device_memory_bytes(gpus, per_node),
    )


def tell_library(library: Library, *, device_type: str, group_exists: bool) -> None:
    """Set the variables of NCCL for this process. Raises ConfigError where they would not be read
    (see `Library.export`).
    """
    library.export(os.environ, device_type=device_type, group_exists=group_exists)


def share_gpus(count: int) -> bool:
    """Whether this launch on one machine has more processes than its `count` GPUs. Then this
    process gets the GPU local rank % count alone, as if it had a machine of its own: NCCL refuses
    two ranks on one GPU, and so no code that asks where it is may see a second. Call it before
    anything looks for GPUs, because CUDA reads its variable once.
    """
    found = claim(os.environ)
    if found is None or found.local_rank is None or found.world_size <= count:
        return False
    visible = [name for name in os.environ.get(accelerator.VISIBLE, "").split(",") if name.strip()]
    index = found.local_rank % count
    os.environ[accelerator.VISIBLE] = visible[index].strip() if index < len(visible) else str(index)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(found.rank)}
    return True


def keep_host_memory() -> bool:
    """Let this process keep what it frees, if its environment does not configure that (see
    `cluster.allocator`). Whether it does.
    """
    return allocator.keep_freed_memory(os.environ)


def watch_folder() -> Path | None:
    """Where a launcher of Plait's own, which watches its ranks, looks for their boards; None under
    another one.
    """
    folder = os.environ.get(WATCH_FOLDER)
    return Path(folder) if folder and Path(folder).is_dir() else None


def launchers_variable(name: str, default: str) -> str:
    """A variable that a launcher set for a library, in lower case."""
    return os.environ.get(name, default).lower()


@contextmanager
def without_variable(name: str) -> Iterator[None]:
    """A variable that a launcher set, hidden from a library that would act on it."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


def cpu_count() -> int:
    """Cores that this process may use: its affinity, and the quota of its container where one is
    set.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def processor_name() -> str:
    """The processor's name from the kernel, or from the platform."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_name(processes: int) -> str:
    """The processor, and the threads that each of `processes` on it computes with: as
    OMP_NUM_THREADS says, else an equal share.
    """
    told = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(told) if told.isdigit() and int(told) else thread_count(processes)
    return f"{processor_name()}, {threads} {'thread' if threads == 1 else 'threads'} a process"


def thread_count(processes: int) -> int:
    """Threads for each of the processes of a machine: an equal share of the cores, at least 1."""
    return max(1, cpu_count() // processes)


def device_count() -> int:
    """Visible GPUs."""
    return accelerator.count()


def default_processes() -> int:
    """Default number of processes on this machine: one a GPU; without GPUs two, or one where there
    is a single core.
    """
    return device_count() or min(2, cpu_count())


def init_method() -> str:
    """Where the processes of this launch meet, as
    `torch.distributed.init_process_group(init_method=...)` takes it.

    `env://` where MASTER_ADDR and MASTER_PORT are set; under srun without them the first host of
    the step, on a port derived from the job. Raises ConfigError where neither is known.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return "env://"
    found = claim(os.environ)
    if found is not None and found.meeting_point is not None and len(missing) == 2:
        return f"tcp://{found.meeting_point}"
    remedy = (
        "start the script with `plait launch` or `torchrun`, or set MASTER_ADDR to rank 0's host"
        " and MASTER_PORT to a free port there"
    )
    raise ConfigError(
        Problem(missing[0], None, "not set, so the processes do not know where to meet", remedy)
    )


def meeting_address(method: str) -> str:
    """The address that an `init_method` stands for."""
    return (
        f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if method == "env://"
        else method
    )


def _existing_group() -> tuple[int, int, str] | None:
    """(rank, size, backend) of the default process group. Without torch.distributed imported there
    is none.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def _agree(found: Claim | None, rank: int, world_size: int, backend: str) -> Claim:
    if found is None:
        return Claim(launcher="the process group", rank=rank, world_size=world_size)
    if (found.rank, found.world_size) != (rank, world_size) and backend != "fake":
        said = f"rank {found.rank} of {found.world_size} says {found.launcher}"
        rule = f"{said}, rank {rank} of {world_size} says the existing {backend} process group"
        remedy = (
            "make the process group with the launcher's rank and world size, or unset the"
            " launcher's variables"
        )
        raise ConfigError(Problem(found.names[0], found.rank, rule, remedy))
    return found


def _complete(found: Claim, devices: int) -> RankInfo:
    """Fill in the values of this machine that a launcher does not set, where only one is
    possible.
    """
    local_rank = found.local_rank
    local_world_size = found.local_world_size
    if local_rank is None:
        if devices == 0 or found.world_size <= devices:
            local_rank = found.rank
            local_world_size = local_world_size or found.world_size
        elif devices == 1:
            local_rank = 0
            local_world_size = local_world_size or 1
        else:
            rule = (
                f"not set, and {found.world_size} processes cannot all be on this machine with its"
                f" {devices} GPUs"
            )
            remedy = (
                "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `plait launch` or `torchrun`"
            )
            raise ConfigError(Problem("LOCAL_RANK", None, rule, remedy))
    if local_world_size is None:
        local_world_size = min(found.world_size, devices) if devices else found.world_size
    node_rank = (
        found.node_rank
        if found.node_rank is not None
        else (found.rank - local_rank) // local_world_size
    )
    here = RankInfo(found.rank, found.world_size, local_rank, local_world_size, node_rank)
    _check(here, found)
    return here


def _check(here: RankInfo, found: Claim) -> None:
    rank, world, local, local_world = found.names
    problems = []
    if not 0 <= here.rank < here.world_size:
        problems.append(
            Problem(
                rank,
                here.rank,
                f"outside the world of {world} = {here.world_size} processes",
                "number ranks from 0",
            )
        )
    if not 0 <= here.local_rank < here.local_world_size:
        rule = f"outside the {local_world} = {here.local_world_size} processes of this machine"
        problems.append(
            Problem(local, here.local_rank, rule, "number local ranks from 0 on every machine")
        )
    if here.local_world_size > here.world_size:
        rule = f"more processes on this machine than the {world} = {here.world_size} in all"
        problems.append(
            Problem(
                local_world,
                here.local_world_size,
                rule,
                f"set {world} to the number of all processes",
            )
        )
    if here.local_rank > here.rank:
        rule = (
            f"larger than {rank} = {here.rank}, which counts the processes of earlier machines too"
        )
        problems.append(
            Problem(local, here.local_rank, rule, "check that both come from the same launcher")
        )
    refuse(problems)


def _device_memory_bytes(gpus: int, processes: int) -> int | None:
    if gpus:
        return min(map(accelerator.capacity_bytes, range(gpus)))
    if not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container limit: the file is missing or says `max`
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // processes
