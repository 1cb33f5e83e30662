"""Two network namespaces on one machine stand for two nodes, and disappear after use."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.two_nodes import __main__ as command
from benchmarks.two_nodes import network
from benchmarks.two_nodes.network import ADDRESSES, PREFIX, NoLab, enter, lab

NAMESPACES = Path("/run/netns")


def namespaces():
    """Return the names of all namespaces of labs."""
    return {path.name for path in NAMESPACES.glob(f"{PREFIX}*")}


def is_possible():
    try:
        with lab():
            return True
    except NoLab:
        return False


def test_needs_root(monkeypatch, capsys):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert command.main(["--baselines", "ddp"]) == 2
    assert "network namespaces need root" in capsys.readouterr().err


def test_needs_iproute2(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NoLab, match="install iproute2"), lab():
        pass


RECEIVE = f"""
server = socket.create_server(({ADDRESSES[1]!r}, 5555))
print("up", flush=True)
connection, _ = server.accept()
while connection.recv(65536):
    pass
"""
SEND = f"""
connection = socket.create_connection(({ADDRESSES[1]!r}, 5555))
connection.sendall(bytes(65536))
connection.close()
"""


def python_on(node, code):
    """Return the command of a process that enters a node and runs code there."""
    root = str(Path(network.__file__).parents[2])
    setup = f"""
import sys, socket
sys.path.insert(0, {root!r})
from benchmarks.two_nodes.network import enter
enter({node!r})
"""
    return ["python3", "-c", setup + code]


@pytest.mark.skipif(not is_possible(), reason="network namespaces cannot be made here")
def test_bytes_between_the_nodes_are_counted():
    before = namespaces()
    with lab() as nodes:
        assert set(nodes.nodes) <= namespaces()
        nodes.shape("100mbit")
        with subprocess.Popen(
            python_on(nodes.nodes[1], RECEIVE), stdout=subprocess.PIPE, text=True
        ) as listener:
            try:
                assert listener.stdout.readline() == "up\n"
                start = nodes.sent_bytes()
                subprocess.run(python_on(nodes.nodes[0], SEND), check=True, timeout=30)
                listener.wait(30)
            finally:
                listener.kill()
        sender, receiver = np.subtract(nodes.sent_bytes(), start)
        # The payload and its headers, and acknowledgements.
        assert 65536 < sender < 75000
        assert receiver < 10000
    assert namespaces() == before


@pytest.mark.skipif(not is_possible(), reason="network namespaces cannot be made here")
def test_namespaces_of_a_killed_run_are_removed():
    killed = subprocess.Popen(["true"])
    killed.wait()
    subprocess.run(["ip", "netns", "add", f"{PREFIX}{killed.pid}a"], check=True)
    with lab():
        assert f"{PREFIX}{killed.pid}a" not in namespaces()
    assert f"{PREFIX}{os.getpid()}a" not in namespaces()


def test_entering_a_node_that_does_not_exist():
    with pytest.raises(OSError):
        enter(f"{PREFIX}-none")
