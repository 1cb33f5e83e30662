"""Command `plait calibrate`: fits the planner's constants to this machine and writes a file.

The command starts processes (under a launcher they exist already). It measures the rates of the
devices and links, times a few training steps, and fits the constants to these measurements. `plait
plan --calibrate FILE` reads the file. The measurements are in `engine.calibration`, and the fit is
in `planner.calibrate`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import launch
from plait.cli.launching.launch_settings import LaunchSettings
from plait.cli.options import Json, Nproc, require_writable
from plait.cluster.launchers import claim
from plait.cluster.topology import default_processes, machine_name, place

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MAX_WAITING_SHARE = 0.15
"""Share of the time of the steps in which no rank computed, above which the user is warned."""

_EPILOG = """Examples:

plait calibrate --nproc-per-node 2 --out here.json

plait plan --model llama-3-8b --world-size 8 --gpu h100 --calibrate here.json

plait launch --hostfile hosts -m plait.cli.calibrate here.json 3 2"""


@app.command(epilog=_EPILOG)
def calibrate(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("calibration.json"),
    nproc_per_node: Nproc = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of runs of every layout.")] = 3,
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps per run, after a warm-up step.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Fit the constants of the planner's cost model to this machine.

    Constants that the measurements do not determine keep their default values. Prints the values
    with their uncertainties, and the prediction errors before and after the fit.
    """
    require_writable("--out", out, make_folder=True)
    arguments = [str(out), str(rounds), str(steps)]
    if as_json:
        arguments.append("--quiet")
    count = nproc_per_node or default_processes()
    # Under a launcher, this process is one of those that measure. One process needs no launcher.
    if claim(os.environ) is not None or count == 1:
        _run_process(*arguments)
    elif code := launch.run(["plait.cli.calibrate", *arguments], LaunchSettings(count)):
        raise typer.Exit(code)
    if as_json and place().rank == 0:
        typer.echo(out.read_text(encoding="utf-8").rstrip())


def _run_process(out: str, rounds: str, steps: str, quiet: str = "") -> None:
    """Take measurements in this process. Rank 0 then fits, writes and prints the constants."""
    from plait.cli.planning.query import live_cluster
    from plait.cli.planning.show import print_calibration, print_rates, progress
    from plait.engine.calibration import Pace, calibration_request, measure, measurements
    from plait.planner.calibrate import (
        CalibrationOrigin,
        calibrate,
        priors_from_rates,
        runs_of,
        save_calibration,
    )
    from plait.planner.constants import fitted_priors

    process = place()
    cluster = live_cluster()
    request = calibration_request(cluster)
    pace = Pace(rounds=int(rounds), steps=int(steps))
    machine = machine_name(process.local_world_size)
    with progress(measurements(request, pace), shown=process.rank == 0) as done:
        measured = measure(request, machine=machine, pace=pace, done=done)
    if process.rank:
        return

    priors = priors_from_rates(
        fitted_priors(),
        cluster.device,
        measured.rates,
        processes=cluster.devices,
        precision=request.precision,
    )
    runs = runs_of(measured.runs)
    calibration = calibrate(runs, priors=priors)
    # Two CPU machines differ, while GPUs of one name are alike.
    origin_machine = machine if cluster.device.name == "cpu" else ""
    facts = {
        "at": measured.runs[0].at,
        "devices": cluster.devices,
        "runs": len(measured.runs),
        "rates": asdict(measured.rates),
    }
    save_calibration(
        Path(out), calibration, CalibrationOrigin(str(cluster.device.name), origin_machine, facts)
    )
    if not quiet:
        print_rates(measured.rates)
        print_calibration(calibration, runs, priors=priors)
    if measured.waiting > _MAX_WAITING_SHARE:
        print(
            f"\nplait: other programs took up to {measured.waiting:.0%} of the steps' time, so the"
            " constants are those of a disturbed machine; calibrate again when it is idle",
            file=sys.stderr,
        )
    if not quiet:
        print(f"\n{out} holds the constants: plait plan ... --calibrate {out}")


if __name__ == "__main__":
    # A process that `calibrate` has started.
    from plait.cluster.process_groups import end_process

    _run_process(*sys.argv[1:])
    end_process(0)
