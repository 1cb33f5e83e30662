"""Several machines from one: the launcher of a hostfile, over ssh.

Each machine gets its own `plait launch --node-rank ...`, this one as a child process and the others
through the user's `ssh` (keys and names as in `~/.ssh/config`), in the same folder with the same
Python. Their output is printed line by line, with the name of the machine. When one machine fails
the others are ended; when this process dies its lifelines close and they end themselves.
"""

from __future__ import annotations

import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from plait.cli.launching import lifeline
from plait.cli.launching.settings import DEFAULT_PORT
from plait.cluster import accelerator
from plait.cluster.hostfile import Host
from plait.errors import ConfigError, Problem

EXPORTED_PREFIXES = (*accelerator.PREFIXES, "GLOO_", "TORCH_", "UCX_")
EXPORTED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
STOP_SECONDS = 30
"""What the ranks of the other machines get to end in after a machine failed: nothing is left to
wait for.
"""
SSH_FAILED = 255
"""What ssh itself exits with when there was no connection, or it was lost."""


@dataclass(frozen=True)
class Remote:
    """A launch over several machines; `python` is the interpreter's path on all of them."""

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    master_addr: str
    master_port: int = DEFAULT_PORT
    processes: int | None = None
    grace_seconds: float = 300
    timeout_seconds: float = 900
    exported: Mapping[str, str] | None = None
    python: str = sys.executable
    folder: str = ""


def local_index(hosts: Sequence[Host]) -> int | None:
    """Which of the hosts this machine is: by its name, else by an address of its own. None when it
    is not among them.
    """
    own = socket.gethostname()
    names = {own, own.split(".")[0], socket.getfqdn()}
    by_name = [index for index, host in enumerate(hosts) if host.address in names]
    return next(
        iter(
            by_name or [index for index, host in enumerate(hosts) if _is_own_address(host.address)]
        ),
        None,
    )


