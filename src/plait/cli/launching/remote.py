"""Launcher of the machines of a hostfile, over ssh.

Every machine runs its own `plait launch --node-rank ...` in the same folder with the same Python.
On this machine it is a child process. On the other machines it is started through `ssh` with the
user's keys and `~/.ssh/config`. The output of all machines is printed line by line with the name
of the machine. If the launch fails on one machine, it is ended on the others. If this process dies,
its lifelines close and the launchers end themselves.

Note [Lifeline]
    The launcher of a machine reads lines from its standard input. `SIGINT 300` means: act as after
    SIGINT, and give the ranks 300 seconds. The end of the input means that the connection or the
    launcher at its other end is gone. The ranks are then ended as by SIGTERM, so that no machine
    continues without the others. This works through `ssh` without a terminal.
"""

from __future__ import annotations

import io
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from plait.cli.launching.launch_settings import DEFAULT_PORT
from plait.cli.terminal import on_signals
from plait.cluster import accelerator
from plait.cluster.machines import HostfileEntry
from plait.errors import ConfigError, Problem
from plait.names import number_of

EXPORTED_PREFIXES = (*accelerator.PREFIXES, "GLOO_", "TORCH_", "UCX_")
EXPORTED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
STOP_SECONDS = 30
"""Time for the ranks of other machines to end after a machine failed.

It is short, because they cannot continue.
"""
_EXIT_MARGIN_SECONDS = 15
"""Time for the launchers themselves to end after their ranks."""
SSH_FAILED = 255
"""Exit code of ssh if there was no connection, or if it was lost."""


@dataclass(frozen=True)
class RemoteLaunch:
    """Settings of a launch on the machines of a hostfile."""

    hosts: tuple[HostfileEntry, ...]
    command: tuple[str, ...]
    master_addr: str
    master_port: int = DEFAULT_PORT
    processes: int | None = None
    """Number of processes per machine. None for one per slot of the hostfile."""
    grace_seconds: float = 300
    timeout_seconds: float = 900
    exported: Mapping[str, str] | None = None
    """Variables of the environment that all machines get."""
    python: str = sys.executable
    """Path of the interpreter on all machines."""
    folder: str = ""
    """Folder in which the command runs. The default is the current folder."""


def local_index(hosts: Sequence[HostfileEntry]) -> int | None:
    """Return the index of this machine in the hostfile, or None if it is not listed.

    The machine is identified by its name, or else by one of its addresses.
    """
    hostname = socket.gethostname()
    names = {hostname, hostname.split(".")[0], socket.getfqdn()}
    for index, host in enumerate(hosts):
        if host.address in names:
            return index
    for index, host in enumerate(hosts):
        if _is_local_address(host.address):
            return index
    return None


def _is_local_address(name: str) -> bool:
    # Only an address of this machine can be bound.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def master_address(hosts: Sequence[HostfileEntry], address: str | None) -> str:
    """Return the rendezvous address: `address`, or that of the first host.

    Raises:
        ConfigError: The other machines cannot reach the address.
    """
    option = "--master-addr" if address else "--hostfile"
    address = address or hosts[0].address
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    if len(hosts) > 1 and is_loopback:
        raise ConfigError(
            Problem(
                option,
                address,
                f"the other {number_of(len(hosts) - 1, 'machine')} cannot reach the first machine"
                " under that name",
                "pass a name or an address that the other machines can reach",
            )
        )
    return address


