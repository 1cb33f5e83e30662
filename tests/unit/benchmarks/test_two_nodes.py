"""The laboratory: refused with a sentence where it cannot be, gone after use, and counted by the kernel."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.two_nodes import __main__ as command
from benchmarks.two_nodes import network
from benchmarks.two_nodes.network import ADDRESSES, PREFIX, NoLab, enter, lab

NAMESPACES = Path("/run/netns")


def namespaces():
    return {path.name for path in NAMESPACES.glob(f"{PREFIX}*")} if NAMESPACES.is_dir() else set()


def possible():
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


@pytest.mark.skipif(not possible(), reason="network namespaces cannot be made here")
def test_bytes_cross_the_link_at_its_rate_and_nothing_stays():
    """64 KB from one node to the other, through processes that entered them."""
    before = namespaces()
    with lab() as found:
        assert {*found.nodes} <= namespaces()
        found.shape("100mbit")
        code = (
            "import sys, socket; sys.path.insert(0, {root!r}); from benchmarks.two_nodes.network import enter; enter({node!r}); {rest}"
        ).format
        root = str(Path(network.__file__).parents[2])
        receive = "s = socket.create_server(({0!r}, 5555)); print('up', flush=True); c = s.accept()[0]\nwhile c.recv(65536): pass"
        listener = subprocess.Popen(
            [
                "python3",
                "-c",
                code(root=root, node=found.nodes[1], rest=receive.format(ADDRESSES[1])),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert listener.stdout is not None and listener.stdout.readline() == "up\n"
            sent = found.sent_bytes()
            send = f"c = socket.create_connection(({ADDRESSES[1]!r}, 5555)); c.sendall(bytes(65536)); c.close()"
            subprocess.run(
                ["python3", "-c", code(root=root, node=found.nodes[0], rest=send)],
                check=True,
                timeout=30,
            )
            listener.wait(30)
        finally:
            listener.kill()
        there = [now - then for now, then in zip(found.sent_bytes(), sent, strict=True)]
        assert 65536 < there[0] < 75000, "the payload and its headers"
        assert there[1] < 10000, "acknowledgements"
    assert namespaces() == before


@pytest.mark.skipif(not possible(), reason="network namespaces cannot be made here")
def test_what_a_killed_run_left_is_removed():
    gone = subprocess.Popen(["true"])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"{PREFIX}{gone.pid}a"], check=True)
    with lab():
        assert f"{PREFIX}{gone.pid}a" not in namespaces()
    assert f"{PREFIX}{os.getpid()}a" not in namespaces()


def test_entering_what_is_not_there():
    with pytest.raises(OSError):
        enter(f"{PREFIX}-none")
