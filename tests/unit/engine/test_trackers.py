"""Trackers of a user's training loop: files and libraries that record its losses."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import plait
import plait.compat.deepspeed as deepspeed
from plait.config.resolving.explain import explain
from plait.config.resolving.resolve import load, resolve
from plait.engine import trackers
from plait.errors import ConfigError, InputError
from plait.hf.loop_settings import resolved_of
from tests.parity.trainers import launched_alone

CONFIG = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
CSV_JOB = {"enabled": True, "job_name": "job"}
STEPS = 3


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(config):
    """Train for `STEPS` steps in DeepSpeed's style and return the loss of each step."""
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=nn.Linear(3, 1), config=config)[0]
    losses = []
    for step in range(STEPS):
        total = 0
        for index in range(2):
            generator = torch.Generator().manual_seed(2 * step + index)
            batch = torch.randn(2, 3, generator=generator)
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total / 2)
    engine.destroy()
    return losses


def columns_of(file):
    """Return the header, the steps and the values of a CSV file."""
    with open(file, newline="") as stream:
        header, *rows = csv.reader(stream)
    steps, values = zip(*rows, strict=True)
    return header, list(map(int, steps)), list(map(float, values))


def test_csv_files_of_a_deepspeed_script(tmp_path):
    losses = train({**CONFIG, "csv_monitor": {**CSV_JOB, "output_path": "logs"}})
    header, steps, values = columns_of(tmp_path / "logs" / "job" / "train_loss.csv")
    assert header == ["step", "loss"]
    assert steps == [1, 2, 3]
    assert values == pytest.approx(losses)
    rates = (tmp_path / "logs" / "job" / "train_learning_rate.csv").read_text().split()
    assert rates == ["step,learning_rate", "1,0.1", "2,0.1", "3,0.1"]


def test_csv_files_of_full_steps(tmp_path):
    config = {**CONFIG, "csv_monitor": {**CSV_JOB, "output_path": ""}}
    loss = plait.per_sample(lambda output, batch: output.square().sum())
    engine = plait.initialize(
        nn.Linear(3, 1), config, loss_fn=loss, forward=lambda model, batch: model(batch)
    )
    losses = [float(engine.train_batch(torch.ones(4, 3)).loss) for _ in range(2)]
    engine.close()
    assert columns_of(tmp_path / "job" / "train_loss.csv")[2] == pytest.approx(losses)


def test_tensorboard(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with launched_alone():
        losses = train({**CONFIG, "tensorboard": {**CSV_JOB, "output_path": "logs"}})
    events = EventAccumulator(str(tmp_path / "logs" / "job"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in scalars] == pytest.approx(losses)


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with launched_alone():
        train({**CONFIG, "wandb": {"enabled": True, "project": "x", "group": "g"}})
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"train/loss" in content
    assert b"train_batch_size" in content


@pytest.mark.parametrize(
    ("section", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")],
)
def test_a_missing_library_is_refused(section, package, monkeypatch):
    def find_spec(name):
        return None if name == package else object()

    # The library may be installed on this machine.
    monkeypatch.setattr(trackers, "find_spec", find_spec)
    model = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=rf"{section}.enabled = .*run `pip install {package}`"):
        plait.initialize(model, {**CONFIG, section: {"enabled": True}})
    # The engine did not take the model.
    plait.initialize(model, CONFIG).close()


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path):
    engine = plait.initialize(nn.Linear(3, 1), {**CONFIG, "csv_monitor": CSV_JOB})
    folder = tmp_path / "job"
    folder.rmdir()
    folder.touch()

    def steps():
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()

    message = "a tracker failed at step 1, and the run continues without it"
    with pytest.warns(UserWarning, match=message):
        steps()
    assert engine.global_steps == 2
    engine.close()


def test_a_tracker_that_fails_at_the_end_is_reported(monkeypatch):
    calls = []

    def finish(tracker):
        calls.append(tracker)
        raise ConnectionError("the server is gone")

    # No library here can be made to fail when it ends.
    monkeypatch.setattr(trackers.CsvTracker, "finish", finish)
    engine = plait.initialize(nn.Linear(3, 1), {**CONFIG, "csv_monitor": CSV_JOB})
    with pytest.warns(UserWarning, match="a tracker failed at the end of the run: the server is"):
        engine.close()
    assert len(calls) == 1


def test_a_tracker_that_cannot_start_is_refused():
    Path("job").touch()
    with pytest.raises(InputError, match=r"starting the trackers: .*job"):
        plait.initialize(nn.Linear(3, 1), {**CONFIG, "csv_monitor": CSV_JOB})


def settings_of(**sections):
    specs = resolve(load({**CONFIG, **sections}), world_size=1).trackers
    return {spec.name: spec.settings for spec in specs}


def test_defaults_of_trackers():
    enabled = {"enabled": True}
    run = {"folder": "f"}
    settings = settings_of(csv_monitor=enabled, wandb=enabled, run=run)
    assert settings["csv_monitor"] == {"output_path": "f", "job_name": "csv_monitor"}
    assert settings["wandb"]["project"] == "plait"
    monitor = {"enabled": True, "output_path": "o"}
    for sections, name in (({"run": run}, "csv_monitor"), ({}, "DeepSpeedJobName")):
        settings = settings_of(csv_monitor=monitor, **sections)
        assert settings == {"csv_monitor": {"output_path": "o", "job_name": name}}


def test_explain_lists_supported_and_ignored_keys():
    tree = {
        "train_batch_size": 1,
        "wandb": {"enabled": True, "project": "x"},
        "comet": {"api_key": "hunter2", "samples_log_interval": 5},
        "tensorboard": {"enabled": False, "job_name": "x"},
    }
    explanation = explain(tree)
    assert not explanation.problems
    rows = {row.key: row for row in explanation.keys}
    assert rows["wandb.enabled"].status.value == "supported"
    assert rows["wandb.project"].status.value == "supported"
    assert rows["comet.api_key"].status.value == "ignored"
    assert "COMET_API_KEY" in rows["comet.api_key"].meaning
    assert rows["tensorboard.job_name"].status.value == "ignored"
    assert rows["tensorboard.job_name"].meaning == "tensorboard.enabled is false"
    # A secret is not repeated.
    assert "hunter2" not in str(explanation)


def test_trackers_of_callers_with_their_own_are_refused():
    config = load({**CONFIG, "train_batch_size": 2, "wandb": {"enabled": True}})
    with pytest.raises(ConfigError, match=r'log_with="wandb"'):
        resolved_of(config, world_size=1, precision="no", accumulation=1, micro=2, hidden_size=None)
    with pytest.raises(ConfigError, match="or use plait.initialize"):
        plait.parallelize(nn.Linear(3, 1), {"csv_monitor": {"enabled": True}})
