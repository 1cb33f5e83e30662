"""Command `plait train`: checks the run, starts the processes, and trains.

The command itself only checks the run and starts processes. Each process runs this module again,
recognises the launcher by its variables, and trains. A process of torchrun, `plait launch` or srun
does the same. The same command resumes the run after an interruption.
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
from plait.cli.launching import launch_settings as settings
from plait.cli.launching.launch_settings import (
    LaunchSettings,
    names_machines,
    parse_nodes,
    parse_processes,
    with_variables,
)
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
    refuse_options,
)
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, default_processes, device_count, place
from plait.errors import ConfigError, InputError, PlaitError, Problem
from plait.files import user_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.config.schema.config import Config
    from plait.events import Listener
    from plait.train.session import ValidatedRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON or YAML file of the run.")],
    set_: Set = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start over. The run's folder is renamed and not deleted."),
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
    """Train the model that FILE describes on the text that FILE names.

    If the layout contains "auto" (parallel.tp, parallel.pp, zero_optimization.stage and others), it
    is planned first for the devices of this machine. The run resumes from the newest checkpoint in
    its folder, if there is one. Ctrl-C, SIGTERM and SIGUSR1 end the run after the current step with
    a checkpoint. Exit code 0 if all steps are done, 130, 143 or 138 after these signals. With
    --max-restarts, a run that fails or hangs resumes from its newest checkpoint automatically.

    On several machines, run the same command with --nnodes and --rdzv-endpoint on each of them, and
    let run.folder be a folder that all of them share.
    """
    overrides = list(set_ or ())
    meeting: dict[str, Any] = {
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
    }
    # RANK and WORLD_SIZE of Kubeflow count machines, and the command still has to start ranks.
    is_rank = claim(os.environ) is not None and not names_machines(os.environ)
    if not is_rank:
        launch_options = {
            "nnodes": nnodes,
            "nproc_per_node": nproc_per_node,
            "max_restarts": max_restarts,
            **meeting,
        }
        launch_options = with_variables(launch_options, os.environ)
        nnodes = launch_options["nnodes"]
        max_restarts = launch_options["max_restarts"]
        # The option is a number. The variable of torchrun may also be gpu, cpu or auto.
        if nproc_per_node is None:
            nproc_per_node = parse_processes(
                launch_options["nproc_per_node"], gpus=default_processes, cores=cpu_count
            )
        meeting = {name: launch_options[name] for name in meeting}
    nodes = parse_nodes(nnodes or "1")
    max_restarts = max_restarts or 0
    rendezvous_options = {f"--{name.replace('_', '-')}": value for name, value in meeting.items()}
    if fresh and (is_rank or nodes != (1, 1)):
        raise InputError(
            "--fresh: several processes cannot rename one folder; rename it yourself, or set"
            " another run.folder"
        )
    if is_rank:
        refuse_options(
            {
                "--nproc-per-node": nproc_per_node,
                "--nnodes": None if nodes == (1, 1) else nnodes,
                **rendezvous_options,
                "--max-restarts": max_restarts or None,
                "--standby": standby or None,
            },
            "this process was started by a launcher (torchrun, plait launch, srun), which sets the"
            " processes and machines",
            "leave it out",
        )
        raise typer.Exit(_run_process(file, overrides, announced=False))
    if nodes != (1, 1):
        raise typer.Exit(
            _start_node(
                file,
                overrides,
                processes=nproc_per_node,
                nodes=nodes,
                meeting={**meeting, "max_restarts": max_restarts, "standby": standby},
            )
        )
    # Kubeflow sets PET_NNODES together with an address even for a single machine.
    if os.environ.get("PET_NNODES") is None:
        refuse_options(
            rendezvous_options,
            "sets the rendezvous of several machines, but --nnodes is 1",
            "add --nnodes, or leave it out",
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


def _start_node(
    file: Path,
    overrides: list[str],
    *,
    processes: int | None,
    nodes: tuple[int, int],
    meeting: dict[str, Any],
) -> int:
    """Start the processes of one of several machines.

    The processes check the run themselves after the rendezvous, because their number may depend on
    the other machines.
    """
    from plait.cli.planning.query import refuse_auto
    from plait.config.resolving.resolve import load

    refuse_auto(file, overrides)
    config = load(file, overrides)
    minimum, maximum = nodes
    total = config.run.processes if config.run is not None else "auto"
    if processes is None and total != "auto":
        if minimum != maximum:
            raise ConfigError(
                Problem(
                    "run.processes",
                    total,
                    f"the number of machines may change ({minimum} to {maximum}), so the number of"
                    " processes changes too",
                    'use "auto", or pass --nproc-per-node',
                )
            )
        if total % maximum:
            raise ConfigError(
                Problem(
                    "run.processes",
                    total,
                    f"it is not a multiple of the {maximum} machines ({total} % {maximum} ="
                    f" {total % maximum})",
                    "set a multiple of the machines, or pass --nproc-per-node",
                )
            )
        processes = total // maximum
    launch_settings = LaunchSettings(
        processes or default_processes(), min_nodes=minimum, max_nodes=maximum, **meeting
    )
    arguments = ["plait.cli.train", "--one-of-several", str(file), *overrides]
    return launch.run(arguments, launch_settings)


def _start(
    file: Path,
    overrides: list[str],
    *,
    fresh: bool,
    processes: int | None,
    max_restarts: int,
    standby: bool,
) -> int:
    """Check the run. Then train in this process, or start the processes of this machine."""
    from plait.cli.planning.query import planned_file, process_count
    from plait.config.resolving.resolve import load

    # Options are refused before the plan and the check of the data, which can take minutes.
    settings.check(LaunchSettings(processes or 1, max_restarts=max_restarts, standby=standby))
    console = _console()
    planned = planned_file(
        file,
        overrides,
        processes=processes,
        fresh=fresh,
        say=partial(console.print, soft_wrap=True),
    )
    if planned is not None:
        # The planned file contains the overrides.
        file = planned
        overrides = []
    config = load(file, overrides)
    processes = processes or process_count(config)
    checked = _check(config, world_size=processes, console=console, fresh=fresh)
    if fresh:
        renamed = checked.folder.set_aside()
        if renamed is not None:
            console.print(f"the earlier run is now in {renamed}", soft_wrap=True)
    resume = partial(_command, file, config=config, processes=processes)
    if checked.complete:
        console.print(_completed(checked, overrides, resume), soft_wrap=True)
        return 0

    _announce(checked, console, config, processes=processes)
    # A restart needs a launcher even for a single process.
    if processes == 1 and not max_restarts:
        return _train(
            checked,
            console,
            config,
            file=file,
            command=resume(overrides),
            confirms_signals=True,
        )
    launch_settings = LaunchSettings(
        processes,
        max_restarts=max_restarts,
        standby=standby,
        stack_folder=checked.folder.path / "stacks",
    )
    return launch.run(["plait.cli.train", str(file), *overrides], launch_settings)


def _run_process(file: Path, overrides: list[str], *, announced: bool) -> int:
    """Train in one of the processes of a launcher.

    Args:
        file: The file of the run.
        overrides: Values of --set.
        announced: Whether the run was checked and described before the processes were started.

    Returns:
        The exit code.
    """
    from plait.cli.planning.query import refuse_auto
    from plait.config.resolving.resolve import load

    process = place()
    # One rank prints for all.
    console = _console(quiet=process.rank != 0)
    try:
        if not announced:
            refuse_auto(file, overrides)
        config = load(file, overrides)
        checked = _check(config, world_size=process.world_size, console=console)
    except PlaitError as error:
        # The first process of this machine reads the same files and prints the same message.
        if process.local_rank:
            return error.exit_code
        raise
    # The command of another launcher also names the processes.
    processes = process.world_size if announced else None
    resume = partial(_command, file, config=config, processes=processes)
    if checked.complete:
        console.print(_completed(checked, overrides, resume), soft_wrap=True)
        return 0
    if not announced:
        _announce(checked, console, config, processes=process.world_size)
    return _train(
        checked,
        console,
        config,
        file=file,
        command=resume(overrides),
        # The launcher prints that a signal was received.
        confirms_signals=False,
    )


def _check(
    config: Config, *, world_size: int, console: Console, fresh: bool = False
) -> ValidatedRun:
    from plait.train.session import check

    cache = Path(os.environ.get("PLAIT_CACHE") or Path.home() / ".cache" / "plait").expanduser()
    if config.data is not None and config.data.cache:
        cache = user_path(config.data.cache, "data.cache")
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
    command: str,
    confirms_signals: bool,
) -> int:
    """Run the training loop in this process.

    Args:
        checked: The run.
        console: Console for the output of this rank.
        config: Configuration from which `checked` was made.
        file: The file of the run.
        command: Command that resumes the run, for the user.
        confirms_signals: Whether to print that a signal was received.

    Returns:
        The exit code.
    """
    from plait.observe.metrics import MetricsFile
    from plait.observe.progress import ProgressLines
    from plait.train.loop import STOP_REQUESTED, StopRequest
    from plait.train.session import run

    def confirm_signal() -> None:
        # The console is not used, because a signal handler may interrupt its output.
        os.write(
            sys.stderr.fileno(),
            b"\nplait: stopping after this step; Ctrl-C again stops at once, without a"
            b" checkpoint\n",
        )

    metrics = MetricsFile(checked.folder.metrics)
    progress = ProgressLines(console, every=checked.section.log_every)
    with StopRequest(on_request=confirm_signal if confirms_signals else None) as stop:
        listeners: tuple[Listener, ...] = ()
        # Only the rank that prints writes the metrics file.
        if not console.quiet:
            listeners = (metrics, progress, *_residuals(file, checked, config, console))
        try:
            signal_number = run(checked, stop=stop, listeners=listeners)
        finally:
            progress.close()
            metrics.close()
    if signal_number:
        console.print(f"resume with: {command}", soft_wrap=True, highlight=False)
        # A callback of the user requested the end.
        if signal_number == STOP_REQUESTED:
            return 0
        return 128 + signal_number
    console.print(
        f"{checked.folder.path} holds metrics.jsonl, checkpoints and tokenizer",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def _residuals(
    file: Path, checked: ValidatedRun, config: Config, console: Console
) -> tuple[Listener, ...]:
    """Return the listener that compares the run with its plan, if `plait plan --out` wrote FILE."""
    from plait.cli.planning.query import live_cluster
    from plait.observe.residual import plan_residual

    if not file.with_suffix(".plan.json").is_file():
        return ()
    try:
        gpu = str(live_cluster().device.name)
    except PlaitError as error:
        console.print(f"plan    not compared with this run: {error}", soft_wrap=True)
        return ()
    listener = plan_residual(
        file,
        checked,
        config,
        gpu=gpu,
        per_node=place().local_world_size,
        say=partial(console.print, soft_wrap=True),
    )
    return (listener,) if listener is not None else ()


def _announce(checked: ValidatedRun, console: Console, config: Config, *, processes: int) -> None:
    from plait.observe.progress import describe_run
    from plait.train.session import run_warnings

    for note in (config.provenance.warning(), checked.resolved.assumed()):
        if note is not None:
            console.print(note, soft_wrap=True, style="yellow")
    # Cautions about cores concern the processes of this machine.
    local_processes = processes
    if claim(os.environ) is not None:
        local_processes = min(processes, place().local_world_size)
    session_warnings = run_warnings(
        checked.resolved,
        processes=local_processes,
        cores=cpu_count(),
        on_gpus=bool(device_count()),
    )
    for warning in (*session_warnings, *checked.data.warnings):
        console.print(f"warning: {warning}", soft_wrap=True, style="yellow")
    for name, text in describe_run(checked, processes=processes):
        console.print(f"{name:<8}{text}", soft_wrap=True)
    for change in checked.changes:
        console.print(f"changed since the last start: {change}", soft_wrap=True)


def _completed(
    checked: ValidatedRun, overrides: list[str], resume: Callable[[list[str]], str]
) -> str:
    """Return the message for a run that has finished all of its steps.

    Args:
        checked: The run.
        overrides: Values of --set.
        resume: Returns the command that resumes the run, given values of --set.
    """
    steps = checked.position.step
    folder = checked.folder.path
    other_overrides = [text for text in overrides if not text.startswith("run.steps=")]
    longer = resume([*other_overrides, f"run.steps={2 * steps}"])
    return (
        f"the run in {folder} is complete: {steps:,} of {checked.section.steps:,} steps are done\n"
        f"  train on:    {longer}\n  start over:  {resume(overrides)} --fresh"
    )


def _command(file: Path, overrides: list[str], *, config: Config, processes: int | None) -> str:
    """Return the command that resumes a run. It names a number of processes that is no default."""
    from plait.cli.planning.query import process_count

    command = ["plait", "train", str(file)]
    if processes is not None and processes != process_count(config):
        command += ["--nproc-per-node", str(processes)]
    for override in overrides:
        command += ["--set", override]
    return shlex.join(command)


def _console(*, quiet: bool = False) -> Console:
    return Console(quiet=quiet, highlight=False, markup=False)


if __name__ == "__main__":
    # A process that `_start` or `_start_node` has started.
    from plait.cluster.process_groups import end_process

    # The processes of several machines check and describe the run themselves.
    several_machines = sys.argv[1] == "--one-of-several"
    arguments = sys.argv[1:]
    if several_machines:
        arguments = sys.argv[2:]
    end_process(_run_process(Path(arguments[0]), arguments[1:], announced=not several_machines))
