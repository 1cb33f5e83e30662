"""A run's folder: what it goes on with, what it refuses, and starting over."""

import json
from unittest.mock import Mock

import pytest

from plait import exact
from plait.errors import CheckpointError, ConfigError, InputError
from plait.train.loop import Position
from plait.train.run_folder import RunFolder
from tests.checkpoints import put

IDENTITY = {"model.hidden_size": 64, "model.rope": {"theta": 1.5}, "run.seed": 0, "model.tuple": (1, 2)}  # fmt: skip


def _checkpoint(folder, state):
    put(folder / "checkpoints", "step-7", {"client_state": exact.encode(state)})


def test_an_empty_folder_starts_at_the_beginning(tmp_path):
    assert RunFolder(tmp_path / "new").position(IDENTITY) == Position(0, 0)


def test_the_same_run_goes_on(tmp_path):
    _checkpoint(tmp_path, {"identity": IDENTITY, "step": 7, "samples": 56})
    assert RunFolder(tmp_path).position(IDENTITY) == Position(7, 56)


def test_each_difference_is_named(tmp_path):
    _checkpoint(tmp_path, {"identity": IDENTITY, "step": 7, "samples": 56})
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).position({**IDENTITY, "model.hidden_size": 32, "run.seed": 1})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.hidden_size = 32", "run.seed = 1"]
    assert "was created with 64" in lines[0]
    assert "--fresh" in lines[0]


def test_a_field_that_another_version_added_does_not_matter(tmp_path):
    _checkpoint(tmp_path, {"identity": {**IDENTITY, "model.gone": 1}, "step": 7, "samples": 56})
    assert RunFolder(tmp_path).position({**IDENTITY, "model.new": None}) == Position(7, 56)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    _checkpoint(tmp_path, {"epoch": 3})
    with pytest.raises(CheckpointError, match="not written by plait train"):
        RunFolder(tmp_path).position(IDENTITY)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="is a file"):
        RunFolder(tmp_path / "run").position(IDENTITY)


def test_starting_over_keeps_what_was_there(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert run.set_aside() is None
    for number in (1, 2):
        _checkpoint(run.path, {"identity": IDENTITY, "step": number, "samples": 0})
        assert run.set_aside() == tmp_path / f"run.old-{number}"
        assert not run.path.exists()
    state = json.loads(
        (tmp_path / "run.old-1" / "checkpoints" / "step-7" / "manifest.json").read_text()
    )
    assert state["metadata"]["client_state"]["step"] == 1


def test_settings_of_generation_are_kept(tmp_path):
    """Those of the model that a run begins with; a run of new weights has none."""
    weights = tmp_path / "weights"
    weights.mkdir()
    resolved, run = Mock(model_dump_json=lambda indent: "{}"), RunFolder(tmp_path / "run")
    for began_with in (None, weights):
        run.write(resolved, Mock(), began_with)
        assert not (run.path / "generation_config.json").exists()
    (weights / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    run.write(resolved, Mock(), weights)
    assert (run.path / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'


def test_one_run_at_a_time(tmp_path):
    """Also starting over waits for the end of the one that runs."""
    run = RunFolder(tmp_path / "run")
    with run.claim():
        with pytest.raises(InputError, match="another plait train is running in it"):
            run.claim()
        with pytest.raises(InputError, match="another plait train is running in it"):
            run.set_aside()
    run.claim().close()
    assert run.set_aside() == tmp_path / "run.old-1"
