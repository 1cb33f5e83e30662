"""`plait train FILE`: check everything, start the processes, train; the same command goes on after
an interruption.

The command that a person types only checks and starts. Each process it starts runs this module
again, finds a launcher around it, and trains; so does one that torchrun, `plait launch` or srun
started.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli import launch
from plait.cli.launching import settings
from plait.cli.launching.settings import Settings, parse_nodes, parse_processes
from plait.cli.launching.torchruns_variables import names_machines, with_variables
from plait.cli.options import (
    MasterAddr,
    MasterPort,
    MaxRestarts,
    NodeRank,
    NodesOfRun,
    Nproc,
    RdzvEndpoint,
    RdzvId,
    Set,
    Standby,
    refuse_given,
)
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, default_processes, device_count, place
from plait.errors import ConfigError, InputError, PlaitError, Problem
from plait.files import user_path

if TYPE_CHECKING:
    from plait.config.schema.config import Config
    from plait.events import Listener
    from plait.train.session import ValidatedRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The JSON or YAML file that describes the run.")
    ],
    set_: Set = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start over. What is in the run's folder is renamed, not deleted."
        ),
    ] = False,
    nproc_per_node: Nproc = None,
    nnodes: NodesOfRun = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = None,
    standby: Standby = False,
) -> None:
    """Train the model in FILE on the text in FILE.

    Where the layout has "auto" (parallel.tp, parallel.pp, zero_optimization.stage and others), it
    is planned first, for the devices of this machine. Resumes from the newest checkpoint in the
    run's folder, if there is one. Ctrl-C, SIGTERM and SIGUSR1 end the run after the current step
    with a checkpoint. Exit code 0 when all steps are done, 130, 143 or 138 after these signals.
    With --max-restarts a run that failed, or hung, goes on from its newest checkpoint by itself.

    On several machines the same command, with --nnodes and --rdzv-endpoint, runs on each of them;
    run.folder is one that all of them see.
    """
    overrides = list(set_ or ())
    meeting: dict[str, Any] = {
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
    }
    is_rank = claim(os.environ) is not None and not names_machines(os.environ)
    if not is_rank:
        every = {
            "nnodes": nnodes,
            "nproc_per_node": nproc_per_node,
            "max_restarts": max_restarts,
            **meeting,
        }
        found = with_variables(every, os.environ)
        nnodes = found["nnodes"]
        max_restarts = found["max_restarts"]
        if nproc_per_node is None:
            nproc_per_node = parse_processes(
                found["nproc_per_node"], gpus=default_processes, cores=cpu_count
            )
        meeting = {name: found[name] for name in meeting}
    nodes = parse_nodes(nnodes or "1")
    max_restarts = max_restarts or 0
    restarts = {"--max-restarts": max_restarts or None, "--standby": standby or None}
    options = {f"--{name.replace('_', '-')}": value for name, value in meeting.items()}
    if is_rank:
        if fresh:
            raise InputError(
                "--fresh: several processes cannot rename one folder; rename it yourself, or set"
                " another run.folder"
            )
        rule = (
            "this process was started by a launcher (torchrun, plait launch, srun), which sets the"
            " processes and machines"
        )
        refuse_given(
            {
                "--nproc-per-node": nproc_per_node,
                "--nnodes": None if nodes == (1, 1) else nnodes,
                **options,
                **restarts,
            },
            rule,
            "leave it out",
        )
        raise typer.Exit(_work(file, overrides, announced=False))
    if nodes != (1, 1):
        if fresh:
            raise InputError(
                "--fresh: several machines cannot rename one folder; rename it yourself, or set"
                " another run.folder"
            )
        raise typer.Exit(
            _start_one_of(
                file,
                overrides,
                processes=nproc_per_node,
                nodes=nodes,
                meeting={**meeting, "max_restarts": max_restarts, "standby": standby},
            )
        )
    if os.environ.get("PET_NNODES") is None:  # which come with an address for a single machine too
        refuse_given(
            options, "sets where machines meet, and --nnodes is 1", "add --nnodes, or leave it out"
        )
    raise typer.Exit(
        _start(
            file,
            overrides,
            fresh=fresh,
            processes=nproc_per_node,
            max_restarts=max_restarts,
            standby=standby,
        )
    )


def _start_one_of(
    file: Path,
    overrides: list[str],
    *,
    processes: int | None,
    nodes: tuple[int, int],
    meeting: dict[str, Any],
) -> int:
    """On each of several machines: the launcher here, whose processes check the file themselves
    when they have met.
    """
    from plait.cli.planning.automatic import refuse_auto
    from plait.config.resolving.resolve import load

    refuse_auto(file, overrides)
    config = load(file, overrides)
    wanted, (minimum, maximum) = config.run.processes if config.run is not None else "auto", nodes
    if processes is None and wanted != "auto":
        if minimum != maximum:
            rule = (
                f"the number of machines changes ({minimum} to {maximum}), and with it that of the"
                " processes"
            )
            raise ConfigError(
                Problem("run.processes", wanted, rule, 'use "auto", or give --nproc-per-node')
            )
        if wanted % maximum:
            rule = (
                f"they do not divide over {maximum} machines ({wanted} % {maximum} ="
                f" {wanted % maximum})"
            )
            raise ConfigError(
                Problem(
                    "run.processes",
                    wanted,
                    rule,
                    "set a multiple of the machines, or give --nproc-per-node",
                )
            )
        processes = wanted // maximum
    asked = Settings(
        processes or default_processes(), min_nodes=minimum, max_nodes=maximum, **meeting
    )
    return launch.run(["plait.cli.train", "--one-of-several", str(file), *overrides], asked)


def _start(
    file: Path,
    overrides: list[str],
    *,
    fresh: bool,
    processes: int | None,
    max_restarts: int,
    standby: bool,
) -> int:
    """What a person runs: nothing is started before everything was checked."""
    from plait.cli.launching.count import processes_of
    from plait.cli.planning.automatic import planned_file
    from plait.config.resolving.resolve import load

    settings.check(Settings(processes or 1, max_restarts=max_restarts, standby=standby))
    console = _console()
    planned = planned_file(
        file,
        overrides,
        processes=processes,
        fresh=fresh,
        say=partial(console.print, soft_wrap=True),
    )
    if planned is not None:
        file = planned
        overrides = []
    config = load(file, overrides)
    processes = processes or processes_of(config)
    checked = _check(config, world_size=processes, console=console, fresh=fresh)
    aside = checked.folder.set_aside() if fresh else None
    if aside is not None:
        console.print(f"the earlier run is now in {aside}", soft_wrap=True)
    if checked.complete:
        console.print(_completed(checked, file, overrides), soft_wrap=True)
        return 0
    _announce(checked, console, config, processes=processes)
    if processes == 1 and not max_restarts:
        return _train(
            checked, console, config, file=file, again=_command(file, overrides), patient=True
        )
    asked = Settings(
        processes,
        max_restarts=max_restarts,
        standby=standby,
        stack_folder=checked.folder.path / "stacks",
    )
    return launch.run(["plait.cli.train", str(file), *overrides], asked)


def _work(file: Path, overrides: list[str], *, announced: bool) -> int:
    """What each process of a launcher runs. announced: the user has been told about the run before
    it was started.
    """
    from plait.cli.planning.automatic import refuse_auto
    from plait.config.resolving.resolve import load

    here = place()
    console = _console(quiet=here.rank != 0)
    try:
        if not announced:
            refuse_auto(file, overrides)
        config = load(file, overrides)
        checked = _check(config, world_size=here.world_size, console=console)
    except PlaitError as error:
        # the first process of this machine reads the same files and says the same
        if here.local_rank:
            return error.exit_code
        raise
    if checked.complete:
        console.print(_completed(checked, file, overrides), soft_wrap=True)
        return 0
    if not announced:
        _announce(checked, console, config, processes=here.world_size)
    return _train(
        checked, console, config, file=file, again=_command(file, overrides), patient=False
    )


def _check(
    config: Config, *, world_size: int, console: Console, fresh: bool = False
) -> ValidatedRun:
    from plait.cli.planning.calibrations import default_cache
    from plait.train.session import check

    given = config.data.cache if config.data is not None else None
    cache = user_path(given, "data.cache") if given else default_cache()
    return check(
        config,
        world_size=world_size,
        cache=cache,
        fresh=fresh,
        say=lambda text: console.print(f"{text} ...", soft_wrap=True),
    )


def _train(
    checked: ValidatedRun,
    console: Console,
    config: Config,
    *,
    file: Path,
    again: str,
    patient: bool,
) -> int:
    """The loop on this process. patient: nobody else tells the user that the signal was heard."""
    from plait.observe.metrics import MetricsFile
    from plait.observe.progress import ProgressLines
    from plait.train.session import run
    from plait.train.stop import ASKED, StopRequest

    def heard() -> None:
        # Not through the console: a signal handler may run in the middle of its own output.
        os.write(
            sys.stderr.fileno(),
            b"\nplait: stopping after this step; Ctrl-C again stops at once, without a"
            b" checkpoint\n",
        )

    metrics = MetricsFile(checked.folder.metrics)
    progress = ProgressLines(console, every=checked.section.log_every)
    with StopRequest(on_request=heard if patient else None) as stop:
        try:
            signal_number = run(
                checked,
                stop=stop,
                listeners=(
                    ()
                    if console.quiet
                    else (metrics, progress, *_residuals(file, checked, config, console))
                ),
            )
        finally:
            progress.close()
            metrics.close()
    if signal_number:
        console.print(f"go on with: {again}", soft_wrap=True, highlight=False)
        return 0 if signal_number == ASKED else 128 + signal_number
    console.print(
        f"{checked.folder.path} holds metrics.jsonl, checkpoints and tokenizer",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def _residuals(
    file: Path, checked: ValidatedRun, config: Config, console: Console
) -> tuple[Listener, ...]:
    """Compares the run with its plan, where `plait plan --out` wrote the file."""
    from plait.cli.planning.calibrations import live_cluster
    from plait.observe.residual import plan_residual

    if not file.with_suffix(".plan.json").is_file():
        return ()
    try:
        gpu = str(live_cluster().device.name)
    except PlaitError as error:
        console.print(f"plan    not compared with this run: {error}", soft_wrap=True)
        return ()
    local = place().local_world_size
    say = partial(console.print, soft_wrap=True)
    found = plan_residual(file, checked, config, gpu=gpu, per_node=local, say=say)
    return (found,) if found is not None else ()


def _announce(checked: ValidatedRun, console: Console, config: Config, *, processes: int) -> None:
    from plait.observe.progress import describe_run
    from plait.train.cautions import cautions

    for note in (config.provenance.warning(), checked.resolved.assumed()):
        if note is not None:
            console.print(note, soft_wrap=True, style="yellow")
    here = min(processes, place().local_world_size) if claim(os.environ) is not None else processes
    settings = cautions(
        checked.resolved, processes=here, cores=cpu_count(), on_gpus=bool(device_count())
    )
    for caution in (*settings, *checked.data.cautions):
        console.print(f"warning: {caution}", soft_wrap=True, style="yellow")
    for name, text in describe_run(checked, processes=processes):
        console.print(f"{name:<8}{text}", soft_wrap=True)
    for change in checked.changes:
        console.print(f"changed since the last start: {change}", soft_wrap=True)


def _completed(checked: ValidatedRun, file: Path, overrides: list[str]) -> str:
    steps = checked.position.step
    folder = checked.folder.path
    more = _command(
        file, [*(o for o in overrides if not o.startswith("run.steps=")), f"run.steps={2 * steps}"]
    )
    return (
        f"the run in {folder} is complete: {steps:,} of {checked.section.steps:,} steps are done\n"
        f"  train on:    {more}\n  start over:  {_command(file, overrides)} --fresh"
    )


def _command(file: Path, overrides: list[str]) -> str:
    return shlex.join(
        [
            "plait",
            "train",
            str(file),
            *(argument for override in overrides for argument in ("--set", override)),
        ]
    )


def _console(*, quiet: bool = False) -> Console:
    return Console(quiet=quiet, highlight=False, markup=False)


if __name__ == "__main__":  # a process that `_start` has started
    from plait.cluster.ending import end_process

    alone = sys.argv[1] != "--one-of-several"  # else nobody has told the user of the run yet
    given = sys.argv[1 if alone else 2 :]
    end_process(_work(Path(given[0]), given[1:], announced=alone))
