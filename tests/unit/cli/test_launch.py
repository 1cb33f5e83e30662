import dataclasses
import socket

import pytest

from plait.cli import launch as verb
from plait.cli import main as command
from plait.cli.launching import remote
from plait.cli.launching.launch_settings import LaunchSettings, check
from plait.errors import ConfigError
from tests.table import check_rows


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def started(monkeypatch, environments):
    """Commands and settings that would have been started on this machine."""
    calls = []

    def start(command, settings, **rest):
        check(settings)
        calls.append((list(command), settings))
        environments.append(rest.get("environment"))
        return 0

    monkeypatch.setattr(verb, "_start", start)
    return calls


@pytest.fixture
def environments():
    return []


@pytest.fixture
def started_remote(monkeypatch):
    calls = []
    monkeypatch.setattr(remote, "run", lambda there: calls.append(there) or 0)
    return calls


def _plait(*arguments):
    with pytest.raises(SystemExit) as caught:
        command.main(["launch", *arguments])
    return caught.value.code


def test_what_stands_after_the_script_is_the_scripts(script, started):
    rest = ["--nproc-per-node", "9", "-m", "--help", "--", "x"]
    assert _plait("--nproc-per-node", "3", script, *rest) == 0
    assert started == [(["train.py", *rest], LaunchSettings(processes=3))]


def test_a_module(started):
    assert _plait("--nproc-per-node", "1", "-m", "pkg.train", "-m") == 0
    assert started[0][0] == ["-m", "pkg.train", "-m"]


def test_every_option_arrives(script, started):
    elastic = "--nproc-per-node 4 --nnodes 2:3 --rdzv-endpoint a:1 --rdzv-id job --max-restarts 5 --grace 7 --timeout 8"
    _plait(*elastic.split(), script)
    meeting = LaunchSettings(4, 2, 3, rdzv_endpoint="a:1", rdzv_id="job")
    seconds = {"grace_seconds": 7, "timeout_seconds": 8}
    assert started[0][1] == dataclasses.replace(meeting, max_restarts=5, **seconds)
    fixed = "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr a --master-port 5"
    _plait(*fixed.split(), script)
    assert started[1][1] == LaunchSettings(4, 2, 2, node_rank=1, master_addr="a", master_port=5)


def test_one_process_a_device_by_default(script, started, monkeypatch):
    monkeypatch.setattr(verb, "default_processes", lambda: 6)
    _plait(script)
    assert started[0][1].processes == 6


MISTAKES = {
    "": "no script to launch",
    "-m": "no module to launch",
    "missing.py": "missing.py: no such script",
    "--nnodes x train.py": "--nnodes = 'x'",
    "-i a train.py": "--include: is for the machines of a hostfile",
    "--no-ssh train.py": "--no-ssh",
    "--export A train.py": "--export",
    "-H hosts --nnodes 2 train.py": "--nnodes = '2': given together with --hostfile",
    "-H hosts --node-rank 0 train.py": "--node-rank = 0: given together",
    "-H hosts --max-restarts 2 train.py": "--max-restarts = 2: given together",
    "-H hosts train.py": "hostfile hosts: No such file",
}


@pytest.mark.usefixtures("script")
def test_mistakes_are_told_before_anything_starts(started, started_remote, capsys):
    def check(row):
        assert _plait(*row[0].split()) == 2
        assert row[1] in capsys.readouterr().err
        assert not started and not started_remote

    check_rows({row[0]: row for row in MISTAKES.items()}, check)
    with pytest.raises(ConfigError, match="--nproc-per-node = 0"):
        verb.run(["x"], LaunchSettings(0))


class TestHostfile:
    @pytest.fixture
    def hosts(self, script, tmp_path):
        (tmp_path / "hosts").write_text(f"192.0.2.7 slots=4\n{socket.gethostname()} slots=2\n")
        return "hosts"

    def test_several_machines_by_ssh(self, hosts, started_remote, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "off")
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        _plait("-H", hosts, "--export", "WANDB_MODE", "--grace", "9", "train.py", "-x")
        there = started_remote[0]
        assert [host.name for host in there.hosts] == ["192.0.2.7", socket.gethostname()]
        assert there.command == ("train.py", "-x")
        assert (there.master_addr, there.master_port) == ("192.0.2.7", 29500)
        assert (there.grace_seconds, there.processes) == (9, None)
        assert {"WANDB_MODE": "off", "NCCL_DEBUG": "INFO"}.items() <= there.exported.items()

    def test_by_hand_on_each_machine(self, hosts, started):
        _plait("-H", hosts, "--no-ssh", "--master-port", "77", "train.py")
        meeting = {"node_rank": 1, "master_addr": "192.0.2.7", "master_port": 77}
        assert started[0][1] == LaunchSettings(2, 2, 2, **meeting)

    def test_this_machine_alone_is_not_reached_by_ssh(self, hosts, started, environments):
        _plait("-H", hosts, "-i", f"{socket.gethostname()}:1", "train.py")
        assert started[0][1] == LaunchSettings(1)
        assert environments[0]["CUDA_VISIBLE_DEVICES"] == "1"

    def test_another_machine_alone_is(self, hosts, started_remote):
        _plait("-H", hosts, "-e", socket.gethostname(), "train.py")
        assert [host.name for host in started_remote[0].hosts] == ["192.0.2.7"]

    def test_by_hand_on_a_machine_that_is_not_in_it(self, hosts, capsys):
        assert _plait("-H", hosts, "-i", "192.0.2.7", "--no-ssh", "train.py") == 2
        assert "the hostfile lists 192.0.2.7, but not this machine" in capsys.readouterr().err


def test_run_for_other_verbs(started):
    assert verb.run(["plait.x", "a.json"], LaunchSettings(2, grace_seconds=5)) == 0
    assert started == [(["-m", "plait.x", "a.json"], LaunchSettings(2, grace_seconds=5))]


def test_devices_of_this_machine_without_a_hostfile(script, started, environments, monkeypatch):
    """DeepSpeed's `--include localhost:1`."""
    monkeypatch.setattr(verb, "default_processes", lambda: 4)
    assert _plait("--include", "localhost:1,3", script) == 0
    assert _plait("--exclude", "localhost:0", script) == 0
    assert [settings.processes for _, settings in started] == [2, 3]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments] == ["1,3", "1,2,3"]
    assert _plait("--include", "localhost:0", "--nnodes", "2", script) == 2


def test_the_first_machine_is_met_without_its_user(script, started_remote, tmp_path):
    (tmp_path / "hosts").write_text("root@a slots=2\nb slots=2\n")
    assert _plait("--hostfile", "hosts", script) == 0
    (there,) = started_remote
    assert there.master_addr == "a" and remote.ssh_command(there, 0)[4] == "root@a"
