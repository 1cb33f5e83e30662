"""The options that say what is planned for, which `plait plan` and `plait dryrun` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import MOST, NODES

DEVICES = "The devices"

Model = Annotated[str | None, typer.Option(metavar="NAME", help="A public model, a config.json, or a folder that holds one.")]
Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help="h100, a100, mi300x and others. (default: this machine's)", rich_help_panel=DEVICES)
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        "--gpus",
        min=1,
        max=MOST,
        metavar="N",
        help="Number of all GPUs. (default: this machine's)",
        rich_help_panel=DEVICES,
    ),
]
Nnodes = Annotated[
    int | None, typer.Option(*NODES, min=1, max=MOST, metavar="N", help="Machines, in place of --world-size.", rich_help_panel=DEVICES)
]
NprocPerNode = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node", min=1, max=MOST, metavar="N", help="GPUs of a machine. (default: usual for that GPU)", rich_help_panel=DEVICES
    ),
]
ClusterFile = Annotated[Path | None, typer.Option(metavar="FILE", help="A cluster file, in place of the counts.", rich_help_panel=DEVICES)]
MemoryGib = Annotated[
    float | None, typer.Option(metavar="GIB", help="Memory of a GPU. (default: the catalogue's)", rich_help_panel=DEVICES)
]
Network = Annotated[
    float | None,
    typer.Option(metavar="GB/S", help="Of a GPU to other machines: 25 is 200 Gb/s. (default: the catalogue's)", rich_help_panel=DEVICES),
]
Batch = Annotated[int | None, typer.Option(metavar="N", help="Samples of an optimizer step. (default: about 4 Mi tokens)")]
Seq = Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sample. (default: the file's, or 4096)")]
PrecisionName = Annotated[str | None, typer.Option(metavar="NAME", help="bf16, fp16 or fp32. (default: bf16 where the GPU has it)")]
Fix = Annotated[list[str] | None, typer.Option(metavar="A=B", help="A value that the layout must have: tp=4, stage=3, pp=8.")]
