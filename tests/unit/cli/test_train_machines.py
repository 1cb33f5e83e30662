"""`plait train` passes the machines and processes to the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import launch
from plait.cli.train import _command, app
from plait.config.resolving.resolve import load
from plait.errors import ConfigError


@pytest.fixture
def started(monkeypatch):
    """Return the settings with which the launcher would have started."""
    calls = []
    # The function behind it starts processes.
    monkeypatch.setattr(launch, "run", lambda module, settings: calls.append(settings) or 0)
    return calls


def train(folder, line, **run):
    """Run the command on a file with the given section `run`."""
    file = folder / "run.json"
    file.write_text(json.dumps({"train_batch_size": 4, "run": run}))
    return CliRunner().invoke(app, [str(file), *line.split()])


def test_a_changing_number_of_machines(tmp_path, started):
    options = "--rdzv-endpoint a:1 --nproc-per-node 2 --max-restarts 3"
    for nodes, minimum, maximum in (("1:2", 1, 2), ("2:4", 2, 4), ("2", 2, 2)):
        assert train(tmp_path, f"--nnodes {nodes} {options}").exit_code == 0
        settings = started.pop()
        assert (settings.min_nodes, settings.max_nodes) == (minimum, maximum)
        assert (settings.processes, settings.max_restarts) == (2, 3)


def test_fixed_processes_need_a_fixed_number_of_machines(tmp_path, started):
    refused = train(tmp_path, "--nnodes 1:2 --rdzv-endpoint a:1", processes=4)
    assert isinstance(refused.exception, ConfigError)
    assert "the number of machines may change (1 to 2)" in str(refused.exception)
    assert train(tmp_path, "--nnodes 2 --rdzv-endpoint a:1", processes=4).exit_code == 0
    assert [settings.processes for settings in started] == [2]


def test_a_wrong_number_of_machines_is_refused(tmp_path, started):
    refused = train(tmp_path, "--nnodes 2:x")
    assert isinstance(refused.exception, ConfigError) and not started
    assert "--nnodes = '2:x'" in str(refused.exception)


def test_resuming_keeps_the_number_of_processes(monkeypatch):
    """Another number could have another batch size."""
    # The private function, because the command prints its result after a run.
    monkeypatch.setattr("plait.cli.planning.query.default_processes", lambda: 2)
    config = load({"train_batch_size": 4})
    for processes, option in ((None, ""), (2, ""), (4, " --nproc-per-node 4")):
        line = _command(Path("run.json"), ["run.steps=9"], config=config, processes=processes)
        assert line == f"plait train run.json{option} --set run.steps=9"
