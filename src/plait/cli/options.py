"""Options that several commands share.

The options for processes and machines are those of torchrun: `--nproc-per-node` is the number of
processes of one machine, `--nnodes` that of machines, and `--world-size` that of all processes or
devices. Every option can also be written with underscores, as in torchrun and DeepSpeed (see
`cli.main`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.errors import InputError, Problem, raise_problems
from plait.files import not_writable

_MAX_COUNT = 2**20
"""Largest number of processes or machines that an option accepts."""

PROCESSES = ("--nproc-per-node", "--num-gpus")
"""Names of the option for processes per machine. DeepSpeed's launcher has the second one."""
NODES = ("--nnodes", "--num-nodes")
"""Names of the option for machines. DeepSpeed's launcher has the second one."""
_MACHINES_PANEL = "Several machines"


class WeightDtype(StrEnum):
    """Dtype of the weights of a model that a command loads."""

    stored = "stored"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    def torch_dtype(self) -> Any:
        """Return the dtype of torch, or None for the stored dtype."""
        # torch is not imported for options, so that `--help` is quick.
        import torch

        if self is WeightDtype.stored:
            return None
        return getattr(torch, self.value)


Adapters = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="LoRA adapter of PEFT to apply to the model."),
]
"""Option `--adapter` of the commands that run a model."""


def count(*names: str, help: str, panel: str | None = None) -> Any:
    """Return an option for a number of processes, devices or machines."""
    return typer.Option(
        *names, min=1, max=_MAX_COUNT, metavar="N", help=help, rich_help_panel=panel
    )


def in_panel(panel: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that a command's help shows in a panel."""
    return partial(typer.Option, rich_help_panel=panel)


RunFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The JSON or YAML file of the run, or a DeepSpeed file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a value of the file. Repeatable."),
]
Nproc = Annotated[
    int | None,
    count(*PROCESSES, help="Processes on this machine. (default: one per GPU, else two)"),
]
Nnodes = Annotated[int, count(*NODES, help="Machines, each with the same number of devices.")]
machines_option = in_panel(_MACHINES_PANEL)
NodesOfRun = Annotated[
    str | None,
    machines_option(*NODES, metavar="N", help="Machines, N or MIN:MAX. Run the command on each."),
]
NodeRank = Annotated[
    int | None, machines_option(metavar="N", help="Number of this machine, with --master-addr.")
]
MasterAddr = Annotated[str | None, machines_option(metavar="HOST", help="Machine with rank 0.")]
MasterPort = Annotated[
    int | None, machines_option(metavar="PORT", help="Free port on that machine. (default: 29500)")
]
RdzvEndpoint = Annotated[
    str | None,
    machines_option(metavar="HOST:PORT", help="Rendezvous endpoint, the same on all machines."),
]
RdzvId = Annotated[
    str | None,
    machines_option(metavar="NAME", help="Name of the job at the rendezvous endpoint."),
]

MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts", metavar="N", help="Restarts from the newest checkpoint. (default: 0)"
    ),
]
Standby = Annotated[
    bool,
    typer.Option("--standby", help="Keep processes ready for a restart."),
]


def refuse_options(options: Mapping[str, object], rule: str, remedy: str) -> None:
    """Raise ConfigError for every option that has a value.

    Args:
        options: Values by option. None means an option that was not used.
        rule: Reason why the options cannot be used.
        remedy: What the user can do.
    """
    raise_problems(
        Problem(name, value, rule, remedy) for name, value in options.items() if value is not None
    )


def parse_budget(text: str | None, name: str) -> int | None:
    """Return the bytes of a budget such as `2GiB`, or None if the option is not used."""
    from plait.sizes import parse_bytes

    if text is None:
        return None
    return parse_bytes(text, name)


def require_writable(option: str, path: Path | None, *, make_folder: bool = False) -> None:
    """Check that a file can be written before a command starts long-running work.

    Args:
        option: Name of the option, for the message.
        path: The file. None if the option was not used.
        make_folder: Whether to create the folder of the file. The check leaves nothing else behind.

    Raises:
        InputError: The file cannot be written.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise InputError(f"{option} {path}: is a folder; pass the name of a file in it")
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise InputError(
                f"{option} {path}: {path.parent} is not a folder; create it first, or pass a file"
                " in an existing folder"
            )
        existed = path.exists()
        # Opening creates the file, which must not remain if the command fails later.
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise not_writable(f"{option} {path}", error) from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file.

    Raises:
        InputError: The file cannot be written. The message names the option.
    """
    existed = path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if not existed:
            # A part of a new file would be refused as an existing one when the user tries again.
            path.unlink(missing_ok=True)
        raise not_writable(f"{option} {path}", error) from None


def single_adapter(adapters: list[Path] | None) -> Path | None:
    """Return the only adapter, or None.

    Raises:
        InputError: There is more than one.
    """
    if not adapters:
        return None
    if len(adapters) > 1:
        raise InputError(
            f"--adapter: {len(adapters)} were given, but at most one is supported; combine them"
            " with PEFT (add_weighted_adapter), or merge one into the model"
        )
    return adapters[0]


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
PlannedNnodes = Annotated[
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
    typer.Option(metavar="A=B", help="Fix a value of the layout, such as tp=4, stage=3 or pp=8."),
]
