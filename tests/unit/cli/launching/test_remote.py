"""Commands and variables that `plait launch` sends to other machines by SSH."""

import os
import shlex
import signal
import socket
import threading

import pytest

from plait.cli.launching import remote
from plait.cli.launching.remote import (
    RemoteLaunch,
    exported_variables,
    local_index,
    master_address,
    node_command,
    node_environment,
    ssh_command,
)
from plait.cluster.machines import HostfileEntry
from plait.errors import ConfigError

TWO = RemoteLaunch(
    hosts=(HostfileEntry("a", (0, 1)), HostfileEntry("b", (1, 3))),
    command=("train.py", "--text", "it's here"),
    master_addr="a",
    master_port=1234,
    grace_seconds=60,
    timeout_seconds=30,
    exported={"NCCL_DEBUG": "a b", "PYTHONPATH": "src"},
    python="/opt/python",
    folder="/data/my run",
)


def test_the_command_of_a_machine():
    assert shlex.join(node_command(TWO, 1)) == (
        "/opt/python -m plait launch --nnodes 2 --node-rank 1 --master-addr a --master-port 1234 "
        "--nproc-per-node 2 --grace 60 --timeout 30 --lifeline "
        "train.py --text 'it'\"'\"'s here'"
    )


def test_arguments_are_quoted_for_the_remote_shell():
    *head, host, script = ssh_command(TWO, 1)
    assert head == ["ssh", "-o", "BatchMode=yes", "-T"]
    assert host == "b"
    arguments = shlex.split(script)
    assert arguments[:5] == ["cd", "/data/my run", "&&", "exec", "env"]
    assert arguments[5:8] == ["CUDA_VISIBLE_DEVICES=1,3", "NCCL_DEBUG=a b", "PYTHONPATH=src"]
    assert arguments[8:] == node_command(TWO, 1)


def test_other_gpus_are_hidden():
    assert "CUDA_VISIBLE_DEVICES" not in node_environment(TWO, 0)
    assert node_environment(TWO, 1)["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_one_machine_needs_no_rendezvous():
    alone = RemoteLaunch(hosts=TWO.hosts[1:], command=("x.py",), master_addr="b", processes=5)
    command = node_command(alone, 0)
    assert "--nnodes" not in command
    assert "--master-addr" not in command
    assert command[command.index("--nproc-per-node") + 1] == "5"


def test_exported_variables():
    exported = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": "src"}
    environment = {**exported, "HF_TOKEN": "secret", "HOME": "/root", "WANDB_MODE": "off"}
    assert exported_variables(environment, []) == exported
    assert exported_variables(environment, ["WANDB_MODE"])["WANDB_MODE"] == "off"
    with pytest.raises(ConfigError, match="--export = 'NOPE': is not set in this environment"):
        exported_variables(environment, ["NOPE"])


def index_in(*names):
    """Return the index of this machine in a hostfile."""
    return local_index(tuple(HostfileEntry(name, (0,)) for name in names))


class TestThisMachine:
    def test_by_name(self, monkeypatch):
        monkeypatch.setattr(socket, "gethostname", lambda: "b.cluster")
        # The name alone decides.
        monkeypatch.setattr(remote, "_is_local_address", lambda name: False)
        assert index_in("a", "b") == 1

    def test_by_address(self, monkeypatch):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert index_in("192.0.2.1", "127.0.0.1") == 1

    def test_not_in_the_hostfile(self):
        assert index_in("192.0.2.1", "no-such-host.invalid") is None


class TestMaster:
    def test_the_first_machine_is_the_default(self):
        assert master_address(TWO.hosts, None) == "a"
        assert master_address(TWO.hosts, "10.0.0.7") == "10.0.0.7"

    @pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
    def test_a_name_without_a_meaning_on_other_machines(self, name):
        with pytest.raises(ConfigError, match="cannot reach the first machine"):
            master_address((HostfileEntry(name, (0,)), HostfileEntry("b", (0,))), None)
        with pytest.raises(ConfigError, match="--master-addr"):
            master_address(TWO.hosts, name)
        assert master_address((HostfileEntry(name, (0,)),), None) == name


class Agent:
    """Stands for the agent, whose grace period the other side changes."""

    grace_seconds = 300.0


@pytest.fixture
def sent(monkeypatch):
    """Return the list of signals that this process sends to itself."""
    numbers = []

    def kill(pid, number):
        if pid == os.getpid():
            numbers.append(number)

    # The signals would end the tests.
    monkeypatch.setattr(remote.os, "kill", kill)
    return numbers


def follow(agent, lines):
    """Read lines of the other side until the connection ends."""
    remote.follow(agent, lines)
    for thread in threading.enumerate():
        if thread.name == "plait-lifeline":
            thread.join(10)


def test_a_line_is_a_signal_with_a_grace_period(sent):
    agent = Agent()
    follow(agent, [remote.format_line(signal.SIGINT, 12.5)])
    assert sent[0] == signal.SIGINT
    assert agent.grace_seconds == 12.5


def test_the_end_of_the_connection_ends_the_ranks(sent):
    agent = Agent()
    follow(agent, [])
    assert sent == [signal.SIGTERM]
    assert agent.grace_seconds == 300


def test_other_lines_are_ignored(sent):
    follow(Agent(), [b"\n", b"SIGKILL 3\n", b"hello\n", b"\xff\n"])
    assert sent == [signal.SIGTERM]
