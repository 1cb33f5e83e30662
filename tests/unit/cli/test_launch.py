"""`plait launch` starts processes on this machine, or on the machines of a hostfile.

Mistakes in its arguments are in advice.yaml.
"""

import dataclasses
import socket

import pytest

from plait.cli import launch as launch_module
from plait.cli.launching import remote
from plait.cli.launching.launch_settings import LaunchSettings, check
from plait.errors import ConfigError
from tests.unit.cli.commands import run

HOSTNAME = socket.gethostname()


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def started(monkeypatch):
    """Return the list of (command, settings, environment) that would have been started here."""
    calls = []

    def start(command, settings, environment=None, **_):
        check(settings)
        calls.append((list(command), settings, environment))
        return 0

    # The function behind it starts processes.
    monkeypatch.setattr(launch_module, "_start", start)
    return calls


@pytest.fixture
def started_remote(monkeypatch):
    """Return the list of launches that would have been started by SSH."""
    launches = []
    monkeypatch.setattr(remote, "run", lambda launch: launches.append(launch) or 0)
    return launches


def launch(line):
    """Run `plait launch`, and return its exit code."""
    return run(f"launch {line}")


def test_arguments_after_the_script_belong_to_the_script(script, started):
    arguments = "--nproc-per-node 9 -m --help -- x"
    assert launch(f"--nproc-per-node 3 {script} {arguments}") == 0
    command = ["train.py", *arguments.split()]
    assert started == [(command, LaunchSettings(processes=3), None)]


def test_a_module(started):
    assert launch("--nproc-per-node 1 -m pkg.train -m") == 0
    assert started[0][0] == ["-m", "pkg.train", "-m"]


def test_options_become_settings(script, started):
    rendezvous = "--nnodes 2:3 --rdzv-endpoint a:1 --rdzv-id job"
    launch(f"--nproc-per-node 4 {rendezvous} --max-restarts 5 --grace 7 --timeout 8 {script}")
    settings = LaunchSettings(4, 2, 3, rdzv_endpoint="a:1", rdzv_id="job", max_restarts=5)
    settings = dataclasses.replace(settings, grace_seconds=7, timeout_seconds=8)
    assert started[0][1] == settings
    launch(f"--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr a --master-port 5 {script}")
    assert started[1][1] == LaunchSettings(4, 2, 2, node_rank=1, master_addr="a", master_port=5)


def test_one_process_per_device_by_default(script, started, monkeypatch):
    monkeypatch.setattr(launch_module, "default_processes", lambda: 6)
    launch(script)
    assert started[0][1].processes == 6


@pytest.mark.parametrize("option", ["--node-rank 0", "--max-restarts 2"])
def test_options_that_a_hostfile_decides_are_refused(option, script, started_remote, capsys):
    assert launch(f"-H hosts {option} {script}") == 2
    assert f"{option.replace(' ', ' = ')}: given together" in capsys.readouterr().err
    assert not started_remote


def test_other_commands_check_the_number_of_processes():
    with pytest.raises(ConfigError, match="--nproc-per-node = 0"):
        launch_module.run(["x"], LaunchSettings(0))


@pytest.fixture
def hosts(script, tmp_path):
    """Return a hostfile of another machine with 4 slots, and this one with 2."""
    (tmp_path / "hosts").write_text(f"192.0.2.7 slots=4\n{HOSTNAME} slots=2\n")
    return "hosts"


def test_machines_of_a_hostfile_are_started_by_ssh(hosts, started_remote, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "off")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    launch(f"-H {hosts} --export WANDB_MODE --grace 9 train.py -x")
    (call,) = started_remote
    assert [host.name for host in call.hosts] == ["192.0.2.7", HOSTNAME]
    assert call.command == ("train.py", "-x")
    assert (call.master_addr, call.master_port) == ("192.0.2.7", 29500)
    assert (call.grace_seconds, call.processes) == (9, None)
    assert {"WANDB_MODE": "off", "NCCL_DEBUG": "INFO"}.items() <= call.exported.items()


def test_no_ssh_starts_the_part_of_this_machine(hosts, started):
    launch(f"-H {hosts} --no-ssh --master-port 77 train.py")
    rendezvous = {"node_rank": 1, "master_addr": "192.0.2.7", "master_port": 77}
    assert started[0][1] == LaunchSettings(2, 2, 2, **rendezvous)


def test_no_ssh_on_a_machine_outside_of_the_hostfile(hosts, capsys):
    assert launch(f"-H {hosts} -i 192.0.2.7 --no-ssh train.py") == 2
    assert "the hostfile lists 192.0.2.7, but not this machine" in capsys.readouterr().err


def test_this_machine_alone_needs_no_ssh(hosts, started):
    launch(f"-H {hosts} -i {HOSTNAME}:1 train.py")
    _, settings, environment = started[0]
    assert settings == LaunchSettings(1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_another_machine_alone_is_started_by_ssh(hosts, started_remote):
    launch(f"-H {hosts} -e {HOSTNAME} train.py")
    assert [host.name for host in started_remote[0].hosts] == ["192.0.2.7"]


def test_the_address_of_the_first_machine_has_no_user(script, started_remote, tmp_path):
    (tmp_path / "hosts").write_text("root@a slots=2\nb slots=2\n")
    assert launch(f"--hostfile hosts {script}") == 0
    (call,) = started_remote
    assert call.master_addr == "a" and remote.ssh_command(call, 0)[4] == "root@a"


def test_localhost_selects_devices_without_a_hostfile(script, started, monkeypatch):
    """DeepSpeed has the same `--include localhost:1`."""
    monkeypatch.setattr(launch_module, "default_processes", lambda: 4)
    for option, devices in (("--include localhost:1,3", "1,3"), ("--exclude localhost:0", "1,2,3")):
        assert launch(f"{option} {script}") == 0
        _, settings, environment = started.pop()
        assert settings.processes == len(devices.split(","))
        assert environment["CUDA_VISIBLE_DEVICES"] == devices


def test_run_for_other_commands(started):
    settings = LaunchSettings(2, grace_seconds=5)
    assert launch_module.run(["plait.x", "a.json"], settings) == 0
    assert started == [(["-m", "plait.x", "a.json"], settings, None)]
