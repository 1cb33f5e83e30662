"""The environment variables of each launcher, as a table: the variables of torchrun, DeepSpeed,
OpenMPI, MPICH and Slurm.

Pure: every function takes the variables as a mapping. A `Claim` holds the values that the launcher
set and None for the others; completing and checking it against the machine is `topology`'s work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class Claim:
    """What a launcher's variables define for this process. `names` are its variables for rank,
    size, local rank and local size, for messages; `meeting_point` is `host:port` where the launcher
    implies one.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    names: tuple[str, str, str, str] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    meeting_point: str | None = None


@dataclass(frozen=True)
class Names:
    """The variables of one launcher. Of several names for one number the first that is set
    counts.
    """

    launcher: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    """The launcher is recognised only where all of these are set too."""


LAUNCHERS = (
    Names(
        "the launcher",
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        ("GROUP_RANK", "CROSS_RANK"),
    ),
    Names(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # srun's PMI plugin sets PMI_RANK as well, but not MPI_LOCALRANKID: that one is hydra's (MPICH,
    # Intel MPI).
    Names(
        "MPICH",
        "PMI_RANK",
        ("PMI_SIZE",),
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        only_with=("MPI_LOCALRANKID",),
    ),
    # A batch script sees SLURM_PROCID = 0 and SLURM_NTASKS without being a task of a step; only
    # srun sets SLURM_STEP_NODELIST.
    Names(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        node_rank=("SLURM_NODEID",),
        only_with=("SLURM_STEP_NODELIST",),
    ),
)
"""In the order in which they are believed: an inner launcher (torchrun under srun, mpirun under
srun) before the outer one.
"""


def claim(environment: Mapping[str, str]) -> Claim | None:
    """The claim of this process's launcher; None without one. Raises ConfigError for half of a
    launcher's variables or no numbers.
    """
    for names in LAUNCHERS:
        if not all(name in environment for name in names.only_with):
            continue
        size_name = next((name for name in names.world_size if name in environment), None)
        if names.rank not in environment and size_name is None:
            continue
        if names.rank not in environment or size_name is None:
            have, lack = (size_name, names.rank) if size_name else (names.rank, names.world_size[0])
            raise ConfigError(
                Problem(
                    lack,
                    None,
                    f"not set although {have} is",
                    f"set both, or unset {have} for a single process",
                )
            )
        return _claim(environment, names, size_name)
    return None


def _claim(environment: Mapping[str, str], names: Names, size_name: str) -> Claim:
    node_rank = _first(environment, names.node_rank)
    local_size_name = next((name for name in names.local_world_size if name in environment), None)
    local_world_size = _integer(environment, local_size_name) if local_size_name else None
    meeting_point = None
    if names.launcher == "srun":
        local_size_name = "SLURM_STEP_TASKS_PER_NODE"
        if local_size_name in environment and node_rank is not None:
            counts = tasks_per_node(environment[local_size_name])
            local_world_size = counts[node_rank] if node_rank < len(counts) else None
        meeting_point = f"{first_host(environment['SLURM_STEP_NODELIST'])}:{_port(environment)}"
    return Claim(
        launcher=names.launcher,
        rank=_integer(environment, names.rank),
        world_size=_integer(environment, size_name),
        local_rank=(
            _integer(environment, names.local_rank) if names.local_rank in environment else None
        ),
        local_world_size=local_world_size,
        node_rank=node_rank,
        names=(
            names.rank,
            size_name,
            names.local_rank,
            local_size_name or (*names.local_world_size, "LOCAL_WORLD_SIZE")[0],
        ),
        meeting_point=meeting_point,
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_integer(environment, name) for name in names if name in environment), None)


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(
            Problem(
                name,
                environment[name],
                "not a whole number of at least 0",
                "set it by the launcher, or unset it",
            )
        )
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),3` to [4, 4, 3]. Raises ConfigError for another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
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
    """Return the first name of a Slurm node list: `gpu[007-012,020],cpu1` to `gpu007`,
    `rack[1-2]node[1-4]` to `rack1node1`.
    """
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
    """One port for all tasks of a job step, different for neighbouring jobs and steps, below the
    ephemeral range.
    """
    job = int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environment.get("SLURM_STEP_ID", "")) or 0)
    return 10_000 + (job * 7 + step) % 20_000
