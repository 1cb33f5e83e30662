"""Variables that torchrun reads as options, and launchers around a launcher."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from plait.cli import launch as verb
from plait.cli import main as command
from plait.cli import train
from plait.cli.launching.launch_settings import LaunchSettings, check, with_variables
from plait.errors import ConfigError

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
    """What `plait launch` and `plait train` would have started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.json").write_text("{}")
    calls: list[LaunchSettings] = []

    def start(_, settings, **__):
        calls.append(check(settings))
        return 0

    monkeypatch.setattr(verb, "_start", start)  # what stands behind it starts processes
    return calls


def launch(*arguments):
    """The exit code of `plait launch`."""
    with pytest.raises(SystemExit) as ended:
        command.main(["launch", *arguments, "train.py"])
    return ended.value.code


@pytest.mark.parametrize("verb_", ["launch", "train"])
def test_kubeflows_variables_are_obeyed(started, monkeypatch, verb_):
    """Also where it sets RANK and WORLD_SIZE of the pods."""
    for name, value in {**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    if verb_ == "launch":
        assert launch() == 0
    else:
        assert CliRunner().invoke(train.app, ["run.json"], catch_exceptions=False).exit_code == 0
    (found,) = started
    assert (found.processes, found.min_nodes, found.max_nodes, found.node_rank) == (4, 2, 2, 1)
    assert (found.master_addr, found.master_port) == ("job-node-0-0.job", 29400)


def test_options_go_before_variables(started, monkeypatch):
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    assert launch("--nproc-per-node", "3", "--nnodes", "1:4", "--rdzv-endpoint", "a:1") == 0
    assert launch("--standalone", "--nproc-per-node", "2") == 0
    assert (started[0].processes, started[0].max_nodes, started[0].rdzv_endpoint) == (3, 4, "a:1")
    assert (started[0].node_rank, started[0].master_addr) == (None, None)
    assert started[1] == LaunchSettings(processes=2)


def test_one_way_to_meet():
    """Of variables alone, the endpoint counts; a variable that is no number is refused by its name."""
    nothing = dict.fromkeys(NAMES.split())
    both = {**KUBEFLOW, "PET_RDZV_ENDPOINT": "a:1"}
    assert with_variables(nothing, both)["master_addr"] is None
    assert with_variables(nothing, both)["rdzv_endpoint"] == "a:1"
    assert with_variables({**nothing, "master_addr": "b"}, both)["rdzv_endpoint"] is None
    with pytest.raises(ConfigError, match="PET_NODE_RANK = 'one'"):
        with_variables(nothing, {"PET_NODE_RANK": "one"})


TASKS = "SLURM_STEP_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({**SRUN, TASKS: "4(x2)"}, "", "process 3 of 8 of srun"),
        ({**SRUN, TASKS: "4(x2)"}, "--nnodes 2 --rdzv-endpoint a:1", "process 3 of 8 of srun"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "", "process 1 of 2 of the launcher"),
        ({**SRUN, TASKS: "1(x8)"}, "--nnodes 8 --rdzv-endpoint a:1", ""),
        ({"RANK": "0"}, "", ""),
        ({}, "", ""),
    ],
)
def test_a_launcher_around_it_is_warned_of(
    started, monkeypatch, recwarn, variables, arguments, said
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch("--nproc-per-node", "2", *arguments.split()) == 0
    text = " ".join(str(one.message) for one in recwarn)
    assert said in text if said else "of its own" not in text


@pytest.mark.parametrize("given", ["0", "0:2", "3:2"])
def test_no_machine_is_refused(started, given):
    """`plait train` divides the processes by the machines."""
    arguments = f"run.json --set run.processes=4 --nnodes {given} --rdzv-endpoint a:1"
    refused = CliRunner().invoke(train.app, arguments.split())
    assert isinstance(refused.exception, ConfigError) and f"--nnodes = '{given}'" in str(
        refused.exception
    )
    assert launch("--nnodes", given) == 2 and not started
