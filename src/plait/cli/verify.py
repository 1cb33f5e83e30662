"""Command `plait verify`: checks that a layout computes what a single process computes.

The check uses a smaller version of the user's model, and little data. The command starts the
processes of the layout, computes the references in its own process, and compares. Under a launcher
(several machines), each process runs the layout and rank 0 compares. The comparison itself is in
`plait.verify`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import launch
from plait.cli.launching.launch_settings import LaunchSettings
from plait.cli.options import PROCESSES, Json, RunFile, Set, count
from plait.cluster import accelerator
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, device_count, place
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.verify.plan import Pass, VerificationPlan
    from plait.verify.report import Report
    from plait.verify.run import Traces

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DEFAULT_MAX_PROCESSES = 8
"""Largest number of processes on a machine with fewer devices and cores."""


class VerifyDtype(StrEnum):
    """Dtypes in which a layout is compared with a single process."""

    float64 = "float64"
    configured = "configured"
    both = "both"


class VerifyDevice(StrEnum):
    """Device type of the processes."""

    auto = "auto"
    cpu = "cpu"
    gpu = accelerator.NAME


_PASSES: dict[VerifyDtype, tuple[Pass, ...]] = {
    VerifyDtype.float64: ("float64",),
    VerifyDtype.configured: ("configured",),
    VerifyDtype.both: ("float64", "configured"),
}


@app.command()
def verify(
    file: RunFile,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A folder, config.json, hub name or package.module:function."
        ),
    ] = None,
    set_: Set = None,
    nproc_per_node: Annotated[
        int | None,
        count(*PROCESSES, help="Number of processes. (default: as many as FILE requires)"),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[
        VerifyDtype, typer.Option(metavar="NAME", help="float64, configured or both.")
    ] = VerifyDtype.both,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Tolerance in float64. (default: 1e-10; 1e-7 if the model rounds)"
        ),
    ] = None,
    device: Annotated[
        VerifyDevice,
        typer.Option(
            metavar="NAME", help=f"auto (GPUs if there are enough), cpu or {accelerator.NAME}."
        ),
    ] = VerifyDevice.auto,
    all_: Annotated[
        bool, typer.Option("--all", help="Print a line per tensor instead of one per block.")
    ] = False,
    as_json: Json = False,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds to wait for a process before giving up.")
    ] = 600,
) -> None:
    """Compare the layout in FILE with a single process.

    It compares the losses, the gradient norms, every gradient, and every parameter after some
    steps.

    A smaller version of the model is used. Exit code 0 if everything is equal, 3 with the first
    parameter that differs, 2 if the file cannot be run.
    """
    from plait.verify.run import compare, run_watched

    if tolerance is not None and not 0 < tolerance < math.inf:
        raise InputError(f"--tolerance {tolerance}: not a positive number; use for example 1e-10")
    if not 0 < timeout < math.inf:
        raise InputError(
            f"--timeout {timeout}: not a positive number of seconds; use for example 600"
        )
    if device is VerifyDevice.cpu:
        # It must be set before torch looks for devices.
        os.environ[accelerator.VISIBLE_DEVICES_VARIABLE] = ""
    # `--model package.module:function` is resolved in the current folder first, as by `python -m`,
    # which starts the processes.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    launched = claim(os.environ) is not None
    plan = _plan(
        file,
        list(set_ or ()),
        model=model,
        processes=nproc_per_node,
        steps=steps,
        dtype=dtype,
        device=device,
    )
    # The processes inherit the variable and see no GPU.
    if plan.device == "cpu":
        os.environ[accelerator.VISIBLE_DEVICES_VARIABLE] = ""
    compares = not launched or place().rank == 0
    if compares and not as_json:
        _print_plan(plan)
    if launched:
        traces = run_watched(plan, seconds=timeout)
    else:
        traces = _start(plan, seconds=timeout)
    if compares:
        report = compare(plan, traces, tolerance=tolerance)
        _print_report(report, everything=all_, as_json=as_json)


def _plan(
    file: Path,
    overrides: list[str],
    *,
    model: str | None,
    processes: int | None,
    steps: int,
    dtype: VerifyDtype,
    device: VerifyDevice,
) -> VerificationPlan:
    from plait.config.resolving.resolve import load
    from plait.verify.plan import prepare

    config = load(file, overrides)
    gpus = device_count()
    launched = claim(os.environ)
    if launched is not None:
        processes = launched.world_size
        # The other machines are taken to have a GPU per process as well.
        gpus = launched.world_size if gpus else 0
    return prepare(
        config,
        model=model,
        processes=processes,
        most_processes=max(gpus, cpu_count(), _DEFAULT_MAX_PROCESSES),
        steps=steps,
        passes=_PASSES[dtype],
        device=device.value,
        gpus=gpus,
    )


def _start(plan: VerificationPlan, *, seconds: float) -> Traces:
    """Start the processes and return the traces that rank 0 wrote."""
    from plait.verify.run import PLAN, TRACES

    with tempfile.TemporaryDirectory(prefix="plait-verify-") as name:
        folder = Path(name)
        # Only this command writes to the folder, so that its pickles can be trusted.
        (folder / PLAN).write_bytes(pickle.dumps(plan))
        launch_settings = LaunchSettings(plan.world_size, grace_seconds=10)
        code = launch.run(["plait.verify.run", name, str(seconds)], launch_settings)
        if code:
            # The launcher has printed the reason.
            raise typer.Exit(code)
        traces: Traces = pickle.loads((folder / TRACES).read_bytes())
    return traces


def _print_plan(plan: VerificationPlan) -> None:
    previous = ""
    for topic, line in plan.lines:
        heading = topic if topic != previous else ""
        typer.echo(f"{heading:<8}{line}")
        previous = topic


def _print_report(report: Report, *, everything: bool, as_json: bool) -> None:
    """Print the report, and raise if the layout differs from the references."""
    from plait.verify.report import lines, raise_unless_equal

    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        typer.echo("\n".join(lines(report, everything=everything)))
    raise_unless_equal(report)
    if not as_json:
        count = sum(len(section.rows) for section in report.sections)
        typer.echo(f"\nequal: {count:,} numbers and tensors of the layout are those of one process")


if __name__ == "__main__":
    app()
