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


def test_what_runs_on_a_machine():
    assert shlex.join(node_command(TWO, 1)) == (
        "/opt/python -m plait launch --nnodes 2 --node-rank 1 --master-addr a --master-port 1234 --nproc-per-node 2 --grace 60 "
        "--timeout 30 --lifeline train.py --text 'it'\"'\"'s here'"
    )


def test_the_shell_over_there_reads_what_was_meant():
    *head, host, script = ssh_command(TWO, 1)
    assert head == ["ssh", "-o", "BatchMode=yes", "-T"]
    assert host == "b"
    words = shlex.split(script)
    assert words[:5] == ["cd", "/data/my run", "&&", "exec", "env"]
    assert words[5:8] == ["CUDA_VISIBLE_DEVICES=1,3", "NCCL_DEBUG=a b", "PYTHONPATH=src"]
    assert words[8:] == node_command(TWO, 1)


def test_chosen_gpus_are_the_only_ones_seen():
    assert "CUDA_VISIBLE_DEVICES" not in node_environment(TWO, 0)
    assert node_environment(TWO, 1)["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_one_machine_needs_no_meeting_point():
    alone = RemoteLaunch(hosts=TWO.hosts[1:], command=("x.py",), master_addr="b", processes=5)
    command = node_command(alone, 0)
    assert "--nnodes" not in command
    assert "--master-addr" not in command
    assert command[command.index("--nproc-per-node") + 1] == "5"


def test_what_other_machines_get():
    exported = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": "src"}
    here = {**exported, "HF_TOKEN": "secret", "HOME": "/root", "WANDB_MODE": "off"}
    assert exported_variables(here, []) == exported
    assert exported_variables(here, ["WANDB_MODE"])["WANDB_MODE"] == "off"
    with pytest.raises(ConfigError, match="--export = 'NOPE': is not set in this environment"):
        exported_variables(here, ["NOPE"])


def index_in(*names):
    return local_index(tuple(HostfileEntry(name, (0,)) for name in names))


class TestThisMachine:
    def test_by_name(self, monkeypatch):
        monkeypatch.setattr(socket, "gethostname", lambda: "b.cluster")
        monkeypatch.setattr(remote, "_is_local_address", lambda name: False)
        assert index_in("a", "b") == 1

    def test_by_address(self, monkeypatch):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert index_in("192.0.2.1", "127.0.0.1") == 1

    def test_none(self):
        assert index_in("192.0.2.1", "no-such-host.invalid") is None


class TestMaster:
    def test_the_first_machine_unless_given(self):
        assert master_address(TWO.hosts, None) == "a"
        assert master_address(TWO.hosts, "10.0.0.7") == "10.0.0.7"

    @pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
    def test_a_name_that_only_this_machine_understands(self, name):
        with pytest.raises(ConfigError, match="cannot reach the first machine"):
            master_address((HostfileEntry(name, (0,)), HostfileEntry("b", (0,))), None)
        with pytest.raises(ConfigError, match="--master-addr"):
            master_address(TWO.hosts, name)
        assert master_address((HostfileEntry(name, (0,)),), None) == name


class Agent:
    grace_seconds = 300.0


@pytest.fixture
def sent(monkeypatch):
    numbers = []

    def kill(pid, number):
        if pid == os.getpid():
            numbers.append(number)

    monkeypatch.setattr(remote.os, "kill", kill)
    return numbers


def _follow(agent, lines):
    remote.follow(agent, lines)
    for thread in threading.enumerate():
        if thread.name == "plait-lifeline":
            thread.join(10)


def test_a_line_is_a_signal_with_a_grace(sent):
    agent = Agent()
    _follow(agent, [remote.format_line(signal.SIGINT, 12.5)])
    assert sent[0] == signal.SIGINT
    assert agent.grace_seconds == 12.5


def test_the_end_of_the_line_ends_the_ranks(sent):
    agent = Agent()
    _follow(agent, [])
    assert sent == [signal.SIGTERM]
    assert agent.grace_seconds == 300


def test_other_lines_do_nothing(sent):
    _follow(Agent(), [b"\n", b"SIGKILL 3\n", b"hello\n", b"\xff\n"])
    assert sent == [signal.SIGTERM]
