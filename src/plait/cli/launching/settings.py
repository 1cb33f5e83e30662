"""What a launch is: how many processes on how many machines, where they meet, and what happens when
one fails.

Pure: no torch, no environment, no network. `check` refuses settings that torchrun would accept and
then wait on, or ignore.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError, Problem, refuse

DEFAULT_PORT = 29500
MOST_NODES = 2**20
MOST_ON_A_MACHINE = 4096
DEFAULT_GRACE_SECONDS = 300
DEFAULT_TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Settings:
    """A launch on this machine as one of `min_nodes` to `max_nodes`.

    Machines meet either at `rdzv_endpoint` (torchrun's elastic rendezvous, which numbers them
    itself and allows restarts and a changing number of machines), or at `master_addr:master_port`
    with every machine given its `node_rank`.
    """

    processes: int
    """Processes on this machine."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0
    """How often all ranks are started again after one failed."""
    standby: bool = False
    """Keep one more process a rank, with its imports done, for the next start."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """How long the ranks may take to end after the launcher was interrupted."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """How long to wait for the other machines."""
    log_folder: Path | None = None
    """Where files with what each rank prints are written, too."""
    stack_folder: Path | None = None
    """Where the stacks of ranks that hang are written; None: in `log_folder`, else in a new folder
    for temporary files.
    """

    @property
    def single_node(self) -> bool:
        """Whether no other machine can take part."""
        return self.max_nodes == 1

    @property
    def meeting_point(self) -> str:
        """`host:port` at which the machines meet."""
        return self.rdzv_endpoint or f"{self.master_addr}:{self.master_port or DEFAULT_PORT}"


def parse_nodes(text: str) -> tuple[int, int]:
    """`4` to (4, 4), `2:4` to (2, 4). Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
    if match is None:
        raise ConfigError(
            Problem(
                "--nnodes",
                text,
                "neither a number of machines nor MIN:MAX",
                "write for example 4 or 2:4",
            )
        )
    minimum = int(match[1])
    maximum = int(match[2] or match[1])
    if not 1 <= minimum <= maximum:
        raise ConfigError(
            Problem("--nnodes", text, "not 1 <= MIN <= MAX machines", "write for example 4 or 2:4")
        )
    return minimum, maximum


def parse_processes(
    text: str | None, *, gpus: Callable[[], int], cores: Callable[[], int]
) -> int | None:
    """torchrun's `--nproc-per-node`: a number, `gpu` or `auto` (what None means too: as many as
    there are devices), `cpu` (as many as there are cores). Raises ConfigError for anything else.
    """
    if text is None:
        return None
    if text in ("auto", "gpu"):
        return gpus()
    if text == "cpu":
        return cores()
    if not re.fullmatch(r"\d{1,6}", text):
        raise ConfigError(
            Problem(
                "--nproc-per-node",
                text,
                "neither a number of processes nor gpu, cpu or auto",
                "write for example 8",
            )
        )
    return int(text)


def check(settings: Settings) -> Settings:
    """The same settings. Raises ConfigError with everything that is wrong with them."""
    problems = [
        *_numbers(settings),
        *(_alone(settings) if settings.single_node else _together(settings)),
    ]
    refuse(problems)
    return settings


