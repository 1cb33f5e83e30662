"""`plait launch script.py ...`: the script on every device of one or several machines, on
torchrun's own elastic launcher.

The script needs nothing of Plait, and one that uses Plait also runs under plain `torchrun`. `run`
is the same for Plait's other verbs. torch is imported when ranks are started here, not to read
options or to start other machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.launching import remote
from plait.cli.launching.settings import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_PORT,
    DEFAULT_TIMEOUT_SECONDS,
    Settings,
    check,
    checked_alike,
    parse_nodes,
    parse_processes,
)
from plait.cli.launching.torchruns_variables import with_variables
from plait.cli.options import (
    NODES,
    PROCESSES,
    MasterAddr,
    MasterPort,
    NodeRank,
    RdzvEndpoint,
    RdzvId,
    in_panel,
    meeting,
    refuse_given,
)
from plait.cluster import hostfile as hostfiles
from plait.cluster.launchers import claim
from plait.cluster.topology import cpu_count, default_processes
from plait.errors import ConfigError, InputError, Problem, refuse, warn
from plait.files import require_folder

app = typer.Typer(add_completion=False)

_one = in_panel("One machine")


# What stands after the script is the script's, whatever it looks like.
@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...", help="The script (or module), then what it gets."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, as `python -m` does.")
    ] = False,
    nproc_per_node: Annotated[
        str | None, _one(*PROCESSES, metavar="N", help="Processes here; or gpu, cpu, auto.")
    ] = None,
    standalone: Annotated[
        bool, _one("--standalone", help="This machine alone, as without --nnodes.")
    ] = False,
    log_dir: Annotated[
        Path | None, _one(metavar="FOLDER", help="Keep what each rank prints in files there, too.")
    ] = None,
    max_restarts: Annotated[
        int | None, _one(metavar="N", help="Times that all ranks start again. (default: 0)")
    ] = None,
    standby: Annotated[
        bool, _one("--standby", help="Keep processes that have imported all for it.")
    ] = False,
    grace: Annotated[
        float, _one(metavar="S", help="Seconds to end in after Ctrl-C or SIGTERM.")
    ] = DEFAULT_GRACE_SECONDS,
    nnodes: Annotated[
        str | None, meeting(*NODES, metavar="N", help="Machines: N, or MIN:MAX.")
    ] = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_backend: Annotated[
        str | None, meeting(metavar="NAME", help="torchrun's; follows from the others.")
    ] = None,
    timeout: Annotated[
        float, meeting(metavar="S", help="Seconds to wait for the others.")
    ] = DEFAULT_TIMEOUT_SECONDS,
    hostfile: Annotated[
        Path | None,
        meeting(
            "-H", "--hostfile", metavar="FILE", help="DeepSpeed's; machines are started by ssh."
        ),
    ] = None,
    include: Annotated[
        str, meeting("-i", "--include", metavar="A", help="Of it only these: `a@b:0,2`.")
    ] = "",
    exclude: Annotated[
        str, meeting("-e", "--exclude", metavar="A", help="Of it not these: `a@b:0,2`.")
    ] = "",
    ssh: Annotated[
        bool, meeting("--ssh/--no-ssh", help="--no-ssh: run this on every machine.")
    ] = True,
    export: Annotated[
        list[str] | None, meeting(metavar="NAME", help="A variable for machines started by ssh.")
    ] = None,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True)] = False,
) -> None:
    """Run a script on every device of one or several machines.

    Sets torchrun's variables. When a rank fails, prints its traceback, stops the others and returns
    its exit code. Ctrl-C and SIGTERM reach every rank once; a second signal stops all ranks
    immediately.
    """
    command = _command(script or [], module)
    on_this_machine = hostfile is None and _names_localhost(include or exclude)
    if not standalone and hostfile is None and not on_this_machine:
        options = with_variables(
            {
                "nnodes": nnodes,
                "nproc_per_node": nproc_per_node,
                "node_rank": node_rank,
                "master_addr": master_addr,
                "master_port": master_port,
                "rdzv_endpoint": rdzv_endpoint,
                "rdzv_id": rdzv_id,
                "rdzv_backend": rdzv_backend,
                "max_restarts": max_restarts,
            },
            os.environ,
        )
        nnodes = options["nnodes"]
        nproc_per_node = options["nproc_per_node"]
        node_rank = options["node_rank"]
        master_addr = options["master_addr"]
        master_port = options["master_port"]
        rdzv_endpoint = options["rdzv_endpoint"]
        rdzv_id = options["rdzv_id"]
        rdzv_backend = options["rdzv_backend"]
        max_restarts = options["max_restarts"]
    max_restarts = max_restarts or 0
    if log_dir is not None:
        require_folder(log_dir, "--log-dir")
    minimum, maximum = parse_nodes(nnodes or "1")
    nproc = parse_processes(nproc_per_node, gpus=default_processes, cores=cpu_count)
    _refuse_contradictions(
        (
            {
                "--nnodes": nnodes,
                "--rdzv-endpoint": rdzv_endpoint,
                "--master-addr": master_addr,
                "--hostfile": hostfile,
            }
            if standalone
            else {}
        ),
        rdzv_backend,
        elastic=rdzv_endpoint is not None,
        several=maximum > 1,
    )
    if hostfile is None and not on_this_machine:
        rule = "chooses among the machines of a hostfile, and there is none"
        choosing = {
            "--include": include,
            "--exclude": exclude,
            "--export": export,
            "--no-ssh": not ssh,
        }
        refuse(
            Problem(name, None, rule, "add --hostfile, or name localhost")
            for name, value in choosing.items()
            if value
        )
        settings = Settings(
            processes=default_processes() if nproc is None else nproc,
            log_folder=log_dir,
            min_nodes=minimum,
            max_nodes=maximum,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            max_restarts=max_restarts,
            standby=standby,
            grace_seconds=grace,
            timeout_seconds=timeout,
        )
        _warn_of_other_worlds(settings)
        raise typer.Exit(_start(command, settings, follow_stdin=lifeline))
    given = {
        "--nnodes": nnodes,
        "--node-rank": node_rank,
        "--rdzv-endpoint": rdzv_endpoint,
        "--rdzv-id": rdzv_id,
        "--log-dir": log_dir,
    }
    rule = "given together with --hostfile, which defines the machines and their ranks"
    if on_this_machine:
        rule = (
            "given together with --include or --exclude of localhost, which is this machine alone"
        )
    refuse_given(
        {**given, "--max-restarts": max_restarts or None, "--standby": standby or None},
        rule,
        "leave one of them out",
    )
    refuse(checked_alike(grace=grace, timeout=timeout, port=master_port))
    here = (hostfiles.Host("localhost", tuple(range(default_processes()))),)
    hosts = hostfiles.select(
        here if hostfile is None else hostfiles.read(hostfile), include=include, exclude=exclude
    )
    there = remote.Remote(
        hosts=hosts,
        command=tuple(command),
        master_addr=remote.master(hosts, master_addr),
        master_port=DEFAULT_PORT if master_port is None else master_port,
        processes=nproc,
        grace_seconds=grace,
        timeout_seconds=timeout,
        exported=remote.exported(os.environ, export or []),
    )
    raise typer.Exit(_start_hosts(there, ssh=ssh))


def _warn_of_other_worlds(settings: Settings) -> None:
    """Warn if another launcher has started this one several times.

    Each of the starts would train in a separate world.
    """
    try:
        outer = claim(os.environ)
    except ConfigError:  # malformed variables of a launcher, which do not matter here
        return
    if outer is None:
        return
    several_here = outer.launcher == "srun" and (outer.local_world_size or 1) > 1
    if several_here or (settings.single_node and outer.world_size > 1):
        warn(
            f"plait launch is itself process {outer.rank} of {outer.world_size} of {outer.launcher}"
            f" ({outer.names[0]}, {outer.names[1]}), and each of them starts {settings.processes}"
            " processes of its own: start it once per machine, with --nnodes and --rdzv-endpoint,"
            f" or let {outer.launcher} start the script without plait launch"
        )


def run(module: Sequence[str], settings: Settings) -> int:
    """Run a module with its arguments on the ranks of this machine, as `python -m` does.

    Returns 0; the exit code of the rank that failed first (a PlaitError's own); 128 + N when signal
    N ended the launch and every rank ended well in its grace; 137 when ranks outlived it and were
    killed. Failures have been told on standard error. Raises ConfigError for settings that cannot
    work.
    """
    return _start(["-m", *module], settings)


def _start(
    command: Sequence[str],
    settings: Settings,
    *,
    environment: Mapping[str, str] | None = None,
    follow_stdin: bool = False,
) -> int:
    check(settings)
    from plait.cli.launching import agent

    return agent.launch(command, settings, environment=environment, follow_stdin=follow_stdin)


def _start_hosts(there: remote.Remote, *, ssh: bool) -> int:
    """Over ssh from here, or as one machine of the hostfile."""
    here = remote.local_index(there.hosts)
    if ssh and (len(there.hosts) > 1 or here is None):
        return remote.run(there)
    if here is None:
        known = ", ".join(host.name for host in there.hosts[:8])
        raise ConfigError(
            Problem(
                "--no-ssh",
                None,
                f"this machine is none of the hostfile's: {known}",
                "run it there, or leave --no-ssh out",
            )
        )
    alone = len(there.hosts) == 1
    settings = Settings(
        processes=there.processes or len(there.hosts[here].slots),
        min_nodes=len(there.hosts),
        max_nodes=len(there.hosts),
        node_rank=None if alone else here,
        master_addr=None if alone else there.master_addr,
        master_port=None if alone else there.master_port,
        grace_seconds=there.grace_seconds,
        timeout_seconds=there.timeout_seconds,
    )
    return _start(there.command, settings, environment=remote.node_environment(there, here))


def _command(arguments: Sequence[str], module: bool) -> list[str]:
    """What the ranks run. A missing script is refused here, before any process starts."""
    if not arguments or not arguments[0]:
        what = "module" if module else "script"
        raise InputError(
            f"no {what} to launch; write `plait launch {'-m module' if module else 'script.py'}`"
            " and its arguments after it"
        )
    if not module and not _is_file(arguments[0]):
        raise InputError(
            f"{arguments[0]}: no such script; name a Python file, or use -m for a module"
        )
    return ["-m", *arguments] if module else list(arguments)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _names_localhost(filtered: str) -> bool:
    """Return whether a filter of devices is of this machine, which DeepSpeed takes without a
    hostfile.
    """
    return bool(filtered) and {part.strip().partition(":")[0] for part in filtered.split("@")} == {
        "localhost"
    }


def _refuse_contradictions(
    beside_standalone: Mapping[str, object], backend: str | None, *, elastic: bool, several: bool
) -> None:
    """Options of torchrun that duplicate others must have the same value."""
    problems = [
        Problem(
            name,
            value,
            "given together with --standalone, which is this machine alone",
            "leave one of them out",
        )
        for name, value in beside_standalone.items()
        if value is not None and str(value) != "1"
    ]
    known = ("c10d", "static")
    if backend is not None and backend not in known:
        problems.append(
            Problem(
                "--rdzv-backend", backend, f"machines meet by {' or '.join(known)}", "leave it out"
            )
        )
    elif backend is not None and several and elastic != (backend == "c10d"):
        wanted = "--rdzv-endpoint" if backend == "c10d" else "--master-addr and --node-rank"
        problems.append(
            Problem(
                "--rdzv-backend",
                backend,
                f"machines meet so by {wanted}",
                f"give {wanted}, or leave --rdzv-backend out",
            )
        )
    refuse(problems)
