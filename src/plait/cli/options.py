"""Options that several verbs have, under one name and with one meaning: torchrun's for processes and machines.

`--nproc-per-node` counts the processes of one machine, `--nnodes` machines, `--world-size` all processes or devices. Every option is also
taken with underscores, as torchrun and DeepSpeed write them (see `cli.main`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from plait.errors import Problem, refuse

MOST = 2**20
"""Processes or machines: more than anybody has."""

PROCESSES = ("--nproc-per-node", "--num-gpus")
"""DeepSpeed's launcher has the second name."""
NODES = ("--nnodes", "--num-nodes")
MEETING = "Several machines"
"""The panel of a verb's help."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a value of the file; may be repeated.")]
Nproc = Annotated[int | None, typer.Option(*PROCESSES, min=1, max=MOST, metavar="N", help="Processes here. (default: one a GPU, else two)")]
Nnodes = Annotated[int, typer.Option(*NODES, min=1, max=MOST, metavar="N", help="Machines with the same number of devices.")]
NodesOfRun = Annotated[
    int, typer.Option(*NODES, min=1, max=MOST, metavar="N", help="Machines; the same command runs on each.", rich_help_panel=MEETING)
]
NodeRank = Annotated[int | None, typer.Option(metavar="N", help="Which of them this is; with --master-addr.", rich_help_panel=MEETING)]
MasterAddr = Annotated[str | None, typer.Option(metavar="HOST", help="The machine with rank 0.", rich_help_panel=MEETING)]
MasterPort = Annotated[int | None, typer.Option(metavar="PORT", help="A free port there. (default: 29500)", rich_help_panel=MEETING)]
RdzvEndpoint = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where machines meet; the same on all.", rich_help_panel=MEETING)
]
RdzvId = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, where several meet.", rich_help_panel=MEETING)]
WorldSize = Annotated[int | None, typer.Option("--world-size", min=1, max=MOST, metavar="N", help="Processes of all machines.")]


def refuse_given(options: Mapping[str, object], rule: str, remedy: str) -> None:
    """Raise ConfigError for every option that has a value."""
    refuse(Problem(name, value, rule, remedy) for name, value in options.items() if value is not None)
