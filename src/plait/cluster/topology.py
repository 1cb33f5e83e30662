"""Which machines there are, and where in them this process sits: read from the launcher's variables, the machine, or a cluster file.

This module and `plait.cli` are the only readers of the environment. It makes no process group; where a default group already exists,
its rank and size are the truth and variables that contradict it are refused. Nothing is guessed: what cannot be known is an error that
names the variable to set.
"""

from __future__ import annotations

import difflib
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from plait.cluster.launchers import Claim, claim
from plait.errors import ConfigError, InputError, Problem


@dataclass(frozen=True)
class Node:
    """One machine. A device is what one process drives: a GPU, or on a machine without GPUs the process's share of the cores."""

    name: str
    devices: int


@dataclass(frozen=True)
class Topology:
    """The machines of a run, in rank order. `memory_bytes` is that of one device, or None where it is not known."""

    nodes: tuple[Node, ...]
    device_type: Literal["cpu", "cuda"]
    memory_bytes: int | None = None

    @property
    def world_size(self) -> int:
        """Number of devices, which is the number of processes."""
        return sum(node.devices for node in self.nodes)


@dataclass(frozen=True)
class Place:
    """Where this process sits: of all processes, and of those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


def place() -> Place:
    """This process's place: from torchrun, accelerate, deepspeed, OpenMPI, MPICH or srun, else a world of one process.

    A default process group that exists already decides rank and size. Raises ConfigError for variables that contradict each other or the
    group, and where the place on this machine cannot be known.
    """
    found = claim(os.environ)
    group = _existing_group()
    if group is None and found is None:
        return Place()
    if group is not None:
        found = _agree(found, *group)
        if group[2] == "fake":
            return Place(rank=group[0], world_size=group[1])
    assert found is not None
    return _complete(found, device_count())


def discover() -> Topology:
    """The machines of this run. Under a launcher: the devices that the launched processes drive, with every machine like this one.
    Otherwise: every GPU of this machine, or one CPU device.

    Raises ConfigError where the launched processes do not spread evenly over machines; describe those in a file and `load` it.
    """
    here = place()
    gpus = device_count()
    per_node = here.local_world_size if here.world_size > 1 else max(gpus, 1)
    if here.world_size % here.local_world_size:
        raise ConfigError(
            Problem(
                "WORLD_SIZE",
                here.world_size,
                f"not a multiple of the {here.local_world_size} processes on this machine, so the machines differ and only this one is visible",
                "describe the machines in a cluster file",
            )
        )
    count = here.world_size // here.local_world_size
    names = [socket.gethostname() if index == here.node_rank else f"node{index}" for index in range(count)]
    device_type: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    return Topology(tuple(Node(name, per_node) for name in names), device_type, _device_memory_bytes(gpus, per_node))


def load(path: str | Path) -> Topology:
    """Machines described in a YAML or JSON file, for planning where they are not at hand:

        device_type: cuda
        memory_bytes: 85_899_345_920     # of one device; may be left out
        nodes:
          - {name: a01, devices: 8}
          - {name: a02, devices: 8}

    `nodes: 128` with `devices_per_node: 8` describes equal machines. Raises InputError for a file that cannot be read and ConfigError for
    what it says.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cluster file {path}: {getattr(error, 'strerror', None) or error}; name a readable YAML or JSON file") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cluster file {path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"cluster file {path}: holds {type(content).__name__}, not keys and values; begin with `nodes:`")
    return _topology(content, str(path))


def cpu_count() -> int:
    """Cores that this process may use: its affinity, and the quota of its container where one is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def thread_count(here: Place) -> int:
    """Threads for each process of a machine that computes on its CPU: an equal share of the cores, at least 1."""
    return max(1, cpu_count() // here.local_world_size)


def device_count() -> int:
    """Visible GPUs; 0 without CUDA. Does not create a CUDA context."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_processes() -> int:
    """Processes to start on this machine when nobody says: one a GPU; without GPUs two, or one where there is a single core."""
    return device_count() or min(2, cpu_count())


def init_method() -> str:
    """Where the processes of this launch meet, as `torch.distributed.init_process_group(init_method=...)` takes it.

    `env://` where MASTER_ADDR and MASTER_PORT are set; under srun without them the first host of the step, on a port derived from the job.
    Raises ConfigError where neither is known.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return "env://"
    found = claim(os.environ)
    if found is not None and found.meeting_point is not None and len(missing) == 2:
        return f"tcp://{found.meeting_point}"
    raise ConfigError(
        Problem(
            missing[0],
            None,
            "not set, so the processes do not know where to meet",
            "start the script with `plait launch` or `torchrun`, or set MASTER_ADDR to a host name of rank 0 and MASTER_PORT to a free port there",
        )
    )


def _existing_group() -> tuple[int, int, str] | None:
    """(rank, size, backend) of the default process group. Without torch.distributed imported there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()


def _agree(found: Claim | None, rank: int, world_size: int, backend: str) -> Claim:
    if found is None:
        return Claim(launcher="the process group", rank=rank, world_size=world_size)
    if (found.rank, found.world_size) != (rank, world_size) and backend != "fake":
        raise ConfigError(
            Problem(
                found.names[0],
                found.rank,
                f"rank {found.rank} of {found.world_size} says {found.launcher}, rank {rank} of {world_size} says the existing {backend} process group",
                "make the process group with the launcher's rank and world size, or unset the launcher's variables",
            )
        )
    return found


