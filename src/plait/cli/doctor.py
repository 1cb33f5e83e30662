"""`plait doctor`: what this machine can do. `--links`: how fast the processes of this machine, or of a launcher's machines, talk to each
other, and what that means. `--nccl`: what NCCL was told.

The first starts the processes (under a launcher they exist), times collectives, fits a fixed time and a time per byte to each, writes them
to a file and says which way of summing gradients is the cheapest.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from plait.cluster.launchers import claim
from plait.errors import InputError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    links: Annotated[bool, typer.Option("--links", help="Measure the links between processes.")] = False,
    nccl: Annotated[bool, typer.Option("--nccl", help="Show the variables of NCCL that decide its algorithms.")] = False,
    processes: Annotated[int | None, typer.Option(min=2, help="How many to start. [default: one a GPU; without GPUs two]")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("links.json"),
    seconds: Annotated[float, typer.Option(help="About how long each level of links is measured.")] = 4.0,
) -> None:
    """Measure what this machine can do."""
    from plait.cli import launch
    from plait.cluster.topology import default_processes

    if nccl:
        _show_nccl()
    if not links and not nccl:
        raise InputError("nothing to look at: say --links to measure the links between processes, --nccl for what NCCL was told")
    if not links:
        return
    if not 0.1 <= seconds <= 600:
        raise InputError(f"--seconds {seconds}: not between 0.1 and 600")
    if claim(os.environ) is not None:
        _work(out, seconds)
        return
    code = launch.run(["-m", "plait.cli.doctor", str(out), str(seconds)], processes=processes or max(2, default_processes()))
    if code:
        raise typer.Exit(code)


def _show_nccl() -> None:
    import torch

    from plait.cluster.nccl import report

    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    for line in report(os.environ, version=version):
        typer.echo(line)


def _work(out: Path, seconds: float) -> None:
    """What each process runs; the first one writes and prints."""
    from plait.cluster.layout import Layout
    from plait.cluster.mesh import build_mesh
    from plait.cluster.topology import place
    from plait.comm.choose import choose_all_reduce, choose_buckets
    from plait.comm.links import save
    from plait.comm.measure import measure_group
    from plait.units import KIB, MIB, format_bytes

    mesh = build_mesh(Layout(dp_replicate=place().world_size))
    try:
        axis = "dp_replicate"
        group = mesh.group(axis)
        if group is None:
            raise InputError("one process has no links; start two or more")
        found = measure_group(axis, group, mesh.levels(axis), machines=mesh.machines(axis), device=mesh.device, seconds=seconds)
        if mesh.rank:
            return
        save(out, [found], facts={"at": datetime.now(UTC).isoformat(timespec="seconds"), "device": mesh.device.type})
        for name, level in (("all ranks", found.whole), ("inside a machine", found.inside), ("across machines", found.across)):
            for operation, cost in level.costs.items() if level is not None else ():
                rate = f"{1 / cost.seconds_per_byte / 1e9:6.2f} GB/s" if cost.seconds_per_byte else "  any size"
                typer.echo(f"{name:<17} {operation:<15} {cost.fixed_seconds * 1e6:8.0f} us + {rate}")
        typer.echo("")
        for size in (64 * KIB, MIB, 25 * MIB):
            choice = choose_all_reduce(size, found)
            typer.echo(choice.reason)
        for size in (100 * MIB, 1000 * MIB):
            bucket = format_bytes(choose_buckets(size, found).bucket_bytes)
            typer.echo(f"for a model of {format_bytes(size)} of gradients, buckets of {bucket}")
        typer.echo(f"\n{out} holds the costs")
    finally:
        mesh.close()


if __name__ == "__main__":  # a process that `doctor` has started
    _work(Path(sys.argv[1]), float(sys.argv[2]))
