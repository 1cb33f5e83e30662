"""Command `plait launch`: runs a script on every device of one or several machines.

The command uses the elastic launcher of torchrun. The script does not have to use Plait, and a
script that uses Plait also runs under plain `torchrun`. Other commands of Plait start their
processes with the function `run`. torch is imported only when ranks are started on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.launching import remote
from plait.cli.launching.launch_settings import (
    DEFAULT_GRACE_SECONDS,
    DEFAULT_PORT,
    DEFAULT_TIMEOUT_SECONDS,
    MEETING_OPTIONS,
    LaunchSettings,
    check,
    common_problems,
    parse_nodes,
    parse_processes,
    with_variables,
)
from plait.cli.options import (
    NODES,
    PROCESSES,
    MasterAddr,
    MasterPort,
    NodeRank,
    RdzvEndpoint,
    RdzvId,
    in_panel,
    machines_option,
    refuse_options,
)
from plait.cluster.launchers import claim
from plait.cluster.machines import HostfileEntry, read_hostfile, select_hosts
from plait.cluster.topology import cpu_count, default_processes
from plait.errors import ConfigError, InputError, Problem, raise_problems, warn
from plait.files import is_file, require_folder
from plait.names import number_of

app = typer.Typer(add_completion=False)

_machine_option = in_panel("One machine")


# Everything after the script belongs to the script, even if it looks like an option of Plait.
@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...", help="The script or module, and its arguments."
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, as `python -m` does.")
    ] = False,
    nproc_per_node: Annotated[
        str | None,
        _machine_option(
            *PROCESSES, metavar="N", help="Processes per machine: a number, gpu, cpu or auto."
        ),
    ] = None,
    standalone: Annotated[
        bool,
        _machine_option(
            "--standalone", help="Use only this machine, the default without --nnodes."
        ),
    ] = False,
    log_dir: Annotated[
        Path | None,
        _machine_option(metavar="FOLDER", help="Also write the output of each rank to files."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        _machine_option(metavar="N", help="Largest number of restarts of all ranks. (default: 0)"),
    ] = None,
    standby: Annotated[
        bool,
        _machine_option("--standby", help="Keep processes ready for a restart."),
    ] = False,
    grace: Annotated[
        float, _machine_option(metavar="S", help="Seconds to shut down after a signal.")
    ] = DEFAULT_GRACE_SECONDS,
    nnodes: Annotated[
        str | None, machines_option(*NODES, metavar="N", help="Number of machines: N, or MIN:MAX.")
    ] = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    rdzv_backend: Annotated[
        str | None,
        machines_option(metavar="NAME", help="c10d or static. (default: from other options)"),
    ] = None,
    timeout: Annotated[
        float, machines_option(metavar="S", help="Seconds to wait for machines.")
    ] = DEFAULT_TIMEOUT_SECONDS,
    hostfile: Annotated[
        Path | None,
        machines_option(
            "-H",
            "--hostfile",
            metavar="FILE",
            help="DeepSpeed hostfile; starts machines by ssh.",
        ),
    ] = None,
    include: Annotated[
        str,
        machines_option(
            "-i", "--include", metavar="A", help="Use only these hosts or slots: `a@b:0,2`."
        ),
    ] = "",
    exclude: Annotated[
        str,
        machines_option(
            "-e", "--exclude", metavar="A", help="Do not use these hosts or slots: `a@b:0,2`."
        ),
    ] = "",
    ssh: Annotated[
        bool,
        machines_option("--ssh/--no-ssh", help="--no-ssh: start only the ranks of this machine."),
    ] = True,
    export: Annotated[
        list[str] | None,
        machines_option(metavar="NAME", help="Variable to pass to other machines by ssh."),
    ] = None,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True)] = False,
) -> None:
    """Run a script on every device of one or several machines.

    Sets the environment variables that torchrun sets. If a rank fails, the command prints the
    rank's traceback, stops the other ranks and exits with the rank's exit code. Ctrl-C and SIGTERM
    reach every rank once; a second signal stops all ranks immediately.
    """
    command = _command(script or [], module)
    on_this_machine = hostfile is None and _names_localhost(include or exclude)
    # --standalone and a hostfile define the machines, so that variables of torchrun do not count.
    options: dict[str, Any] = {
        "nnodes": nnodes,
        "nproc_per_node": nproc_per_node,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
        "rdzv_backend": rdzv_backend,
        "max_restarts": max_restarts,
    }
    if not standalone and hostfile is None and not on_this_machine:
        options = with_variables(options, os.environ)
    max_restarts = options["max_restarts"] or 0
    if log_dir is not None:
        require_folder(log_dir, "--log-dir")
    minimum, maximum = parse_nodes(options["nnodes"] or "1")
    nproc = parse_processes(options["nproc_per_node"], gpus=default_processes, cores=cpu_count)
    _refuse_contradictions(
        {**options, "hostfile": hostfile}, standalone=standalone, several=maximum > 1
    )
    if hostfile is None and not on_this_machine:
        hostfile_options = {
            "--include": (include, "name localhost"),
            "--exclude": (exclude, "name localhost"),
            "--export": (export, "leave it out"),
            "--no-ssh": (not ssh, "leave it out"),
        }
        rule = "is for the machines of a hostfile, and there is none"
        raise_problems(
            Problem(name, None, rule, f"add --hostfile, or {remedy}")
            for name, (value, remedy) in hostfile_options.items()
            if value
        )
        settings = LaunchSettings(
            # 0 must not become the default: `check` refuses it.
            processes=default_processes() if nproc is None else nproc,
            log_folder=log_dir,
            min_nodes=minimum,
            max_nodes=maximum,
            **{name: options[name] for name in MEETING_OPTIONS},
            max_restarts=max_restarts,
            standby=standby,
            grace_seconds=grace,
            timeout_seconds=timeout,
        )
        _warn_of_nested_launchers(settings)
        raise typer.Exit(_start(command, settings, follow_stdin=lifeline))

    rule = "given together with --hostfile, which defines the machines and their ranks"
    if on_this_machine:
        rule = (
            "given together with --include or --exclude of localhost, which uses only this machine"
        )
    refuse_options(
        {
            "--nnodes": options["nnodes"],
            "--node-rank": options["node_rank"],
            "--rdzv-endpoint": options["rdzv_endpoint"],
            "--rdzv-id": options["rdzv_id"],
            "--log-dir": log_dir,
            "--max-restarts": max_restarts or None,
            "--standby": standby or None,
        },
        rule,
        "leave one of them out",
    )
    # Refused before machines are started over ssh.
    raise_problems(common_problems(grace=grace, timeout=timeout, port=options["master_port"]))
    hosts: tuple[HostfileEntry, ...]
    if hostfile is None:
        hosts = (HostfileEntry("localhost", tuple(range(default_processes()))),)
    else:
        hosts = read_hostfile(hostfile)
    hosts = select_hosts(hosts, include=include, exclude=exclude)
    remote_launch = remote.RemoteLaunch(
        hosts=hosts,
        command=tuple(command),
        master_addr=remote.master_address(hosts, options["master_addr"]),
        master_port=options["master_port"] or DEFAULT_PORT,
        processes=nproc,
        grace_seconds=grace,
        timeout_seconds=timeout,
        exported=remote.exported_variables(os.environ, export or []),
    )
    raise typer.Exit(_start_hosts(remote_launch, ssh=ssh))


def _warn_of_nested_launchers(settings: LaunchSettings) -> None:
    """Warn if another launcher has started several instances of `plait launch`.

    Each instance would train with a separate world of ranks.
    """
    try:
        outer = claim(os.environ)
    except ConfigError:
        # Malformed variables of another launcher do not matter to this one.
        return
    if outer is None:
        return
    # srun may start one task per machine, each of which runs this launcher.
    starts_several = outer.launcher == "srun" and (outer.local_world_size or 1) > 1
    if starts_several or (settings.single_node and outer.world_size > 1):
        warn(
            f"plait launch is itself process {outer.rank} of {outer.world_size} of {outer.launcher}"
            f" ({outer.names[0]}, {outer.names[1]}), and each of them starts"
            f" {number_of(settings.processes, 'process')}: start it once per machine, with --nnodes"
            f" and --rdzv-endpoint, or let {outer.launcher} start the script without plait launch"
        )


def run(module: Sequence[str], settings: LaunchSettings) -> int:
    """Run a module on the ranks of this machine, as `python -m` does.

    Args:
        module: Name of the module, and its arguments.
        settings: Settings of the launch.

    Returns:
        0 if all ranks succeed, else the exit code of the rank that failed first. If signal N ended
        the launch, 128 + N, or 137 if ranks did not end within the grace period and were killed.
        Failures have been printed to standard error.

    Raises:
        ConfigError: The settings cannot work.
    """
    return _start(["-m", *module], settings)


def _start(
    command: Sequence[str],
    settings: LaunchSettings,
    *,
    environment: Mapping[str, str] | None = None,
    follow_stdin: bool = False,
) -> int:
    # Wrong settings are refused before torch is imported.
    check(settings)
    from plait.cli.launching import agent

    return agent.launch(command, settings, environment=environment, follow_stdin=follow_stdin)


def _start_hosts(remote_launch: remote.RemoteLaunch, *, ssh: bool) -> int:
    """Start the ranks on all machines of a hostfile by ssh, or only here with --no-ssh."""
    hosts = remote_launch.hosts
    local_index = remote.local_index(hosts)
    if ssh and (len(hosts) > 1 or local_index is None):
        return remote.run(remote_launch)
    if local_index is None:
        names = ", ".join(host.name for host in hosts[:8])
        raise ConfigError(
            Problem(
                "--no-ssh",
                None,
                f"the hostfile lists {names}, but not this machine",
                "run the command on a machine of the hostfile, or leave --no-ssh out",
            )
        )
    settings = LaunchSettings(
        processes=remote_launch.processes or len(hosts[local_index].slots),
        min_nodes=len(hosts),
        max_nodes=len(hosts),
        grace_seconds=remote_launch.grace_seconds,
        timeout_seconds=remote_launch.timeout_seconds,
    )
    # A single machine meets no other.
    if len(hosts) > 1:
        settings = replace(
            settings,
            node_rank=local_index,
            master_addr=remote_launch.master_addr,
            master_port=remote_launch.master_port,
        )
    return _start(
        remote_launch.command,
        settings,
        environment=remote.node_environment(remote_launch, local_index),
    )


def _command(arguments: Sequence[str], module: bool) -> list[str]:
    """Return the command that each rank runs. Raise InputError if the script does not exist."""
    if not arguments or not arguments[0]:
        kind = "script"
        example = "script.py"
        if module:
            kind = "module"
            example = "-m module"
        raise InputError(
            f"no {kind} to launch; write `plait launch {example}` and its arguments after it"
        )
    if module:
        return ["-m", *arguments]
    if not is_file(arguments[0]):
        raise InputError(
            f"{arguments[0]}: no such script; name a Python file, or use -m for a module"
        )
    return list(arguments)


def _names_localhost(device_filter: str) -> bool:
    """Return True if a filter names only localhost. DeepSpeed then needs no hostfile."""
    if not device_filter:
        return False
    hosts = {host.strip().partition(":")[0] for host in device_filter.split("@")}
    return hosts == {"localhost"}


def _refuse_contradictions(
    options: Mapping[str, object], *, standalone: bool, several: bool
) -> None:
    """Raise ConfigError for torchrun options that contradict each other.

    Args:
        options: Values by name, with underscores.
        standalone: Whether --standalone is used.
        several: Whether the launch has several machines.
    """
    several_machines = ("nnodes", "rdzv_endpoint", "master_addr", "hostfile")
    problems = []
    for name in several_machines:
        if standalone and options[name] is not None and str(options[name]) != "1":
            problems.append(
                Problem(
                    f"--{name.replace('_', '-')}",
                    options[name],
                    "given together with --standalone, which uses only this machine",
                    "leave one of them out",
                )
            )
    backend = options["rdzv_backend"]
    backends = ("c10d", "static")
    if backend is not None and backend not in backends:
        problems.append(
            Problem(
                "--rdzv-backend",
                backend,
                f"the rendezvous backend must be {' or '.join(backends)}",
                "leave it (or PET_RDZV_BACKEND) out",
            )
        )
    elif backend is not None and several:
        problems += _backend_problems(backend, options)
    raise_problems(problems)


def _backend_problems(backend: object, options: Mapping[str, object]) -> list[Problem]:
    """Return the problems of a rendezvous backend with missing or wrong address options."""
    by_endpoint = options["rdzv_endpoint"] is not None
    by_address = options["master_addr"] is not None
    required, other = "--rdzv-endpoint HOST:PORT", "--master-addr and --node-rank"
    has_required, has_other = by_endpoint, by_address
    if backend == "static":
        required, other = "--master-addr HOST and --node-rank N", "--rdzv-endpoint"
        has_required, has_other = by_address, by_endpoint
    if has_required and not (has_other and backend == "static"):
        return []
    remedy = f"pass {required}"
    if has_other:
        remedy += f" instead of {other}, or leave --rdzv-backend out"
    return [Problem("--rdzv-backend", backend, f"this backend requires {required}", remedy)]