def _is_own_address(name: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def master(hosts: Sequence[Host], given: str | None) -> str:
    """The address at which the machines meet: as given, else the first host. Raises ConfigError
    where others could not reach it.
    """
    address = given or hosts[0].address
    if len(hosts) > 1 and (
        address == "localhost" or address.startswith("127.") or address == "::1"
    ):
        rule = f"the other {len(hosts) - 1} machine(s) cannot reach it under that name"
        raise ConfigError(
            Problem(
                "--master-addr" if given else "--hostfile",
                address,
                rule,
                "name the first machine as the others know it",
            )
        )
    return address


def exported(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables that every machine gets: those for the communication libraries and Python's
    path, and `names`.

    Raises ConfigError for a name that is not set. Values stand on the command line of ssh, visible
    to the users of the machines.
    """
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(
            *(
                Problem("--export", name, "not set here", "set it, or leave the option out")
                for name in missing
            )
        )
    wanted = {*EXPORTED_NAMES, *names}
    return {
        name: value
        for name, value in environment.items()
        if name in wanted or name.startswith(EXPORTED_PREFIXES)
    }


def node_command(remote: Remote, index: int) -> list[str]:
    """What runs on machine `index`."""
    host = remote.hosts[index]
    numbered = (
        ["--nnodes", str(len(remote.hosts)), "--node-rank", str(index)]
        if len(remote.hosts) > 1
        else []
    )
    meeting = (
        ["--master-addr", remote.master_addr, "--master-port", str(remote.master_port)]
        if len(remote.hosts) > 1
        else []
    )
    patience = ["--grace", f"{remote.grace_seconds:g}", "--timeout", f"{remote.timeout_seconds:g}"]
    processes = ["--nproc-per-node", str(remote.processes or len(host.slots))]
    return [
        remote.python,
        "-m",
        "plait",
        "launch",
        *numbered,
        *meeting,
        *processes,
        *patience,
        "--lifeline",
        *remote.command,
    ]


def node_environment(remote: Remote, index: int) -> dict[str, str]:
    """The variables for machine `index`: the exported ones, and its GPUs where a filter chose some
    of them.
    """
    slots = remote.hosts[index].slots
    chosen = (
        {accelerator.VISIBLE: ",".join(map(str, slots))}
        if slots != tuple(range(len(slots)))
        else {}
    )
    return {**(remote.exported or {}), **chosen}


def ssh_command(remote: Remote, index: int) -> list[str]:
    """`node_command` through ssh. Never asks for a password: standard input is the lifeline."""
    assignments = [
        f"{name}={shlex.quote(value)}"
        for name, value in sorted(node_environment(remote, index).items())
    ]
    inner = shlex.join(node_command(remote, index))
    script = (
        f"cd {shlex.quote(remote.folder or os.getcwd())} && exec env"
        f" {' '.join([*assignments, inner])}"
    )
    return ["ssh", "-o", "BatchMode=yes", "-T", remote.hosts[index].name, script]


class _Machine:
    """One machine's launcher, as a child process here."""

    def __init__(
        self, remote: Remote, index: int, *, local: bool, ended: queue.SimpleQueue[int]
    ) -> None:
        self.name = remote.hosts[index].name
        self.local = local
        command = node_command(remote, index) if local else ssh_command(remote, index)
        streams = None if local else subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=streams,
            stderr=streams,
            env={**os.environ, **node_environment(remote, index)} if local else None,
            # Ctrl-C at the terminal reaches this process only, which passes it on once.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=_copy, args=(source, sink, self.name), daemon=True)
            for source, sink in (
                (self.process.stdout, sys.stdout.buffer),
                (self.process.stderr, sys.stderr.buffer),
            )
            if source is not None
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, args=(index, ended), daemon=True).start()

    def _wait(self, index: int, ended: queue.SimpleQueue[int]) -> None:
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        ended.put(index)

    def send(self, number: signal.Signals, grace_seconds: float) -> None:
        """Ask for a signal over its lifeline; nothing to do when it has ended."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.write(lifeline.line(number, grace_seconds))
                self.process.stdin.flush()
            except OSError:
                return


def _copy(source: BinaryIO, sink: BinaryIO, name: str) -> None:
    """Lines from one machine, each line written in one call."""
    prefix = f"[{name}] ".encode()
    for text in source:
        sink.write(prefix + text)
        sink.flush()


def run(remote: Remote) -> int:
    """Run on every machine until all have ended; the exit code of the one that failed first, 128 +
    N after signal N.
    """
    here = local_index(remote.hosts)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    received: list[int] = []
    machines: list[_Machine] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for machine in machines:
            machine.send(sent, remote.grace_seconds if len(received) == 1 else 0)

    with lifeline.on_signals(forward, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        try:
            while len(machines) < len(remote.hosts) and not received:
                machines.append(
                    _Machine(remote, len(machines), local=len(machines) == here, ended=ended)
                )
            first = _wait(machines, ended, received)
        finally:
            for machine in machines:
                if machine.process.poll() is None:
                    machine.process.kill()
    return first or (128 + received[0] if received else 0)


def _wait(machines: list[_Machine], ended: queue.SimpleQueue[int], received: list[int]) -> int:
    """Until all have ended, or `STOP_SECONDS` and some after the first failed. Returns the first
    failure's exit code, or 0.

    Machines that end as the signal in `received` makes them did not fail.
    """
    first = 0
    deadline = float("inf")
    left = set(range(len(machines)))
    while left and time.monotonic() < deadline:
        try:
            index = ended.get(timeout=1)
        except queue.Empty:
            continue
        left.discard(index)
        code = machines[index].process.returncode
        code = code if code >= 0 else 128 - code
        if code == 0 or first or (received and code in (128 + signal.SIGINT, 128 + signal.SIGTERM)):
            continue
        first = code
        deadline = time.monotonic() + STOP_SECONDS + 15
        print(
            f"plait: {_reason(machines[index], code)}; stopping the others",
            file=sys.stderr,
            flush=True,
        )
        for other in left:
            machines[other].send(signal.SIGTERM, STOP_SECONDS)
    for index in left:
        print(
            f"plait: node {machines[index].name} did not end and is given up",
            file=sys.stderr,
            flush=True,
        )
    return first


def _reason(machine: _Machine, code: int) -> str:
    if code == SSH_FAILED and not machine.local:
        return f"node {machine.name}: no connection, or it was lost (try `ssh {machine.name} true`)"
    return f"node {machine.name} failed with exit code {code}"
