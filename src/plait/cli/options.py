"""Options that several verbs have, under one name and with one meaning: torchrun's for processes
and machines, and `--adapter`.

`--nproc-per-node` counts the processes of one machine, `--nnodes` machines, `--world-size` all
processes or devices. Every option is also taken with underscores, as torchrun and DeepSpeed write
them (see `cli.main`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.errors import InputError, Problem, refuse

MOST = 2**20
"""Processes or machines: more than anybody has."""

PROCESSES = ("--nproc-per-node", "--num-gpus")
"""DeepSpeed's launcher has the second name."""
NODES = ("--nnodes", "--num-nodes")
MEETING = "Several machines"
"""The panel of a verb's help."""


Adapters = Annotated[
    list[Path] | None, typer.Option(metavar="FOLDER", help="LoRA of PEFT, on the model.")
]
"""`--adapter` of the verbs that run a model."""


def count(*names: str, help: str, panel: str | None = None) -> Any:
    """An option that is a number of processes, devices or machines."""
    return typer.Option(*names, min=1, max=MOST, metavar="N", help=help, rich_help_panel=panel)


def in_panel(panel: str) -> Callable[..., Any]:
    """`typer.Option` for a panel of a verb's help."""
    return partial(typer.Option, rich_help_panel=panel)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a value of the file; may be repeated."),
]
Nproc = Annotated[
    int | None, count(*PROCESSES, help="Processes here. (default: one a GPU, else two)")
]
Nnodes = Annotated[int, count(*NODES, help="Machines with the same number of devices.")]
meeting = in_panel(MEETING)
NodesOfRun = Annotated[
    str | None, meeting(*NODES, metavar="N", help="Machines, N or MIN:MAX; run it on each.")
]
NodeRank = Annotated[
    int | None, meeting(metavar="N", help="Which of them this is; with --master-addr.")
]
MasterAddr = Annotated[str | None, meeting(metavar="HOST", help="The machine with rank 0.")]
MasterPort = Annotated[
    int | None, meeting(metavar="PORT", help="A free port there. (default: 29500)")
]
RdzvEndpoint = Annotated[
    str | None, meeting(metavar="HOST:PORT", help="Where machines meet; the same on all.")
]
RdzvId = Annotated[str | None, meeting(metavar="NAME", help="Name of the job, where several meet.")]

MaxRestarts = Annotated[
    int | None,
    typer.Option("--max-restarts", metavar="N", help="Times to go on from the newest checkpoint."),
]
Standby = Annotated[
    bool, typer.Option("--standby", help="Keep processes that have imported all for a restart.")
]


def refuse_given(options: Mapping[str, object], rule: str, remedy: str) -> None:
    """Raise ConfigError for every option that has a value."""
    refuse(
        Problem(name, value, rule, remedy) for name, value in options.items() if value is not None
    )


def one_adapter(given: list[Path] | None) -> Path | None:
    """Raises InputError for several."""
    if given and len(given) > 1:
        raise InputError(
            f"--adapter: {len(given)} were given, and one may be; make one of them with PEFT"
            " (add_weighted_adapter), or merge one"
        )
    return given[0] if given else None
