"""Settings of a launch: processes, machines, rendezvous, and the reaction to failures.

The module imports no torch and does not use the network. `check` refuses
settings that torchrun would silently ignore, or with which it would hang. `with_variables` adds to
the options of the command line those that torchrun reads from environment variables. For example,
Kubeflow sets `PET_NNODES`, which stands for `--nnodes`, in every pod.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, Problem, raise_problems

DEFAULT_PORT = 29500
MAX_NODES = 2**20
MAX_PROCESSES_PER_NODE = 4096
DEFAULT_GRACE_SECONDS = 300
DEFAULT_TIMEOUT_SECONDS = 900
MEETING_OPTIONS = ("node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id")
"""Fields of LaunchSettings that determine the rendezvous."""


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a launch on this machine, which is one of `min_nodes` to `max_nodes` machines.

    Machines meet either at `rdzv_endpoint` (torchrun's elastic rendezvous, which numbers them
    itself and allows restarts and a changing number of machines), or at `master_addr:master_port`
    if every machine knows its `node_rank`.
    """

    processes: int
    """Number of processes on this machine."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0
    """Largest number of restarts of all ranks after a failure."""
    standby: bool = False
    """True to keep one more process per rank, with finished imports, for the next start."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """Time for the ranks to end after the launcher was interrupted."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """Time to wait for the other machines."""
    log_folder: Path | None = None
    """Folder for files with the output of each rank, which is also printed."""
    stack_folder: Path | None = None
    """Folder for the stacks of ranks that hang.

    The default is `log_folder`, or a new temporary folder.
    """

    @property
    def single_node(self) -> bool:
        """True if no other machine can join."""
        return self.max_nodes == 1

    @property
    def rendezvous_address(self) -> str:
        """Rendezvous address `host:port` of the machines."""
        return self.rdzv_endpoint or f"{self.master_addr}:{self.master_port or DEFAULT_PORT}"

    @property
    def node_range(self) -> str:
        """Number of machines in the notation of the command line: `4`, or `2:4`."""
        if self.min_nodes == self.max_nodes:
            return str(self.max_nodes)
        return f"{self.min_nodes}:{self.max_nodes}"


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse a number of machines: `4` as (4, 4), `2:4` as (2, 4).

    Raises:
        ConfigError: The text has another form.
    """
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
    """Parse torchrun's `--nproc-per-node`.

    Args:
        text: A number, `gpu` or `auto` (one process per device), or `cpu` (one per core). None if
            the option is not used.
        gpus: Returns the number of devices.
        cores: Returns the number of cores.

    Returns:
        The number of processes, or None if the option is not used.

    Raises:
        ConfigError: The text has another form.
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


def check(settings: LaunchSettings) -> LaunchSettings:
    """Return the settings after checking them.

    Raises:
        ConfigError: The settings contradict each other. The error lists all problems.
    """
    problems = _value_problems(settings)
    if settings.single_node:
        problems += _single_node_problems(settings)
    else:
        problems += _rendezvous_problems(settings)
    raise_problems(problems)
    return settings


def _value_problems(settings: LaunchSettings) -> list[Problem]:
    endpoint = re.fullmatch(r"\S+:(\d{1,5})", settings.rdzv_endpoint or "")
    is_range = 1 <= settings.min_nodes <= settings.max_nodes
    rules = (
        (
            settings.processes < 1,
            Problem(
                "--nproc-per-node",
                settings.processes,
                "at least one process runs on a machine",
                "use 1 or more",
            ),
        ),
        (
            settings.processes > MAX_PROCESSES_PER_NODE,
            Problem(
                "--nproc-per-node",
                settings.processes,
                f"more than {MAX_PROCESSES_PER_NODE:,} processes on one machine",
                "use fewer",
            ),
        ),
        (
            not is_range,
            Problem(
                "--nnodes",
                f"{settings.min_nodes}:{settings.max_nodes}",
                "not 1 <= MIN <= MAX machines",
                "write for example 2:4",
            ),
        ),
        (
            is_range and settings.max_nodes > MAX_NODES,
            Problem("--nnodes", settings.max_nodes, f"more than {MAX_NODES} machines", "use fewer"),
        ),
        (
            settings.max_restarts < 0,
            Problem(
                "--max-restarts",
                settings.max_restarts,
                "cannot be negative",
                "use 0 to stop at the first failure",
            ),
        ),
        (
            settings.standby
            and not settings.max_restarts
            and settings.min_nodes == settings.max_nodes,
            Problem(
                "--standby",
                None,
                "processes stand by for a restart, but there is none",
                "add --max-restarts N, or leave it out",
            ),
        ),
    )
    problems = [problem for applies, problem in rules if applies]
    problems += common_problems(
        grace=settings.grace_seconds, timeout=settings.timeout_seconds, port=settings.master_port
    )
    if settings.rdzv_endpoint is not None and (
        endpoint is None or not 1 <= int(endpoint[1]) <= 65535
    ):
        problems.append(
            Problem(
                "--rdzv-endpoint",
                settings.rdzv_endpoint,
                "not HOST:PORT with a port from 1 to 65535",
                f"write for example node1:{DEFAULT_PORT}",
            )
        )
    return problems


def common_problems(*, grace: float, timeout: float, port: int | None) -> list[Problem]:
    """Return the problems of settings that can be used with and without a hostfile."""
    rules = (
        (
            not 0 <= grace < math.inf,
            Problem("--grace", grace, "not 0 or more seconds", "use 0 to stop the ranks at once"),
        ),
        (
            not 0 < timeout < math.inf,
            Problem(
                "--timeout", timeout, "not a positive number of seconds", "use for example 900"
            ),
        ),
        (
            port is not None and not 1 <= port <= 65535,
            Problem(
                "--master-port", port, "not a port (1 to 65535)", f"leave it out for {DEFAULT_PORT}"
            ),
        ),
    )
    return [problem for applies, problem in rules if applies]


def _single_node_problems(settings: LaunchSettings) -> list[Problem]:
    if settings.node_rank in (None, 0):
        return []
    return [
        Problem(
            "--node-rank",
            settings.node_rank,
            "there is one machine, whose rank is 0",
            "set --nnodes to the number of machines and --master-addr to the first one,"
            " or leave it out",
        )
    ]


def _rendezvous_problems(settings: LaunchSettings) -> list[Problem]:
    """Return the problems of the rendezvous of several machines."""
    count = settings.node_range
    if settings.rdzv_endpoint is not None:
        rule = (
            "given together with --rdzv-endpoint, which determines the rendezvous and the numbers"
            " of the machines"
        )
        return [
            Problem(name, value, rule, "leave it out")
            for name, value in _options_by_hand(settings).items()
        ]

    problems = []
    by_hand = _options_by_hand(settings)
    endpoint = "--rdzv-endpoint HOST:PORT"
    if by_hand:
        endpoint = f"{endpoint} in place of {' and '.join(by_hand)}"
    if settings.min_nodes != settings.max_nodes:
        problems.append(
            Problem(
                "--nnodes",
                count,
                "an elastic number of machines needs a rendezvous endpoint",
                f"add {endpoint}",
            )
        )
    elif settings.master_addr is None:
        problems.append(
            Problem(
                "--nnodes",
                count,
                "the rendezvous address is not set",
                f"add {endpoint}, the same on every machine, or --master-addr HOST with"
                " --node-rank",
            )
        )
    elif settings.node_rank is None:
        problems.append(
            Problem(
                "--node-rank",
                None,
                f"not set, and with --master-addr the {count} machines are numbered by hand",
                f"set it to 0 on {settings.master_addr}, 1 on the next machine, and so on",
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
        problems.append(
            Problem(
                "--max-restarts",
                settings.max_restarts,
                "with --master-addr the other machines do not learn of a restart",
                f"use {endpoint}, or 0",
            )
        )
    return problems


def _options_by_hand(settings: LaunchSettings) -> dict[str, object]:
    """Return the used options that cannot be combined with --rdzv-endpoint."""
    options = {
        "--node-rank": settings.node_rank,
        "--master-addr": settings.master_addr,
        "--master-port": settings.master_port,
    }
    return {name: value for name, value in options.items() if value is not None}


_INTEGERS = ("node_rank", "master_port", "max_restarts")
_ENDPOINT_OPTIONS = ("rdzv_endpoint", "rdzv_id", "rdzv_backend")
_ADDRESS_OPTIONS = ("node_rank", "master_addr", "master_port")


def with_variables(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a launch, completed from the variables that torchrun reads.

    Args:
        options: Values by torchrun's names, with underscores. None means an option that is not
            used.
        environment: Variables of the environment.

    Returns:
        All of `options`. Machines meet either at an endpoint or at a master address. If the command
        line sets one of the two, variables that set the other are ignored. If variables set both,
        the endpoint takes precedence, as in torchrun.

    Raises:
        ConfigError: A variable must be a number and is not.
    """
    variables = {
        name: environment[_variable(name)] for name in options if environment.get(_variable(name))
    }
    has_address = any(options.get(name) is not None for name in _ADDRESS_OPTIONS)
    has_endpoint = options.get("rdzv_endpoint") is not None or (
        not has_address and "rdzv_endpoint" in variables
    )
    ignored: tuple[str, ...] = ()
    if has_endpoint:
        ignored = _ADDRESS_OPTIONS
    elif has_address:
        ignored = _ENDPOINT_OPTIONS
    for name in ignored:
        variables.pop(name, None)

    completed = dict(options)
    for name, text in variables.items():
        if completed[name] is None:
            completed[name] = _parse(name, text)
    return completed


def names_machines(environment: Mapping[str, str]) -> bool:
    """Return True if RANK and WORLD_SIZE count machines rather than processes.

    Kubeflow sets them for each pod, in addition to `PET_NNODES`.
    """
    return _variable("nnodes") in environment and "LOCAL_RANK" not in environment


def _variable(name: str) -> str:
    return f"PET_{name.upper()}"


def _parse(name: str, text: str) -> Any:
    if name not in _INTEGERS:
        return text
    if not text.strip().isdecimal():
        raise ConfigError(
            Problem(
                _variable(name), text, "not a whole number of at least 0", "correct it, or unset it"
            )
        )
    return int(text)
