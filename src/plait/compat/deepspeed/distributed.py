"""The process group, and the arguments of a script, as DeepSpeed's functions make them."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.mesh import DEFAULT_TIMEOUT, join, local_device
from plait.cluster.topology import place
from plait.compat.deepspeed.refused import refuse_given
from plait.errors import InputError

PORT = 29500
"""DeepSpeed's default."""
_LAUNCHER = (
    "the launcher's variables say where and what a process is (`plait launch`, torchrun, srun,"
    " mpirun)"
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
    """Make torch's default process group from the launcher's variables, if there is none;
    `initialize` adopts it. `verbose` and `config` (of DeepSpeed's logger of communication) print
    nothing. Collective. Raises InputError for a backend, a rank or a place that differs from what
    the launcher and the devices say, and with `dist_init_required` False where there is no group.
    """
    refuse_port(distributed_port)
    refuse_given("init_distributed", {"init_method": _LAUNCHER}, init_method=init_method)
    if not auto_mpi_discovery:
        raise InputError(
            "deepspeed.init_distributed(auto_mpi_discovery=False) cannot be honoured; leave it"
            f" out: {_LAUNCHER}"
        )
    refuse_no_group(dist_init_required)
    here = place()
    for name, value, found in (
        ("rank", rank, here.rank),
        ("world_size", world_size, here.world_size),
    ):
        if value not in (-1, found):
            raise InputError(
                f"deepspeed.init_distributed({name}={value}): {name} is {found} here; leave it out:"
                f" {_LAUNCHER}"
            )
    backend = (
        dist.get_backend()
        if dist.is_initialized()
        else accelerator.backend(local_device(None, here), host_tensors=False)
    )
    if dist_backend is not None and dist_backend not in backend:
        raise InputError(
            f"deepspeed.init_distributed(dist_backend={dist_backend!r}): these devices use"
            f" {backend}; leave it out"
        )
    join(timeout=timeout)


def refuse_port(port: int) -> None:
    """Raise InputError for a port of one's own."""
    if port != PORT:
        raise InputError(
            f"distributed_port={port} cannot be honoured; leave it out and set MASTER_PORT:"
            f" {_LAUNCHER}"
        )


def refuse_no_group(dist_init_required: bool | None) -> None:
    """Raise InputError where the caller wanted to make the group and has not."""
    if dist_init_required is False and not dist.is_initialized():
        raise InputError(
            "dist_init_required=False says that the script makes the process group, and there is"
            " none; call torch.distributed.init_process_group before, or leave the argument out"
        )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a script's arguments. Returns the
    parser.
    """
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
