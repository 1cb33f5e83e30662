"""`plait train` on several machines: what the launcher is asked for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from plait.cli import launch
from plait.cli.launching.launch_settings import LaunchSettings
from plait.cli.train import app
from plait.errors import ConfigError


@pytest.fixture
def started(monkeypatch):
    """With what the launcher was started."""
    found: list[LaunchSettings] = []
    monkeypatch.setattr(launch, "run", lambda module, settings: found.append(settings) or 0)
    return found


def file_of(folder, **run):
    """Of a run of four sequences a step."""
    (folder / "run.json").write_text(json.dumps({"train_batch_size": 4, "run": run}))
    return str(folder / "run.json")


def test_a_changing_number_of_machines(tmp_path, started):
    """MIN:MAX is passed on, as `plait launch` does; one that may be alone meets others too."""
    where = ["--rdzv-endpoint", "a:1", "--nproc-per-node", "2", "--max-restarts", "3"]
    for given in ("1:2", "2:4", "2"):
        assert (
            CliRunner().invoke(app, [file_of(tmp_path), "--nnodes", given, *where]).exit_code == 0
        )
    assert [(one.processes, one.min_nodes, one.max_nodes, one.max_restarts) for one in started] == [
        (2, 1, 2, 3),
        (2, 2, 4, 3),
        (2, 2, 2, 3),
    ]


def test_a_fixed_number_of_processes_does_not_change(tmp_path, started):
    refused = CliRunner().invoke(
        app, [file_of(tmp_path, processes=4), "--nnodes", "1:2", "--rdzv-endpoint", "a:1"]
    )
    assert isinstance(
        refused.exception, ConfigError
    ) and "the number of machines may change (1 to 2)" in str(refused.exception)
    assert (
        CliRunner()
        .invoke(app, [file_of(tmp_path, processes=4), "--nnodes", "2", "--rdzv-endpoint", "a:1"])
        .exit_code
        == 0
    )
    assert [one.processes for one in started] == [2]
    bad = CliRunner().invoke(app, [file_of(tmp_path), "--nnodes", "2:x"])
    assert isinstance(bad.exception, ConfigError) and "--nnodes = '2:x'" in str(bad.exception)