def _numbers(settings: Settings) -> list[Problem]:
    problems = []
    if settings.processes < 1:
        problems.append(
            Problem(
                "--nproc-per-node",
                settings.processes,
                "at least one process runs on a machine",
                "use 1 or more",
            )
        )
    if settings.processes > MOST_ON_A_MACHINE:
        rule = f"more than {MOST_ON_A_MACHINE:,} processes on one machine"
        problems.append(Problem("--nproc-per-node", settings.processes, rule, "use fewer"))
    if not 1 <= settings.min_nodes <= settings.max_nodes:
        shown = f"{settings.min_nodes}:{settings.max_nodes}"
        problems.append(
            Problem("--nnodes", shown, "not 1 <= MIN <= MAX machines", "write for example 2:4")
        )
    elif settings.max_nodes > MOST_NODES:
        problems.append(
            Problem("--nnodes", settings.max_nodes, f"more than {MOST_NODES} machines", "use fewer")
        )
    if settings.max_restarts < 0:
        problems.append(
            Problem(
                "--max-restarts",
                settings.max_restarts,
                "cannot be negative",
                "use 0 to stop at the first failure",
            )
        )
    if settings.standby and not settings.max_restarts and settings.min_nodes == settings.max_nodes:
        rule = "processes stand by for a restart, and there is none"
        problems.append(Problem("--standby", None, rule, "add --max-restarts N, or leave it out"))
    problems += checked_alike(
        grace=settings.grace_seconds, timeout=settings.timeout_seconds, port=settings.master_port
    )
    if settings.rdzv_endpoint is not None:
        match = re.fullmatch(r"\S+:(\d{1,5})", settings.rdzv_endpoint)
        if match is None or not 1 <= int(match[1]) <= 65535:
            rule = "not HOST:PORT with a port from 1 to 65535"
            problems.append(
                Problem(
                    "--rdzv-endpoint",
                    settings.rdzv_endpoint,
                    rule,
                    f"write for example node1:{DEFAULT_PORT}",
                )
            )
    return problems


def checked_alike(*, grace: float, timeout: float, port: int | None) -> list[Problem]:
    """What is wrong with the settings of every launch, of this machine or of those of a
    hostfile.
    """
    problems = []
    if not 0 <= grace < math.inf:
        problems.append(
            Problem("--grace", grace, "not 0 or more seconds", "use 0 to stop the ranks at once")
        )
    if not 0 < timeout < math.inf:
        problems.append(
            Problem("--timeout", timeout, "not a positive number of seconds", "use for example 900")
        )
    if port is not None and not 1 <= port <= 65535:
        problems.append(
            Problem(
                "--master-port", port, "not a port (1 to 65535)", f"leave it out for {DEFAULT_PORT}"
            )
        )
    return problems


def _alone(settings: Settings) -> list[Problem]:
    if settings.node_rank in (None, 0):
        return []
    rule = "there is one machine, whose rank is 0"
    return [
        Problem("--node-rank", settings.node_rank, rule, "set --nnodes to the number of machines")
    ]


def _together(settings: Settings) -> list[Problem]:
    count = (
        f"{settings.min_nodes}:{settings.max_nodes}"
        if settings.min_nodes != settings.max_nodes
        else str(settings.max_nodes)
    )
    if settings.rdzv_endpoint is not None:
        given = [
            ("--node-rank", settings.node_rank),
            ("--master-addr", settings.master_addr),
            ("--master-port", settings.master_port),
        ]
        return [
            Problem(
                name,
                value,
                "given together with --rdzv-endpoint, where the machines meet and are numbered by"
                " themselves",
                "leave it out",
            )
            for name, value in given
            if value is not None
        ]
    problems = []
    if settings.min_nodes != settings.max_nodes:
        problems.append(
            Problem(
                "--nnodes",
                count,
                "a changing number of machines needs a place to meet",
                "add --rdzv-endpoint HOST:PORT",
            )
        )
    elif settings.master_addr is None:
        remedy = (
            "add --rdzv-endpoint HOST:PORT, the same on every machine, or --master-addr HOST with"
            " --node-rank"
        )
        problems.append(
            Problem("--nnodes", count, "the machines do not know where to meet", remedy)
        )
    elif settings.node_rank is None:
        remedy = f"set it to 0 on {settings.master_addr}, 1 on the next machine, and so on"
        problems.append(
            Problem(
                "--node-rank",
                None,
                f"not set, and with --master-addr the {count} machines are numbered by hand",
                remedy,
            )
        )
    elif not 0 <= settings.node_rank < settings.max_nodes:
        problems.append(
            Problem(
                "--node-rank",
                settings.node_rank,
                f"not one of the {count} machines",
                f"use 0 to {settings.max_nodes - 1}",
            )
        )
    if settings.max_restarts:
        rule = "with --master-addr the other machines do not hear of a restart"
        problems.append(
            Problem(
                "--max-restarts",
                settings.max_restarts,
                rule,
                "use --rdzv-endpoint HOST:PORT instead, or 0",
            )
        )
    return problems
