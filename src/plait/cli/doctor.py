"""Command `plait doctor`: describes the environment, measures links, and checks Plait on GPUs.

Without options it prints versions, devices and communication backends. `--nccl` prints the settings
of NCCL instead. `--links` starts processes (under a launcher they exist already), times
collectives, and fits a fixed time and a time per byte to each collective. It writes these costs to
a file and prints the cheapest all-reduce algorithm. `--validate` runs checks of Plait on the GPUs
of this machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli import launch
from plait.cli.launching.launch_settings import LaunchSettings
from plait.cli.options import Json, Nproc, require_writable
from plait.cluster import accelerator
from plait.cluster.launchers import claim
from plait.cluster.topology import default_processes, place
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.comm.choose import GroupLinks

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
            help="File to write. (default: links.json, none with --json; or validation.json)"
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="--links: approximate time per group of links. (default: 4)"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="--validate: time budget. Checks that do not fit are not run. (default: 8)"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="--validate: checks to run, e.g. `waits/*`. Repeatable."),
    ] = None,
    list_rows: Annotated[
        bool,
        typer.Option(
            "--list",
            help="--validate: print the checks with their planned seconds, and run none of them.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe this environment for an issue report.

    With --links, measure how fast processes communicate. With --validate, check Plait on this
    machine's GPUs: waits, parity, throughput and memory. Exit code 1 if a check of --validate
    fails, 6 without a GPU.
    """
    if sum((links, nccl, validate)) > 1:
        raise InputError("--links, --nccl, --validate: pass only one of them")
    if validate:
        _refuse({"--seconds": seconds}, "is for the measurement of links; use --minutes")
        if list_rows:
            from plait.cli.validating.command import list_rows as table

            typer.echo(table(only=only or [], gpus=nproc_per_node))
            return
        _validate(nproc_per_node, out, minutes, only or [], as_json=as_json)
        return

    _refuse(
        {"--minutes": minutes, "--only": only, "--list": True if list_rows else None},
        "is for the validation; add --validate",
    )
    if links:
        _measure(nproc_per_node, out, seconds, as_json=as_json)
        return

    _refuse(
        {"--nproc-per-node": nproc_per_node, "--out": out, "--seconds": seconds},
        "is for the measurement of links; add --links",
    )
    if nccl:
        _show_library_settings(as_json=as_json)
    else:
        _show_environment(as_json=as_json)


def _refuse(options: dict[str, Any], rule: str) -> None:
    for name, value in options.items():
        if value is not None:
            shown = " ".join(value) if isinstance(value, list) else value
            raise InputError(f"{name} {shown}: {rule}, or leave it out")


def _validate(
    gpus: int | None, out: Path | None, minutes: float | None, only: list[str], *, as_json: bool
) -> None:
    from plait.cli.validating.command import DEFAULT_MINUTES, validate

    if minutes is not None and not 0 < minutes <= 24 * 60:
        raise InputError(
            f"--minutes {minutes}: must be more than 0 and at most {24 * 60}; use for example 8"
        )
    if claim(os.environ) is not None:
        raise InputError("--validate: starts its own processes; run it without a launcher")
    raise typer.Exit(
        validate(
            minutes=minutes or DEFAULT_MINUTES,
            only=only,
            out=out or Path("validation.json"),
            gpus=gpus,
            as_json=as_json,
        )
    )


