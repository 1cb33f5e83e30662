"""Trackers of a training loop of one's own: the files and the libraries that record it."""

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
    """Train for `STEPS` steps in DeepSpeed's style. Returns the loss of each of them."""
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=nn.Linear(3, 1), config=config)[0]
    losses = []
    for step in range(STEPS):
        parts = []
        for part in range(2):
            batch = torch.randn(2, 3, generator=torch.Generator().manual_seed(2 * step + part))
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            parts.append(loss.item())
        losses.append(sum(parts) / 2)
    engine.destroy()
    return losses


def rows_of(file):
    with open(file, newline="") as stream:
        return list(csv.reader(stream))


def test_csv_files_of_a_deepspeed_script(tmp_path):
    losses = train({**CONFIG, "csv_monitor": {**CSV_JOB, "output_path": "logs"}})
    rows = rows_of(tmp_path / "logs" / "job" / "train_loss.csv")
    assert rows[0] == ["step", "loss"]
    assert [int(step) for step, _ in rows[1:]] == [1, 2, 3]
    assert [float(loss) for _, loss in rows[1:]] == pytest.approx(losses)
    rates = (tmp_path / "logs" / "job" / "train_learning_rate.csv").read_text().split()
    assert rates == ["step,learning_rate", "1,0.1", "2,0.1", "3,0.1"]


def test_csv_files_of_full_steps(tmp_path):
    config = {**CONFIG, "csv_monitor": {**CSV_JOB, "output_path": ""}}
    calls = {
        "loss_fn": plait.per_sample(lambda output, batch: output.square().sum()),
        "forward": lambda model, batch: model(batch),
    }
    engine = plait.initialize(nn.Linear(3, 1), config, **calls)
    losses = [float(engine.train_batch(torch.ones(4, 3)).loss) for _ in range(2)]
    engine.close()
    rows = rows_of(tmp_path / "job" / "train_loss.csv")
    assert [float(loss) for _, loss in rows[1:]] == pytest.approx(losses)


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
    assert b"train/loss" in content and b"train_batch_size" in content


@pytest.mark.parametrize(
    ("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)  # fmt: skip
def test_a_missing_library(section, package, monkeypatch):
    """The library may be installed here, so its absence is simulated."""

    def without(name):
        return None if name == package else object()

    monkeypatch.setattr(trackers, "find_spec", without)
    model = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=rf"{section}.enabled = .*run `pip install {package}`"):
        plait.initialize(model, {**CONFIG, section: {"enabled": True}})
    # The model is not taken: it can be given again.
    plait.initialize(model, CONFIG).close()


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path):
    folder = tmp_path / "job"
    config = {**CONFIG, "csv_monitor": CSV_JOB}
    engine = plait.initialize(nn.Linear(3, 1), config)
    folder.rmdir()
    folder.touch()

    words = "a tracker failed at step 1, and the run continues without it"

    def steps():
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()

    with pytest.warns(UserWarning, match=words):
        steps()
    assert engine.global_steps == 2
    engine.close()


def test_a_tracker_that_fails_at_the_end(monkeypatch):
    """The engine is closed, and so are the other trackers."""
    ended = []

    def finish(tracker):
        ended.append(tracker)
        raise ConnectionError("the server is gone")

    # This simulates a library whose server is gone.
    monkeypatch.setattr(trackers.CsvTracker, "finish", finish)
    engine = plait.initialize(nn.Linear(3, 1), {**CONFIG, "csv_monitor": CSV_JOB})
    with pytest.warns(UserWarning, match="a tracker failed at the end of the run: the server is"):
        engine.close()
    assert len(ended) == 1


def test_a_tracker_that_cannot_start():
    Path("job").touch()
    with pytest.raises(InputError, match=r"starting the trackers: .*job"):
        plait.initialize(nn.Linear(3, 1), {**CONFIG, "csv_monitor": CSV_JOB})


def settings_of(**sections):
    specs = resolve(load({**CONFIG, **sections}), world_size=1).trackers
    return {spec.name: spec.settings for spec in specs}


def test_defaults_of_a_file_with_a_run():
    on, run = {"enabled": True}, {"folder": "f"}
    settings = settings_of(csv_monitor=on, wandb=on, run=run)
    assert settings["csv_monitor"] == {"output_path": "f", "job_name": "csv_monitor"}
    assert settings["wandb"]["project"] == "plait"
    monitor = {"enabled": True, "output_path": "o"}
    for more, name in (({"run": run}, "csv_monitor"), ({}, "DeepSpeedJobName")):
        settings = settings_of(csv_monitor=monitor, **more)
        assert settings == {"csv_monitor": {"output_path": "o", "job_name": name}}


def test_explain_lists_what_is_honoured():
    tree = {
        "train_batch_size": 1,
        "wandb": {"enabled": True, "project": "x"},
        "comet": {"api_key": "hunter2", "samples_log_interval": 5},
        "tensorboard": {"enabled": False, "job_name": "x"},
    }
    found = explain(tree)
    rows = {row.key: (row.status.value, row.meaning) for row in found.keys}
    assert rows["wandb.enabled"][0] == rows["wandb.project"][0] == "supported"
    assert rows["comet.api_key"][0] == "ignored" and "COMET_API_KEY" in rows["comet.api_key"][1]
    assert rows["tensorboard.job_name"] == ("ignored", "tensorboard.enabled is false")
    assert not found.problems and "hunter2" not in str(found)


def test_callers_with_trackers_of_their_own():
    config = load({**CONFIG, "train_batch_size": 2, "wandb": {"enabled": True}})
    with pytest.raises(ConfigError, match=r'log_with="wandb"'):
        resolved_of(config, world_size=1, precision="no", accumulation=1, micro=2, hidden_size=None)
    with pytest.raises(ConfigError, match="or use plait.initialize"):
        plait.parallelize(nn.Linear(3, 1), {"csv_monitor": {"enabled": True}})