def _complete(found: Claim, devices: int) -> Place:
    """Fill in what a launcher does not say about this machine, where only one answer is possible."""
    local_rank, local_world_size = found.local_rank, found.local_world_size
    if local_rank is None:
        if devices == 0 or found.world_size <= devices:
            local_rank, local_world_size = found.rank, local_world_size or found.world_size
        elif devices == 1:
            local_rank, local_world_size = 0, local_world_size or 1
        else:
            raise ConfigError(
                Problem(
                    "LOCAL_RANK",
                    None,
                    f"not set, and {found.world_size} processes cannot all be on this machine with its {devices} GPUs",
                    "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with `plait launch` or `torchrun`",
                )
            )
    if local_world_size is None:
        local_world_size = min(found.world_size, devices) if devices else found.world_size
    node_rank = found.node_rank if found.node_rank is not None else (found.rank - local_rank) // local_world_size
    here = Place(found.rank, found.world_size, local_rank, local_world_size, node_rank)
    _check(here, found)
    return here


def _check(here: Place, found: Claim) -> None:
    rank, world, local, local_world = found.names
    problems = []
    if not 0 <= here.rank < here.world_size:
        problems.append(Problem(rank, here.rank, f"outside the world of {world} = {here.world_size} processes", "number ranks from 0"))
    if not 0 <= here.local_rank < here.local_world_size:
        rule = f"outside the {local_world} = {here.local_world_size} processes of this machine"
        problems.append(Problem(local, here.local_rank, rule, "number local ranks from 0 on every machine"))
    if here.local_world_size > here.world_size:
        rule = f"more processes on this machine than the {world} = {here.world_size} in all"
        problems.append(Problem(local_world, here.local_world_size, rule, f"set {world} to the number of all processes"))
    if here.local_rank > here.rank:
        rule = f"larger than {rank} = {here.rank}, which counts the processes of earlier machines too"
        problems.append(Problem(local, here.local_rank, rule, "check that both come from the same launcher"))
    if problems:
        raise ConfigError(*problems)


def _device_memory_bytes(gpus: int, processes: int) -> int | None:
    if gpus:
        import torch

        return min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
    if not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container limit: the file is missing or says `max`
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // processes


_KEYS = ("nodes", "devices_per_node", "device_type", "memory_bytes")


def _topology(content: Mapping[str, Any], source: str) -> Topology:
    problems = [_unknown(f"{source}: {key}", key, _KEYS) for key in content if key not in _KEYS]
    nodes = content.get("nodes")
    per_node = content.get("devices_per_node")
    machines: list[Node] = []
    if isinstance(nodes, int) and _is_count(nodes):
        if isinstance(per_node, int) and _is_count(per_node):
            machines = [Node(f"node{index}", per_node) for index in range(nodes)]
        else:
            problems.append(
                Problem(
                    f"{source}: devices_per_node",
                    per_node,
                    f"`nodes: {nodes}` needs a whole number of devices, at least 1",
                    "set it, for example 8",
                )
            )
    elif isinstance(nodes, list) and nodes:
        machines, found = _machines(nodes, per_node, source)
        problems += found
    else:
        problems.append(
            Problem(f"{source}: nodes", nodes, "neither a list of machines nor a count of at least 1", "list `{name: a01, devices: 8}`")
        )
    device_type = content.get("device_type", "cuda")
    if device_type not in ("cpu", "cuda"):
        problems.append(Problem(f"{source}: device_type", device_type, "not a device type that Plait runs on", "use cuda or cpu"))
    memory = content.get("memory_bytes")
    if memory is not None and not _is_count(memory):
        problems.append(
            Problem(f"{source}: memory_bytes", memory, "not a whole number of bytes", "set the bytes of one device, or leave it out")
        )
    if problems:
        raise ConfigError(*problems)
    return Topology(tuple(machines), device_type, memory)


def _machines(nodes: list[Any], per_node: Any, source: str) -> tuple[list[Node], list[Problem]]:
    machines: list[Node] = []
    problems: list[Problem] = []
    for index, entry in enumerate(nodes):
        where = f"{source}: nodes[{index}]"
        if not isinstance(entry, dict):
            problems.append(Problem(where, entry, "not a machine with its devices", "write `{name: a01, devices: 8}`"))
            continue
        problems += [_unknown(f"{where}.{key}", key, ("name", "devices")) for key in entry if key not in ("name", "devices")]
        name, devices = entry.get("name", f"node{index}"), entry.get("devices", per_node)
        if not isinstance(name, str):
            problems.append(Problem(f"{where}.name", name, "not a name", "quote it"))
        if not _is_count(devices):
            problems.append(
                Problem(f"{where}.devices", devices, "not a whole number of at least 1", "set the number of devices, for example 8")
            )
        if any(machine.name == name for machine in machines):
            problems.append(Problem(f"{where}.name", name, "named twice", "give every machine its own name"))
        machines.append(Node(name, devices))
    return machines, problems


def _unknown(field: str, key: object, known: tuple[str, ...]) -> Problem:
    near = difflib.get_close_matches(str(key), known, n=1)
    return Problem(field, None, "unknown key", f"did you mean `{near[0]}`?" if near else f"use {', '.join(known)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