def _measure(
    processes: int | None, out: Path | None, seconds: float | None, *, as_json: bool
) -> None:
    """Check the options of --links. Then measure in this process, or start processes that do so."""
    if seconds is not None and not 0.1 <= seconds <= 600:
        raise InputError(f"--seconds {seconds}: must be between 0.1 and 600; use for example 4")
    if processes is not None and processes < 2:
        raise InputError(
            f"--nproc-per-node {processes}: one process has no links; start two or more"
        )
    seconds = seconds or 4.0
    require_writable("--out", out)
    if claim(os.environ) is not None:
        _run_process(out or Path("links.json"), seconds, prints=not as_json)
        return
    with tempfile.TemporaryDirectory(prefix="plait-doctor-") as folder:
        file = out or Path("links.json")
        if out is None and as_json:
            # The user receives the content on standard output.
            file = Path(folder) / "links.json"
        # One process has no links.
        count = processes or max(2, default_processes())
        arguments = ["plait.cli.doctor", str(file), str(seconds)]
        if as_json:
            # Standard output has only the JSON object.
            arguments.append("--quiet")
        if code := launch.run(arguments, LaunchSettings(count)):
            raise typer.Exit(code)
        if as_json:
            typer.echo(json.dumps(json.loads(file.read_text(encoding="utf-8"))))


def _show_environment(*, as_json: bool) -> None:
    from plait.cluster.environment import facts

    environment = facts(os.environ, folder=Path.cwd())
    if as_json:
        typer.echo(json.dumps(environment, indent=1))
        return
    for section, values in environment.items():
        typer.echo(section)
        for name, value in values.items():
            typer.echo(f"  {name:<18} {value}")
        if not values:
            typer.echo("  none")


def _show_library_settings(*, as_json: bool) -> None:
    library = accelerator.library_version()
    if not as_json:
        for line in accelerator.library_report(os.environ, version=library):
            typer.echo(line)
        return
    content = {
        accelerator.BACKEND: ".".join(map(str, library)) if library else None,
        "variables": {name: os.environ.get(name) for name in accelerator.LIBRARY_VARIABLES},
    }
    typer.echo(json.dumps(content, indent=1))


def _run_process(out: Path, seconds: float, *, prints: bool) -> None:
    """Measure the links in this process. Rank 0 writes the file and prints the costs."""
    from plait.cluster.layout import Layout
    from plait.cluster.mesh import Groups, build_mesh
    from plait.comm.choose import save
    from plait.comm.measure import measure_group

    axis = "dp_replicate"
    mesh = build_mesh(Layout(dp_replicate=place().world_size), groups=Groups(levels=(axis,)))
    try:
        group = mesh.group(axis)
        if group is None:
            raise InputError("one process has no links; start two or more")
        links = measure_group(
            axis,
            group,
            mesh.levels(axis),
            machines=mesh.machines(axis),
            device=mesh.device,
            seconds=seconds,
        )
        if mesh.rank:
            return
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": mesh.device.type,
        }
        save(out, [links], facts=facts)
        if prints:
            _print_costs(links)
            typer.echo(f"\n{out} holds the costs")
    finally:
        mesh.close()


def _print_costs(links: GroupLinks) -> None:
    from plait.comm.choose import choose_all_reduce, choose_buckets
    from plait.sizes import KIB, MIB, format_bytes

    levels = {
        "all ranks": links.whole,
        "inside a machine": links.inside,
        "across machines": links.across,
    }
    for name, level in levels.items():
        if level is None:
            continue
        for operation, cost in level.costs.items():
            rate = "  any size"
            if cost.seconds_per_byte:
                rate = f"{1 / cost.seconds_per_byte / 1e9:6.2f} GB/s"
            microseconds = cost.fixed_seconds * 1e6
            typer.echo(f"{name:<17} {operation:<15} {microseconds:8.0f} us + {rate}")
    typer.echo("")
    for size in (64 * KIB, MIB, 25 * MIB):
        typer.echo(choose_all_reduce(size, links).reason)
    for size in (100 * MIB, 1000 * MIB):
        bucket = format_bytes(choose_buckets(size, links).bucket_bytes)
        typer.echo(f"for a model of {format_bytes(size)} of gradients, buckets of {bucket}")


if __name__ == "__main__":
    # A process that `doctor` has started.
    _run_process(Path(sys.argv[1]), float(sys.argv[2]), prints="--quiet" not in sys.argv[3:])
