"""Variables of torchrun are options of `plait launch`, and launchers around it are reported."""

from __future__ import annotations

import pytest

from plait.cli import launch as launch_module
from plait.cli.launching.launch_settings import LaunchSettings, check, with_variables
from plait.errors import ConfigError
from tests.unit.cli.commands import run

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
NAMES = "nnodes nproc_per_node node_rank master_addr master_port rdzv_endpoint rdzv_id max_restarts"
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return the settings with which `plait launch` and `plait train` would have started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.json").write_text("{}")
    calls: list[LaunchSettings] = []

    def start(_, settings, **__):
        calls.append(check(settings))
        return 0

    # The function behind it starts processes.
    monkeypatch.setattr(launch_module, "_start", start)
    return calls


def launch(options=""):
    """Run `plait launch`, and return its exit code."""
    return run(f"launch {options} train.py")


@pytest.mark.parametrize("line", ["launch train.py", "train run.json"])
def test_variables_of_kubeflow_are_options(started, monkeypatch, line):
    # Kubeflow sets RANK and WORLD_SIZE of the pods as well.
    for name, value in {**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run(line) == 0
    master = {"master_addr": "job-node-0-0.job", "master_port": 29400}
    (settings,) = started
    assert (settings.processes, settings.min_nodes, settings.max_nodes) == (4, 2, 2)
    assert settings.node_rank == 1
    assert {name: getattr(settings, name) for name in master} == master


def test_options_win_over_variables(started, monkeypatch):
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    assert launch("--nproc-per-node 3 --nnodes 1:4 --rdzv-endpoint a:1") == 0
    assert launch("--standalone --nproc-per-node 2") == 0
    assert (started[0].processes, started[0].max_nodes, started[0].rdzv_endpoint) == (3, 4, "a:1")
    assert (started[0].node_rank, started[0].master_addr) == (None, None)
    assert started[1] == LaunchSettings(processes=2)


def test_only_one_kind_of_rendezvous_is_read():
    nothing = dict.fromkeys(NAMES.split())
    both = {**KUBEFLOW, "PET_RDZV_ENDPOINT": "a:1"}
    # An endpoint wins over a master address.
    assert with_variables(nothing, both)["master_addr"] is None
    assert with_variables(nothing, both)["rdzv_endpoint"] == "a:1"
    assert with_variables({**nothing, "master_addr": "b"}, both)["rdzv_endpoint"] is None


def test_a_variable_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="PET_NODE_RANK = 'one'"):
        with_variables(dict.fromkeys(NAMES.split()), {"PET_NODE_RANK": "one"})


TASKS = "SLURM_STEP_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("variables", "arguments", "launcher"),
    [
        ({**SRUN, TASKS: "4(x2)"}, "", "process 3 of 8 of srun"),
        ({**SRUN, TASKS: "4(x2)"}, "--nnodes 2 --rdzv-endpoint a:1", "process 3 of 8 of srun"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "", "process 1 of 2 of the launcher"),
        ({**SRUN, TASKS: "1(x8)"}, "--nnodes 8 --rdzv-endpoint a:1", ""),
        ({"RANK": "0"}, "", ""),
        ({}, "", ""),
    ],
)
def test_a_launcher_around_the_launcher_is_reported(
    started, monkeypatch, recwarn, variables, arguments, launcher
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch(f"--nproc-per-node 2 {arguments}") == 0
    text = " ".join(str(warning.message) for warning in recwarn)
    if launcher:
        assert launcher in text
    else:
        assert "of its own" not in text


@pytest.mark.parametrize("nodes", ["0", "0:2", "3:2"])
def test_impossible_numbers_of_machines_are_refused(started, nodes, capsys):
    # `plait train` divides the processes by the machines.
    train = f"train run.json --set run.processes=4 --nnodes {nodes} --rdzv-endpoint a:1"
    for line in (train, f"launch --nnodes {nodes} train.py"):
        assert run(line) == 2 and not started
        assert f"--nnodes = '{nodes}'" in capsys.readouterr().err
