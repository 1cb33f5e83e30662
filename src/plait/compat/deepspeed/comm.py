"""`deepspeed.comm`: torch.distributed under DeepSpeed's names.

`init_distributed` and `add_config_arguments` are DeepSpeed's functions for the start of a script.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.mesh import DEFAULT_TIMEOUT, join, local_device
from plait.cluster.topology import place
from plait.compat.deepspeed.refused import missing, refuse_arguments
from plait.errors import InputError

PORT = 29500
"""Default port of DeepSpeed."""
_LAUNCHER = (
    "the launcher (`plait launch`, torchrun, srun, mpirun) defines rank, number of processes and"
    " address in environment variables"
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch's default process group from the launcher's variables. Collective.

    An existing group is reused. `initialize` uses the default group.

    Args:
        dist_backend: Must be the backend of the devices, or None.
        auto_mpi_discovery: Must be True.
        distributed_port: Must be the default.
        verbose: Ignored.
        timeout: Timeout of collectives.
        init_method: Must be None.
        dist_init_required: If False, the group must exist.
        config: Ignored. In DeepSpeed it configures the logging of communication.
        rank: Must be the launcher's, or -1.
        world_size: Must be the launcher's, or -1.

    Raises:
        InputError: An argument is not supported.
    """
    refuse_port(distributed_port)
    refuse_arguments("init_distributed", {"init_method": _LAUNCHER}, init_method=init_method)
    if not auto_mpi_discovery:
        raise InputError(
            "deepspeed.init_distributed(auto_mpi_discovery=False) is not supported; leave it"
            f" out: {_LAUNCHER}"
        )
    refuse_no_group(dist_init_required)
    launched = place()
    # -1 is DeepSpeed's default, which lets the launcher decide.
    for name, value, expected in (
        ("rank", rank, launched.rank),
        ("world_size", world_size, launched.world_size),
    ):
        if value not in (-1, expected):
            raise InputError(
                f"deepspeed.init_distributed({name}={value}): {name} is {expected} here; leave it"
                f" out: {_LAUNCHER}"
            )

    # `join` uses an existing group, whatever its backend.
    if dist.is_initialized():
        backend = str(dist.get_backend())
    else:
        backend = accelerator.backend(local_device(launched), host_tensors=False)
    if dist_backend is not None and dist_backend not in backend:
        raise InputError(
            f"deepspeed.init_distributed(dist_backend={dist_backend!r}): these devices use"
            f" {backend}; leave it out"
        )
    join(timeout=timeout)


def refuse_port(port: int) -> None:
    """Raise InputError if a port is not the default."""
    if port != PORT:
        raise InputError(
            f"distributed_port={port} is not supported; leave it out and set MASTER_PORT:"
            f" {_LAUNCHER}"
        )


def refuse_no_group(dist_init_required: bool | None) -> None:
    """Raise InputError if `dist_init_required` is False and no process group exists."""
    if dist_init_required is False and not dist.is_initialized():
        raise InputError(
            "dist_init_required=False says that the script creates the process group, but there is"
            " none; call torch.distributed.init_process_group before, or leave the argument out"
        )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a parser, and return the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration of plait.compat.deepspeed")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="for the script: whether to call deepspeed.initialize",
    )
    group.add_argument(
        "--deepspeed_config",
        default=None,
        type=str,
        help="the configuration, a DeepSpeed JSON file",
    )
    return parser


__all__ = ["get_global_rank", "get_local_rank", "get_world_group", "init_distributed"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if not hasattr(dist, name):
        raise missing(
            "deepspeed.comm",
            name,
            {},
            default="call torch.distributed, whose default group is the one that Plait uses",
        )
    return getattr(dist, name)


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return place().local_rank


def get_world_group() -> dist.ProcessGroup | None:
    """Return torch's default group, or None if it does not exist yet."""
    return dist.group.WORLD


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of a process of a group."""
    if group is None:
        return group_rank
    return dist.get_global_rank(group, group_rank)
