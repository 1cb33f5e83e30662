"""`plait doctor`: what this environment has: versions, devices, what processes can talk through.
`--links`: how fast the processes of this machine, or of a launcher's machines, talk to each other,
and what that means. `--nccl`: NCCL's settings. `--validate`: checks of Plait on this machine's
GPUs.

`--links` starts the processes (under a launcher they exist), times collectives, fits a fixed time
and a time per byte to each, writes them to a file and prints the cheapest all-reduce algorithm.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli import launch
from plait.cli.launching.settings import Settings
from plait.cli.options import Json, Nproc
from plait.cluster import accelerator
from plait.cluster.launchers import claim
from plait.cluster.topology import default_processes, place
from plait.errors import InputError
from plait.observe.files import require_writable

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    links: Annotated[
        bool, typer.Option("--links", help="Measure the links between processes.")
    ] = False,
    nccl: Annotated[
        bool, typer.Option("--nccl", help="Show the variables of NCCL that decide its algorithms.")
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Check Plait on this machine's GPUs.")
    ] = False,
    nproc_per_node: Nproc = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. (default: links.json, none with --json; validation.json)"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="--links: about how long each group of links is measured. (default: 4)"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="--validate: time budget; rows that do not fit are not run. (default: 8)"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="--validate: rows to run, e.g. `waits/*`; may be repeated."
        ),
    ] = None,
    list_rows: Annotated[
        bool,
        typer.Option(
            "--list", help="--validate: print the rows with their planned seconds, and run nothing."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe this environment (for an issue report); with --links measure how fast its processes
    talk to each other; with --validate check Plait on its GPUs: waits, parity, throughput, memory.
    Exit code 1 where a row of --validate failed, 6 without a GPU.
    """
    if sum((links, nccl, validate)) > 1:
        raise InputError("--links, --nccl, --validate: one of them at a time")
    if not validate:
        listed = True if list_rows else None
        options = {"--minutes": minutes, "--only": only, "--list": listed}
        _refuse(options, "is for the validation; add --validate")
    if validate:
        _refuse({"--seconds": seconds}, "is for the measurement of links; use --minutes")
        if list_rows:
            from plait.cli.validating.command import list_rows as table

            typer.echo(table(only=only or [], gpus=nproc_per_node))
            return
        _validate(nproc_per_node, out, minutes, only or [], as_json=as_json)
        return
    if not links:
        others = {"--nproc-per-node": nproc_per_node, "--out": out, "--seconds": seconds}
        _refuse(others, "is for the measurement of links; add --links")
        (_show_library if nccl else _show_environment)(as_json=as_json)
        return
    if seconds is not None and not 0.1 <= seconds <= 600:
        raise InputError(f"--seconds {seconds}: not between 0.1 and 600")
    if nproc_per_node is not None and nproc_per_node < 2:
        raise InputError(
            f"--nproc-per-node {nproc_per_node}: one process has no links; start two or more"
        )
    _measure(nproc_per_node, out, seconds or 4.0, as_json=as_json)


def _refuse(given: dict[str, Any], rule: str) -> None:
    for name, value in given.items():
        if value is not None:
            shown = " ".join(value) if isinstance(value, list) else value
            raise InputError(f"{name} {shown}: {rule}, or leave it out")


def _validate(
    gpus: int | None, out: Path | None, minutes: float | None, only: list[str], *, as_json: bool
) -> None:
    from plait.cli.validating.command import DEFAULT_MINUTES, validate

    if minutes is not None and not 0 < minutes <= 24 * 60:
        raise InputError(f"--minutes {minutes}: not more than 0 and at most {24 * 60}")
    if claim(os.environ) is not None:
        raise InputError(
            "--validate: starts its own processes; run it by itself, not under a launcher"
        )
    raise typer.Exit(
        validate(
            minutes=minutes or DEFAULT_MINUTES,
            only=only,
            out=out or Path("validation.json"),
            gpus=gpus,
            as_json=as_json,
        )
    )


def _measure(processes: int | None, out: Path | None, seconds: float, *, as_json: bool) -> None:
    require_writable("--out", out)
    if claim(os.environ) is not None:
        _work(out or Path("links.json"), seconds, said=not as_json)
        return
    with tempfile.TemporaryDirectory(prefix="plait-doctor-") as folder:
        file = out or (Path(folder) / "links.json" if as_json else Path("links.json"))
        count = processes or max(2, default_processes())
        words = ["plait.cli.doctor", str(file), str(seconds), *(["--quiet"] if as_json else [])]
        if code := launch.run(words, Settings(count)):
            raise typer.Exit(code)
        if as_json:
            typer.echo(json.dumps(json.loads(file.read_text(encoding="utf-8"))))


def _show_environment(*, as_json: bool) -> None:
    from plait.cluster.environment import facts

    found = facts(os.environ, folder=Path.cwd())
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for section, values in found.items():
        typer.echo(section)
        for name, value in values.items():
            typer.echo(f"  {name:<18} {value}")
        if not values:
            typer.echo("  none")


def _show_library(*, as_json: bool) -> None:
    from plait.cluster.nccl import VARIABLES, report, version

    found = version()
    if as_json:
        said = {name: os.environ.get(name) for name in VARIABLES}
        typer.echo(
            json.dumps(
                {
                    accelerator.BACKEND: ".".join(map(str, found)) if found else None,
                    "variables": said,
                },
                indent=1,
            )
        )
        return
    for line in report(os.environ, version=found):
        typer.echo(line)


def _work(out: Path, seconds: float, *, said: bool) -> None:
    """What each process runs; the first one writes and, if it is to be said, prints."""
    from plait.cluster.layout import Layout
    from plait.cluster.mesh import Groups, build_mesh
    from plait.comm.choose import choose_all_reduce, choose_buckets
    from plait.comm.links import save
    from plait.comm.measure import measure_group
    from plait.units import KIB, MIB, format_bytes

    axis = "dp_replicate"
    mesh = build_mesh(Layout(dp_replicate=place().world_size), groups=Groups(levels=(axis,)))
    try:
        group = mesh.group(axis)
        if group is None:
            raise InputError("one process has no links; start two or more")
        found = measure_group(
            axis,
            group,
            mesh.levels(axis),
            machines=mesh.machines(axis),
            device=mesh.device,
            seconds=seconds,
        )
        if mesh.rank:
            return
        save(
            out,
            [found],
            facts={
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": mesh.device.type,
            },
        )
        if not said:
            return
        for name, level in (
            ("all ranks", found.whole),
            ("inside a machine", found.inside),
            ("across machines", found.across),
        ):
            for operation, cost in level.costs.items() if level is not None else ():
                rate = (
                    f"{1 / cost.seconds_per_byte / 1e9:6.2f} GB/s"
                    if cost.seconds_per_byte
                    else "  any size"
                )
                typer.echo(
                    f"{name:<17} {operation:<15} {cost.fixed_seconds * 1e6:8.0f} us + {rate}"
                )
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
    _work(Path(sys.argv[1]), float(sys.argv[2]), said="--quiet" not in sys.argv[3:])
