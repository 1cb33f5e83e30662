"""Environment variables of torchrun, DeepSpeed, OpenMPI, MPICH and Slurm.

Every function receives the variables as a mapping, and none inspects this machine. A `Claim` has
the values that a launcher set. `topology` adds missing values and checks the claim against the
machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class Claim:
    """Rank and sizes of this process according to a launcher's variables. None means unset.

    Attributes:
        launcher: Name of the launcher for messages.
        rank: Global rank.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine.
        local_world_size: Number of processes of this machine.
        node_rank: Rank of this machine among the machines.
        names: Variables for rank, size, local rank and local size, for messages.
        rendezvous_address: `host:port` at which the processes meet, if the launcher implies one.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    names: tuple[str, str, str, str] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rendezvous_address: str | None = None


@dataclass(frozen=True)
class LauncherVariables:
    """Names of a launcher's environment variables.

    If a field lists several names, the first variable that is set is used.

    Attributes:
        launcher: Name of the launcher for messages.
        rank: Variable of the global rank.
        world_size: Variables of the number of processes.
        local_rank: Variable of the rank among the processes of this machine.
        local_world_size: Variables of the number of processes of this machine.
        node_rank: Variables of the number of this machine.
        only_with: Further variables that must be set for the launcher to be recognised.
    """

    launcher: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()


LAUNCHERS = (
    LauncherVariables(
        "the launcher",
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        ("GROUP_RANK", "CROSS_RANK"),
    ),
    LauncherVariables(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # srun's PMI plugin sets PMI_RANK as well, but not MPI_LOCALRANKID: that one is hydra's (MPICH,
    # Intel MPI).
    LauncherVariables(
        "MPICH",
        "PMI_RANK",
        ("PMI_SIZE",),
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        only_with=("MPI_LOCALRANKID",),
    ),
    # A batch script sees SLURM_PROCID = 0 and SLURM_NTASKS without being a task of a step; only
    # srun sets SLURM_STEP_NODELIST.
    LauncherVariables(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        node_rank=("SLURM_NODEID",),
        only_with=("SLURM_STEP_NODELIST",),
    ),
)
"""Known launchers. The first one whose variables are set is used.

An inner launcher (torchrun under srun, mpirun under srun) precedes the outer one.
"""


def claim(environment: Mapping[str, str]) -> Claim | None:
    """Return the rank and sizes that the launcher of this process set, or None without a launcher.

    Raises:
        ConfigError: Only some of a launcher's variables are set, or one is not a number.
    """
    for names in LAUNCHERS:
        if not all(name in environment for name in names.only_with):
            continue
        size_name = _first_set(environment, names.world_size)
        has_rank = names.rank in environment
        if has_rank and size_name is not None:
            return _claim(environment, names, size_name)
        if has_rank:
            raise _incomplete(present=names.rank, missing=names.world_size[0])
        if size_name is not None:
            raise _incomplete(present=size_name, missing=names.rank)
    return None


def _incomplete(*, present: str, missing: str) -> ConfigError:
    return ConfigError(
        Problem(
            missing,
            None,
            f"not set although {present} is",
            f"set both, or unset {present} for a single process",
        )
    )


def _claim(environment: Mapping[str, str], names: LauncherVariables, size_name: str) -> Claim:
    node_rank = _integer_or_none(environment, _first_set(environment, names.node_rank))
    local_size_name = _first_set(environment, names.local_world_size)
    local_world_size = _integer_or_none(environment, local_size_name)
    rendezvous_address = None
    if names.launcher == "srun":
        # Slurm lists the numbers of tasks of all machines in one variable.
        local_size_name = "SLURM_STEP_TASKS_PER_NODE"
        if local_size_name in environment and node_rank is not None:
            counts = tasks_per_node(environment[local_size_name])
            local_world_size = counts[node_rank] if node_rank < len(counts) else None
        rendezvous_address = (
            f"{first_host(environment['SLURM_STEP_NODELIST'])}:{_port(environment)}"
        )
    # Without the other one, each of the two is refused.
    remedy = f"correct it, or unset {names.rank} and {size_name} for a single process"
    return Claim(
        launcher=names.launcher,
        rank=_integer(environment, names.rank, remedy),
        world_size=_integer(environment, size_name, remedy),
        local_rank=_integer_or_none(environment, names.local_rank),
        local_world_size=local_world_size,
        node_rank=node_rank,
        names=(
            names.rank,
            size_name,
            names.local_rank,
            local_size_name or (*names.local_world_size, "LOCAL_WORLD_SIZE")[0],
        ),
        rendezvous_address=rendezvous_address,
    )


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _integer_or_none(environment: Mapping[str, str], name: str | None) -> int | None:
    """Return the value of a variable, or None if it is not set."""
    if name is None or name not in environment:
        return None
    return _integer(environment, name)


def _integer(
    environment: Mapping[str, str], name: str, remedy: str = "correct it, or unset it"
) -> int:
    text = environment[name].strip()
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(
            Problem(name, environment[name], "not a whole number of at least 0", remedy)
        )
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers in Slurm's notation: `4(x2),3` stands for [4, 4, 3].

    Raises:
        ConfigError: The text has another form.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", entry)
        if match is None:
            raise ConfigError(
                Problem(
                    "SLURM_STEP_TASKS_PER_NODE",
                    text,
                    "not of Slurm's form `4(x2),3`",
                    "start the processes with srun",
                )
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first name of a Slurm node list.

    It is `gpu007` for `gpu[007-012,020],cpu1`, and `rack1node1` for `rack[1-2]node[1-4]`.

    Raises:
        ConfigError: The text is not a node list.
    """
    # Characters outside brackets and bracketed lists, up to the first comma between names.
    match = re.match(r"(?:[^,\[\]]|\[\w+[^\[\]]*\])+", text.strip())
    if match is None or not re.match(r"[^,\[]", text.strip()):
        raise ConfigError(
            Problem(
                "SLURM_STEP_NODELIST",
                text,
                "not a list of node names",
                "start the processes with srun",
            )
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that is the same for all tasks of a job step.

    It differs between neighbouring jobs and steps, and is below the ephemeral range.
    """
    job = int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environment.get("SLURM_STEP_ID", "")) or 0)
    return 10_000 + (job * 7 + step) % 20_000
