"""Options for the model and the devices of a plan, which `plait plan` and `plait dryrun` share."""

from __future__ import annotations

from typing import Annotated

import typer

from plait.cli.options import NODES, count, in_panel

DEVICES = "The devices"
device_option = in_panel(DEVICES)

Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A public model, a config.json, or a folder with one."),
]
Gpu = Annotated[
    str | None,
    device_option(metavar="NAME", help="h100, a100, mi300x and others. (default: this machine's)"),
]
WorldSize = Annotated[
    int | None,
    count(
        "--world-size",
        "--gpus",
        help="Total number of GPUs. (default: this machine's)",
        panel=DEVICES,
    ),
]
Nnodes = Annotated[
    int | None, count(*NODES, help="Number of machines, instead of --world-size.", panel=DEVICES)
]
NprocPerNode = Annotated[
    int | None,
    count("--nproc-per-node", help="GPUs per machine. (default: the usual number)", panel=DEVICES),
]
MemoryGib = Annotated[
    float | None, device_option(metavar="GIB", help="Memory of a GPU. (default: the catalogue's)")
]
Network = Annotated[
    float | None,
    device_option(
        metavar="GB/S",
        help="Bandwidth per GPU to other machines; 200 Gb/s is 25. (default: the catalogue's)",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="N", help="Samples per optimizer step. (default: about 4 Mi tokens)"),
]
Seq = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens per sample. (default: the file's, or 4096)"),
]
PrecisionName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="bf16, fp16 or fp32. (default: bf16 if supported)"),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(metavar="A=B", help="A fixed value of the layout: tp=4, stage=3, pp=8."),
]
