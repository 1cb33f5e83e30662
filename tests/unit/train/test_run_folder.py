"""The folder of a run: a resumed run, refused runs, and starting over."""

import json
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch

from plait import exact
from plait.errors import CheckpointError, InputError
from plait.train import session
from plait.train.loop import Position
from plait.train.run_folder import RunFolder
from tests.checkpoints import put

IDENTITY = {
    "model.hidden_size": 64,
    "model.rope": {"theta": 1.5},
    "run.seed": 0,
    "model.tuple": (1, 2),
}


def put_checkpoint(folder, state):
    put(folder / "checkpoints", "step-7", {"client_state": exact.encode(state)})


def put_run(folder, *, step=7, **identity):
    put_checkpoint(folder, {"identity": {**IDENTITY, **identity}, "step": step, "samples": 56})


def test_an_empty_folder_starts_at_the_beginning(tmp_path):
    assert RunFolder(tmp_path / "new").position(IDENTITY) == Position(0, 0)


def test_the_same_run_is_resumed(tmp_path):
    put_run(tmp_path)
    assert RunFolder(tmp_path).position(IDENTITY) == Position(7, 56)


def test_fields_of_another_version_do_not_matter(tmp_path):
    put_run(tmp_path, **{"model.removed": 1})
    assert RunFolder(tmp_path).position({**IDENTITY, "model.new": None}) == Position(7, 56)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    put_checkpoint(tmp_path, {"epoch": 3})
    with pytest.raises(CheckpointError, match="not written by plait train"):
        RunFolder(tmp_path).position(IDENTITY)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match="is a file"):
        RunFolder(tmp_path / "run").position(IDENTITY)


def test_starting_over_keeps_the_old_runs(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert run.set_aside() is None
    for number in (1, 2):
        put_run(run.path, step=number)
        assert run.set_aside() == tmp_path / f"run.old-{number}"
        assert not run.path.exists()
    manifest = tmp_path / "run.old-1" / "checkpoints" / "step-7" / "manifest.json"
    assert json.loads(manifest.read_text())["metadata"]["client_state"]["step"] == 1


def test_generation_settings_of_the_first_weights_are_copied(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    run = RunFolder(tmp_path / "run")
    resolved = Mock(model_dump_json=lambda indent: "{}")
    for first_weights in (None, weights):
        run.write(resolved, Mock(), first_weights)
        assert not (run.path / "generation_config.json").exists()
    (weights / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    run.write(resolved, Mock(), weights)
    assert (run.path / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'


def test_one_run_at_a_time(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.claim():
        for call in (run.claim, run.set_aside):
            with pytest.raises(InputError, match="another plait train is running in it"):
                call()
        # The private function, because its caller needs a model. A CheckpointError would have
        # another exit code, that of a checkpoint that cannot be used.
        engine = Mock(rank=0, device=torch.device("cpu"))
        with ExitStack() as resources, pytest.raises(InputError, match="another plait train"):
            session._claim_folder(Mock(folder=run), engine, resources)
    run.claim().close()
    assert run.set_aside() == tmp_path / "run.old-1"
