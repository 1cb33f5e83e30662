"""The options that say what is planned for, which `plait plan` and `plait dryrun` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import NODES, count, in_panel

DEVICES = "The devices"
of_devices = in_panel(DEVICES)

Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A public model, a config.json, or a folder that holds one."),
]
Gpu = Annotated[
    str | None,
    of_devices(metavar="NAME", help="h100, a100, mi300x and others. (default: this machine's)"),
]
WorldSize = Annotated[
    int | None,
    count(
        "--world-size",
        "--gpus",
        help="Number of all GPUs. (default: this machine's)",
        panel=DEVICES,
    ),
]
Nnodes = Annotated[
    int | None, count(*NODES, help="Machines, in place of --world-size.", panel=DEVICES)
]
NprocPerNode = Annotated[
    int | None,
    count(
        "--nproc-per-node", help="GPUs of a machine. (default: usual for that GPU)", panel=DEVICES
    ),
]
ClusterFile = Annotated[
    Path | None, of_devices(metavar="FILE", help="A cluster file, in place of the counts.")
]
MemoryGib = Annotated[
    float | None, of_devices(metavar="GIB", help="Memory of a GPU. (default: the catalogue's)")
]
Network = Annotated[
    float | None,
    of_devices(
        metavar="GB/S",
        help="Of a GPU to other machines: 25 is 200 Gb/s. (default: the catalogue's)",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="N", help="Samples of an optimizer step. (default: about 4 Mi tokens)"),
]
Seq = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens of a sample. (default: the file's, or 4096)")
]
PrecisionName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="bf16, fp16 or fp32. (default: bf16 where the GPU has it)"),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(metavar="A=B", help="A value that the layout must have: tp=4, stage=3, pp=8."),
]
