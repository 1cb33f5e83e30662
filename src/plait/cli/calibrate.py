"""`plait calibrate`: fit the planner's constants to this machine and write them to a file.

The command starts processes (under a launcher they exist), measures rates, links and a few real
training steps, and fits. The file is what `plait plan --calibrate FILE` takes. What is measured is
in `engine.calibration`, the fit in `planner.calibrate`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import launch
from plait.cli.launching.settings import Settings
from plait.cli.options import Json, Nproc
from plait.cluster.launchers import claim
from plait.cluster.topology import default_processes, machine_name, place
from plait.observe.files import require_writable

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DISTURBED = 0.15
"""Share of the steps in which no rank computed, above which the user is warned."""

_EPILOG = """Examples:

plait calibrate --nproc-per-node 2 --out here.json

plait plan --model llama-3-8b --world-size 8 --gpu h100 --calibrate here.json

plait launch --hostfile hosts -m plait.cli.calibrate here.json 3 2"""


@app.command(epilog=_EPILOG)
def calibrate(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("calibration.json"),
    nproc_per_node: Nproc = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every layout takes its turn.")] = 3,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of a turn, after one that is not counted.")
    ] = 2,
    as_json: Json = False,
) -> None:
    """Fit the planner's constants to this machine.

    Constants that the measurements do not determine keep the shipped values of such devices. Prints
    the values with their uncertainties, and the errors before and after.
    """
    require_writable("--out", out, make_folder=True)
    arguments = [str(out), str(rounds), str(steps), *(["--quiet"] if as_json else [])]
    count = nproc_per_node or default_processes()
    if claim(os.environ) is not None or count == 1:
        _work(*arguments)
    elif code := launch.run(["plait.cli.calibrate", *arguments], Settings(count)):
        raise typer.Exit(code)
    _print_json(out, wanted=as_json and place().rank == 0)


def _print_json(out: Path, *, wanted: bool) -> None:
    if wanted:
        typer.echo(out.read_text(encoding="utf-8").rstrip())


def _work(out: str, rounds: str, steps: str, quiet: str = "") -> None:
    """What each process runs; the first one fits, writes and prints."""
    from plait.cli.planning.calibrations import (
        live_cluster,
        print_calibration,
        print_rates,
        progress,
    )
    from plait.engine.calibration import Pace, calibration_request, measure, measurements
    from plait.planner.calibrate import calibrate
    from plait.planner.calibration_file import Origin, save
    from plait.planner.calibration_runs import believed
    from plait.planner.constants import knowledge
    from plait.planner.measured import runs_of

    here = place()
    cluster = live_cluster()
    request = calibration_request(cluster)
    pace = Pace(rounds=int(rounds), steps=int(steps))
    machine = machine_name(here.local_world_size)
    with progress(measurements(request, pace), shown=here.rank == 0) as done:
        measured = measure(request, machine=machine, pace=pace, done=done)
    if here.rank:
        return
    known = believed(
        knowledge(),
        cluster.device,
        measured.rates,
        processes=cluster.devices,
        precision=request.precision,
    )
    runs = runs_of(measured.runs)
    found = calibrate(runs, known=known)
    is_cpu = cluster.device.name == "cpu"
    facts = {
        "at": measured.runs[0].at,
        "devices": cluster.devices,
        "runs": len(measured.runs),
        "rates": asdict(measured.rates),
    }
    save(Path(out), found, Origin(str(cluster.device.name), machine if is_cpu else "", facts))
    if not quiet:
        print_rates(measured.rates)
        print_calibration(found, runs, known=known)
    if measured.waiting > _DISTURBED:
        taken = f"other programs took up to {measured.waiting:.0%} of the steps' time"
        print(
            f"\nplait: {taken}: the constants are of a disturbed machine; calibrate again when it"
            " is quiet",
            file=sys.stderr,
        )
    if not quiet:
        print(f"\n{out} holds the constants: plait plan ... --calibrate {out}")


if __name__ == "__main__":  # a process that `calibrate` has started
    from plait.cluster.ending import end_process

    _work(*sys.argv[1:])
    end_process(0)
