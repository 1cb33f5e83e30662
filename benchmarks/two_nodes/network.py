"""Two network namespaces joined by a veth pair whose rate `tc` limits. Needs root and iproute2.

Their names contain the id of this process. Those that a killed process left are removed first. A
worker enters its namespace before it opens a socket.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "plaitlab"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "lab0"
"""Name of the network interface in both namespaces."""
_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


class NoLab(RuntimeError):
    """The namespaces cannot be made. The message says what is missing."""


@dataclass(frozen=True)
class Lab:
    """Names of the two namespaces."""

    nodes: tuple[str, str]

    def shape(self, rate: str | None) -> None:
        """Limit both directions to a rate such as `100mbit`. None removes the limit."""
        for node in self.nodes:
            reset = f"netns exec {node} tc qdisc del dev {INTERFACE} root"
            _ip(*reset.split(), check=False)
            if rate is not None:
                # The bucket holds a few milliseconds, as a switch does; latency bounds the queue.
                limit = f"root tbf rate {rate} burst 256kb latency 50ms"
                _ip(*f"netns exec {node} tc qdisc add dev {INTERFACE} {limit}".split())

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that each node has sent, as the kernel counts them, with headers."""
        return _sent(self.nodes[0]), _sent(self.nodes[1])


@contextmanager
def lab() -> Iterator[Lab]:
    """Make the namespaces, and remove them at the end. Raises NoLab."""
    if os.geteuid() != 0:
        raise NoLab(
            "network namespaces need root: run as root, or in a container with "
            "--cap-add NET_ADMIN,SYS_ADMIN"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoLab(f"`{tool}` is not installed: install iproute2")
    _remove_stale()
    nodes = (f"{PREFIX}{os.getpid()}a", f"{PREFIX}{os.getpid()}b")
    try:
        for node in nodes:
            _ip("netns", "add", node)
            _ip("-n", node, "link", "set", "lo", "up")
        ends = [f"{INTERFACE} netns {node}" for node in nodes]
        _ip(*f"link add {ends[0]} type veth peer name {ends[1]}".split())
        for node, address in zip(nodes, ADDRESSES, strict=True):
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", node, "link", "set", INTERFACE, "up")
        yield Lab(nodes)
    finally:
        for node in nodes:
            _ip("netns", "del", node, check=False)


def enter(node: str) -> None:
    """Move the calling thread, and threads that it starts later, into a node's namespace."""
    descriptor = os.open(_NAMESPACES / node, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering {node}")
    finally:
        os.close(descriptor)


def _remove_stale() -> None:
    for path in _NAMESPACES.glob(f"{PREFIX}*") if _NAMESPACES.is_dir() else ():
        owner = re.fullmatch(rf"{PREFIX}(\d+)[ab]", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            _ip("netns", "del", path.name, check=False)


def _sent(node: str) -> int:
    (link,) = json.loads(_ip("-n", node, "-s", "-j", "link", "show", "dev", INTERFACE))
    return int(link["stats64"]["tx"]["bytes"])


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise NoLab(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