def exported_variables(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that are passed to every machine.

    They are `names`, the variables of the communication libraries, and Python's path. The values
    are part of the ssh command line, which all users of the machines can see.

    Raises:
        ConfigError: One of `names` is not set.
    """
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(
            *(
                Problem(
                    "--export",
                    name,
                    "is not set in this environment",
                    "set it, or leave the option out",
                )
                for name in missing
            )
        )
    all_names = {*EXPORTED_NAMES, *names}
    variables: dict[str, str] = {}
    for name, value in environment.items():
        if name in all_names or name.startswith(EXPORTED_PREFIXES):
            variables[name] = value
    return variables


def node_command(launch: RemoteLaunch, index: int) -> list[str]:
    """Return the command of the launcher on machine `index`."""
    options: list[str] = []
    if len(launch.hosts) > 1:
        options += ["--nnodes", str(len(launch.hosts)), "--node-rank", str(index)]
        options += ["--master-addr", launch.master_addr, "--master-port", str(launch.master_port)]
    options += ["--nproc-per-node", str(launch.processes or len(launch.hosts[index].slots))]
    options += ["--grace", f"{launch.grace_seconds:g}", "--timeout", f"{launch.timeout_seconds:g}"]
    return [launch.python, "-m", "plait", "launch", *options, "--lifeline", *launch.command]


def node_environment(launch: RemoteLaunch, index: int) -> dict[str, str]:
    """Return the environment variables for machine `index`.

    They are the exported variables. If the hostfile selects other GPUs than the first ones of the
    machine, the variable that lists the visible GPUs is added.
    """
    environment = dict(launch.exported or {})
    slots = launch.hosts[index].slots
    if slots != tuple(range(len(slots))):
        environment[accelerator.VISIBLE_DEVICES_VARIABLE] = ",".join(map(str, slots))
    return environment


def ssh_command(launch: RemoteLaunch, index: int) -> list[str]:
    """Return the command that runs `node_command` through ssh."""
    environment = sorted(node_environment(launch, index).items())
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment]
    folder = shlex.quote(launch.folder or os.getcwd())
    command = shlex.join(node_command(launch, index))
    script = f"cd {folder} && exec env {' '.join([*assignments, command])}"
    # BatchMode asks for no password, because standard input is the lifeline.
    return ["ssh", "-o", "BatchMode=yes", "-T", launch.hosts[index].name, script]


class _NodeLauncher:
    """Launcher of one machine, as a child process of this process."""

    def __init__(
        self, launch: RemoteLaunch, index: int, *, local: bool, ended: queue.SimpleQueue[int]
    ) -> None:
        """Start the launcher.

        Args:
            launch: The launch.
            index: Index of the machine.
            local: Whether this is the machine of this process.
            ended: Receives the index when the launcher has ended.
        """
        self.name = launch.hosts[index].name
        self.local = local
        if local:
            command = node_command(launch, index)
            environment = {**os.environ, **node_environment(launch, index)}
            # The output of this machine's ranks goes to the terminal directly.
            streams = None
        else:
            command = ssh_command(launch, index)
            # The variables are in the command.
            environment = None
            streams = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=streams,
            stderr=streams,
            env=environment,
            # Ctrl-C at the terminal reaches this process only, which forwards it once.
            start_new_session=True,
        )
        self._readers = []
        for source, sink in (
            (self.process.stdout, sys.stdout.buffer),
            (self.process.stderr, sys.stderr.buffer),
        ):
            if source is not None:
                reader = threading.Thread(
                    target=_copy_lines, args=(source, sink, self.name), daemon=True
                )
                self._readers.append(reader)
                reader.start()
        threading.Thread(target=self._wait, args=(index, ended), daemon=True).start()

    def _wait(self, index: int, ended: queue.SimpleQueue[int]) -> None:
        self.process.wait()
        for reader in self._readers:
            # The last output comes before the end. A process that keeps the pipe open must not
            # block it.
            reader.join(timeout=5)
        ended.put(index)

    def send(self, number: signal.Signals, grace_seconds: float) -> None:
        """Ask the launcher of the machine to send a signal to its ranks, unless it has ended."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.write(format_line(number, grace_seconds))
                self.process.stdin.flush()
            except OSError:
                # The launcher or its connection has ended in the meantime.
                return


def _copy_lines(source: BinaryIO, sink: BinaryIO, name: str) -> None:
    # One write per line, so that lines of several machines do not mix.
    prefix = f"[{name}] ".encode()
    for line in source:
        sink.write(prefix + line)
        sink.flush()


def run(launch: RemoteLaunch) -> int:
    """Run the launch on every machine until all launchers have ended.

    Returns:
        0, or the exit code of the machine that failed first, or 128 + N after signal N.
    """
    local = local_index(launch.hosts)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    received: list[int] = []
    machines: list[_NodeLauncher] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        # The lifeline knows only these two signals.
        forwarded = signal.SIGTERM
        if number == signal.SIGINT:
            forwarded = signal.SIGINT
        grace = launch.grace_seconds
        if len(received) > 1:
            # A second signal stops the ranks immediately.
            grace = 0
        for machine in machines:
            machine.send(forwarded, grace)

    with on_signals(forward, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        try:
            while len(machines) < len(launch.hosts) and not received:
                index = len(machines)
                machines.append(_NodeLauncher(launch, index, local=index == local, ended=ended))
            first_failure = _wait(machines, ended, received)
        finally:
            # The lifeline of a killed launcher closes, and its ranks end. See Note [Lifeline].
            for machine in machines:
                if machine.process.poll() is None:
                    machine.process.kill()
    if first_failure:
        return first_failure
    # The first signal is the cause of the end. Later ones only hasten it.
    if received:
        return 128 + received[0]
    return 0


def _wait(machines: list[_NodeLauncher], ended: queue.SimpleQueue[int], received: list[int]) -> int:
    """Wait until all machines have ended. After a failure, stop the other machines.

    Args:
        machines: The launchers.
        ended: Indices of launchers that have ended.
        received: Signals that this process received. A launcher that ends because of such a signal
            has not failed.

    Returns:
        The exit code of the first failure, or 0.
    """
    first_failure = 0
    deadline = float("inf")
    running = set(range(len(machines)))
    while running and time.monotonic() < deadline:
        try:
            index = ended.get(timeout=1)
        except queue.Empty:
            continue
        running.discard(index)
        code = machines[index].process.returncode
        if code < 0:
            code = 128 - code
        by_signal = received and code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        if code == 0 or first_failure or by_signal:
            continue
        first_failure = code
        deadline = time.monotonic() + STOP_SECONDS + _EXIT_MARGIN_SECONDS
        print(
            f"plait: {_reason(machines[index], code)}; stopping the others",
            file=sys.stderr,
            flush=True,
        )
        for other in running:
            machines[other].send(signal.SIGTERM, STOP_SECONDS)
    for index in running:
        print(
            f"plait: node {machines[index].name} did not end and is given up",
            file=sys.stderr,
            flush=True,
        )
    return first_failure


def _reason(machine: _NodeLauncher, code: int) -> str:
    if code == SSH_FAILED and not machine.local:
        return f"node {machine.name}: no connection, or it was lost (try `ssh {machine.name} true`)"
    return f"node {machine.name} failed with exit code {code}"


class HasGrace(Protocol):
    """Object with a `grace_seconds` setting."""

    grace_seconds: float


def format_line(number: signal.Signals, grace_seconds: float) -> bytes:
    """Return the line that requests a signal, see Note [Lifeline]."""
    return f"{number.name} {grace_seconds:g}\n".encode()


def follow(agent: HasGrace, stream: Iterable[bytes] | None = None) -> None:
    """Read the lifeline in a thread, and send the requested signals to this process.

    Args:
        agent: Object whose `grace_seconds` is set to the seconds of each request.
        stream: Source of the lines. None for standard input.
    """
    # sys.stdin is not used, because the interpreter cannot end while a thread holds the lock of its
    # buffer.
    source = stream if stream is not None else io.FileIO(0, closefd=False)
    threading.Thread(
        target=_follow, args=(agent, source), name="plait-lifeline", daemon=True
    ).start()


def _follow(agent: HasGrace, stream: Iterable[bytes]) -> None:
    for text in stream:
        name, _, seconds = text.decode(errors="replace").strip().partition(" ")
        if name in ("SIGINT", "SIGTERM"):
            agent.grace_seconds = float(seconds)
            os.kill(os.getpid(), signal.Signals[name])
    # The end of the input. See Note [Lifeline].
    os.kill(os.getpid(), signal.SIGTERM)
